"""Progress: events for a waiting parent, plain lines elsewhere, nothing where it is not wanted."""

import json
import logging

import pytest

from trainer.base import events, log


def read_events(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_events_go_to_the_file_and_end_with_the_end(tmp_path, monkeypatch):
    path = tmp_path / "progress"
    monkeypatch.setenv(events.FILE, str(path))
    with log.progress("train", 4, "steps", shown=False) as bar:
        bar.update()
    assert not path.exists()
    with log.progress("train", 50, "steps", done=10) as bar:
        for _ in range(40):
            bar.update(note="loss 1.0")
    written = read_events(path)
    assert written[0]["done"] == 11 and not written[0]["end"]
    assert len(written) < 41, "they are limited to a few a second"
    last = written[-1]
    assert last["end"] and (last["done"], last["total"], last["unit"]) == (50, 50, "steps")
    assert last["note"] == "loss 1.0" and last["eta"] == 0


def test_what_was_found_done_counts_but_not_for_the_rate(tmp_path, monkeypatch):
    monkeypatch.setenv(events.FILE, str(tmp_path / "progress"))
    with log.progress("download", 100, "images") as bar:
        bar.skip(60)
        assert (bar.done, bar.rate, bar.eta) == (60, 0, None)
        bar.update(20)
        assert bar.eta == pytest.approx(20 / bar.rate, rel=0.5)
    last = read_events(tmp_path / "progress")[-1]
    assert (last["done"], last["worked"]) == (80, 20)


def test_plain_lines_where_nobody_watches(monkeypatch, caplog):
    monkeypatch.delenv(events.FILE, raising=False)
    with caplog.at_level("INFO"), log.progress("train", 4, "steps") as bar:
        bar.update(2, note="loss 0.5")
    (line,) = caplog.messages
    assert line.startswith("train 2/4 steps 50%") and "left" in line and line.endswith("loss 0.5")


def test_the_rate_is_that_of_late_and_at_the_end_that_of_the_whole(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(log.time, "monotonic", lambda: now[0])
    bar = log.Bar("train", 1000, "steps", None)
    for seconds in [10.0] * 10 + [0.5] * 100:  # Slow for 100 s while it warms up, then fast for 50 s.
        now[0] += seconds
        bar.update()
    assert bar.rate == pytest.approx(2.0, rel=0.05)
    assert bar.eta == pytest.approx(890 / 2.0, rel=0.05)
    assert bar.state(end=True).rate == pytest.approx(110 / 150)


@pytest.fixture
def logging_restored():
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], _ = before
    root.setLevel(before[1])


@pytest.mark.usefixtures("logging_restored")
@pytest.mark.parametrize(("rank", "said"), [("0", ["told", "wrong"]), ("1", ["wrong"])])
def test_of_several_processes_one_tells_and_all_warn(rank, said, capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", rank)
    log.setup()
    logging.getLogger("train").info("told")
    logging.getLogger("train").warning("wrong")
    assert [line.rpartition(" ")[2] for line in capsys.readouterr().err.splitlines()] == said
