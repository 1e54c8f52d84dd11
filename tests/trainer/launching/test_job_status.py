"""A training's progress, read from its log, and reported to a job's status at no cost to it."""

import logging
import re
import socket
import time

import pytest
from finished_runs import stopped_after
from status_server import StatusServer

from trainer.base import log
from trainer.launching import job_status
from trainer.launching.job_status import Progress, Reporter, parse
from trainer.trackers.training_log import read_rows
from trainer.training.loop import train

pytestmark = pytest.mark.usefixtures("forked_processes")

LOG = """\
12:00:00 train: resumed at step 90 of 600: 16 images a step on 2 processes
12:00:10 kubedet: train 100/600 steps 17%, 3.1 steps/s, 2:41 left, loss 0.714, 50 images/s
12:00:20 kubedet: validate 70/80 images 88%, 7.0 images/s, 0:01 left
12:00:21 train: epoch 3: coco/AP 0.312, coco/AP50 0.517
12:00:30 kubedet: train 133/600 steps 22%, 0.1 steps/s, 1:02:03 left, loss 0.699, 49 images/s
12:00:31 NCCL INFO something else
12:00:40 kubedet: inspect train 5/7 images 71%, 7.0 images/s, loss 9.0, 1 images/s
""".splitlines()


def test_the_newest_of_each_number_is_found():
    assert parse(LOG) == Progress(22, 3723, {"loss": 0.699, "images_per_second": 49.0, "coco/AP": 0.312})
    assert parse([f"[pod-0] 2026-11-22T12:00:00.1Z {line}  \n" for line in LOG]) == parse(LOG)
    assert parse(LOG[:3]) == Progress(16, 161, {"loss": 0.714, "images_per_second": 50.0})


def test_a_training_that_has_just_been_taken_up_again_has_a_place_and_no_time_left_yet():
    assert parse(LOG[:1]) == Progress(15)
    assert parse([*LOG, LOG[0]]) == Progress(15, None, parse(LOG).metrics)


@pytest.mark.parametrize(
    "lines", [[], [""], LOG[2:4], LOG[5:], ["train steps 3%", "train 3 steps, 1.0 steps/s"]]
)
def test_lines_that_tell_of_no_steps(lines):
    assert parse(lines) is None


@pytest.mark.parametrize("eta", [None, 0.4, 59.6, 3599.7, 90000.0])
@pytest.mark.parametrize("note", ["", "loss 0.5, 12 images/s", "17 failed: not found, 3/4 steps 75%"])
def test_a_line_of_progress_is_read_as_it_was_written(eta, note):
    event = {
        "task": "download",
        "done": 3,
        "total": 40,
        "unit": "images",
        "rate": 1.25,
        "eta": eta,
        "note": note,
    }
    parsed = log.parse(f"12:00:00 kubedet: {log.describe(event)}")
    assert parsed == {**event, "rate": 1.2, "eta": None if eta is None else float(round(eta))}


def test_the_log_of_a_training_is_parsed(shards, tiny, tmp_path, caplog, monkeypatch):
    monkeypatch.delenv(log.PROGRESS_FILE, raising=False)
    monkeypatch.setattr(log, "_PLAIN_INTERVAL", 0.0)  # A line after every step.
    with caplog.at_level(logging.INFO):
        train(tiny(), shards, str(tmp_path))
    lines = [f"12:00:00 {each.name}: {each.getMessage()}" for each in caplog.records]
    rows = {(row["kind"], row["step"]): row for row in read_rows(str(tmp_path))}
    first = next(turn for turn, line in enumerate(lines) if "train 3/12 steps" in line)
    row = rows["train", 3]
    progress = parse(lines[: first + 1])
    assert progress.percent == 25 and progress.remaining_seconds is not None
    assert progress.metrics == {
        "loss": pytest.approx(row["loss"], abs=6e-4),
        "images_per_second": pytest.approx(row["images_per_second"], abs=0.6),
    }
    whole = parse(lines)
    assert (whole.percent, whole.remaining_seconds) == (100, 0)
    assert whole.metrics["coco/AP"] == pytest.approx(rows["val", 12]["coco/AP"], abs=6e-4)
    assert whole.metrics["loss"] == pytest.approx(rows["train", 12]["loss"], abs=6e-4)


@pytest.fixture
def server(tmp_path):
    each = StatusServer(tmp_path)
    yield each
    each.close()


@pytest.fixture
def reporting(server, monkeypatch):
    """Start a reporter that sends every so many seconds; it is closed at the end."""
    started = []

    def start(interval=0.05):
        monkeypatch.setattr(job_status, "_INTERVAL", interval)
        started.append(Reporter(server.url, str(server.ca), str(server.token)))
        return started[-1]

    yield start
    for each in started:
        each.close()


def at(done, total=200, worked=0):
    bar = log.Bar("train", total, "steps", None, done=done - worked)
    if worked:
        bar.update(worked)
    return bar


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_a_state_is_what_the_server_takes(server, reporting):
    each = reporting()
    each.measure({"coco/AP": 0.25})
    each.show(at(50))
    server.wait_for(1)
    each.measure({"loss": 1.23456789, "images_per_second": 41.0})
    each.show(at(99, worked=9))
    each.close()
    first, last = server.states[0], server.states[-1]
    assert first["progressPercentage"] == 25 and "estimatedRemainingSeconds" not in first
    assert first["metrics"] == [{"name": "coco/AP", "value": "0.25"}]
    assert last["progressPercentage"] == 49 and isinstance(last["estimatedRemainingSeconds"], int)
    assert last["metrics"] == [
        {"name": "coco/AP", "value": "0.25"},
        {"name": "loss", "value": "1.23457"},
        {"name": "images_per_second", "value": "41"},
    ]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", last["lastUpdatedTime"])


def test_the_token_of_now_is_sent(server, reporting):
    each = reporting()
    each.show(at(1))
    server.wait_for(1)
    server.token.write_text("second")
    each.show(at(2))
    server.wait_for(2)
    assert [token for _, token in server.asked] == ["Bearer first", "Bearer second"]


def test_the_last_is_sent_at_once(server, reporting):
    each = reporting(interval=60)
    each.show(at(0))
    server.wait_for(1)
    each.show(at(200))
    each.measure({"coco/AP": 0.5})
    begun = time.monotonic()
    each.close()
    assert time.monotonic() - begun < 30
    assert len(server.states) == 2
    assert server.states[-1]["progressPercentage"] == 100
    assert server.states[-1]["estimatedRemainingSeconds"] == 0
    assert server.states[-1]["metrics"] == [{"name": "coco/AP", "value": "0.5"}]


@pytest.mark.parametrize(("code", "refuses"), [(403, True), (429, False)])
def test_a_server_that_refuses_is_asked_three_times(code, refuses, server, reporting, caplog):
    server.answer = code, {"message": "that is it"}
    each = reporting(interval=0.02)
    each.show(at(1))
    server.wait_for(3 if refuses else 6)
    time.sleep(0.3)
    each.show(at(2))
    time.sleep(0.1)
    assert (len(server.asked) == 3) is refuses
    assert warnings(caplog) == [
        f"the job's status does not show the progress: {code} that is it; the training continues"
    ]


@pytest.mark.parametrize("what", ["nobody", "untrusted", "a broken token"])
def test_what_is_wrong_is_said_once_and_no_more(what, server, reporting, caplog, tmp_path):
    each = reporting(interval=0.02)
    if what == "nobody":
        server.close()
    elif what == "untrusted":
        (tmp_path / "other").mkdir()
        other = StatusServer(tmp_path / "other")
        other.close()
        each._ca = str(other.ca)
    else:
        server.token.write_text("secret\nbroken")
    for done in range(10):
        each.show(at(done))
        time.sleep(0.02)
    each.close()
    (said,) = warnings(caplog)
    assert said.startswith("the job's status does not show the progress: ") and "secret" not in said
    assert server.states == []
    if what == "nobody":
        assert "Connection refused" in said
    if what == "untrusted":
        assert "certificate verify failed" in said


def test_a_server_that_never_answers_does_not_hold_up_the_end(monkeypatch, server, tmp_path):
    monkeypatch.setattr(job_status, "_CLOSE_SECONDS", 0.5)
    monkeypatch.setattr(job_status, "_TIMEOUT", 60.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        each = Reporter(f"https://127.0.0.1:{silent.getsockname()[1]}/x", str(server.ca), str(server.token))
        begun = time.monotonic()
        each.show(at(1))
        each.measure({"loss": 1.0})
        each.close()
        assert time.monotonic() - begun < 30
    each._thread.join(60)  # It hears that the server is gone.


def test_a_training_that_is_stopped_and_goes_on_shows_where(shards, tiny, tmp_path, monkeypatch, server):
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(job_status, "_INTERVAL", 60)
    output = str(tmp_path / "run")
    with stopped_after(8):
        train(tiny(), shards, output)
    assert [state["progressPercentage"] for state in server.states] == [0, 75]
    train(tiny(), shards, output)
    _, stopped, first, *_, last = server.states
    assert first["progressPercentage"] == 75 and "estimatedRemainingSeconds" not in first
    assert [metric["name"] for metric in first["metrics"]] == ["coco/AP"]
    assert first["metrics"][0] in stopped["metrics"]
    assert last["progressPercentage"] == 100
    assert {each["name"] for each in last["metrics"]} == {"loss", "images_per_second", "coco/AP"}
