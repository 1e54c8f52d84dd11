"""Progress: events for a waiting parent, plain lines elsewhere, nothing where it is not wanted."""

import json

import pytest

from trainer import log


@pytest.mark.parametrize(
    ("seconds", "text"), [(4.6, "0:05"), (0, "0:00"), (61, "1:01"), (754, "12:34"), (3723, "1:02:03")]
)
def test_clock(seconds, text):
    assert log.clock(seconds) == text


def events(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_events_go_to_the_file_and_end_with_the_end(tmp_path, monkeypatch):
    path = tmp_path / "progress"
    monkeypatch.setenv(log.PROGRESS_FILE, str(path))
    with log.progress("train", 50, "steps", done=10) as bar:
        for _ in range(40):
            bar.update(note="loss 1.0")
    found = events(path)
    assert found[0]["done"] == 11 and not found[0]["end"]
    assert len(found) < 41, "they are limited to a few a second"
    last = found[-1]
    assert last["end"] and (last["done"], last["total"], last["unit"]) == (50, 50, "steps")
    assert last["note"] == "loss 1.0" and last["eta"] == 0


def test_what_was_found_done_counts_but_not_for_the_rate(tmp_path, monkeypatch):
    monkeypatch.setenv(log.PROGRESS_FILE, str(tmp_path / "progress"))
    with log.progress("download", 100, "images") as bar:
        bar.skip(60)
        assert (bar.done, bar.rate, bar.eta) == (60, 0, None)
        bar.update(20)
        assert bar.eta == pytest.approx(20 / bar.rate, rel=0.5)
    assert events(tmp_path / "progress")[-1]["done"] == 80


def test_the_end_is_told_after_an_error_too(tmp_path, monkeypatch):
    monkeypatch.setenv(log.PROGRESS_FILE, str(tmp_path / "progress"))
    with pytest.raises(KeyError), log.progress("shard", None, "images") as bar:
        bar.update(3)
        raise KeyError
    assert events(tmp_path / "progress")[-1] == events(tmp_path / "progress")[-1] | {
        "end": True,
        "total": None,
    }


def test_plain_lines_where_nobody_watches(monkeypatch, caplog):
    monkeypatch.delenv(log.PROGRESS_FILE, raising=False)
    with caplog.at_level("INFO"), log.progress("train", 4, "steps") as bar:
        bar.update(2, note="loss 0.5")
    (line,) = caplog.messages
    assert line.startswith("train 2/4 steps 50%") and "left" in line and line.endswith("loss 0.5")


def test_other_ranks_show_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv(log.PROGRESS_FILE, str(tmp_path / "progress"))
    with log.progress("train", 4, "steps", shown=False) as bar:
        bar.update()
    assert not (tmp_path / "progress").exists()


def test_the_rate_counts_this_process_alone():
    bar = log.Bar("train", 100, "steps", log._NoSink(), done=90)
    assert bar.eta is None
    bar.update(5)
    assert bar.rate > 0 and bar.eta == pytest.approx(5 / bar.rate, rel=0.5)
