"""A training's progress, read from its log, and reported to a job's status at no cost to it."""

import re
import socket
import time

import pytest
from event_lines import progress, resumed, scored
from finished_runs import stopped_after
from status_server import StatusServer

from trainer.base import events, log
from trainer.launching import job_status
from trainer.launching.job_status import Reporter, TrainingProgress, read
from trainer.trackers.training_log import read_rows
from trainer.training.loop import train

LOG = [
    resumed(90, 600),
    progress(100, 600, eta=161.0, metrics={"loss": 0.714, "images_per_second": 50.0}),
    "12:00:20 kubedet: validate 70/80 images 88%, 7.0 images/s, 0:01 left",
    scored(AP=0.312, AP50=0.517),
    progress(133, 600, eta=3723.0, metrics={"loss": 0.699, "images_per_second": 49.0}),
    "12:00:31 NCCL INFO something else",
    progress(5, 7).replace("steps", "images"),
]


def test_the_newest_of_each_number_is_found():
    newest = {"loss": 0.699, "images_per_second": 49.0, "coco/AP": 0.312}
    assert read(LOG) == TrainingProgress(22, 3723, newest)
    assert read(LOG[:3]) == TrainingProgress(16, 161, {"loss": 0.714, "images_per_second": 50.0})


def test_a_resumed_training_has_a_share_and_no_remaining_time_yet():
    assert read(LOG[:1]) == TrainingProgress(15)
    assert read([*LOG, LOG[0]]) == TrainingProgress(15, None, read(LOG).metrics)


@pytest.mark.parametrize("lines", [[], [""], LOG[2:4], LOG[5:], ['{"event": "progress"}', "{"]])
def test_lines_without_steps(lines):
    assert read(lines) is None


def test_a_training_reports_its_progress(shards, tiny, tmp_path, monkeypatch):
    file = tmp_path / "events"
    monkeypatch.setenv(events.FILE, str(file))
    monkeypatch.setattr(log, "_FILE_INTERVAL", 0.0)  # A line after every step.
    train(tiny(), shards, str(tmp_path))
    lines = file.read_text().splitlines()
    rows = {(row["kind"], row["step"]): row for row in read_rows(str(tmp_path))}
    first = next(turn for turn, line in enumerate(lines) if '"task": "train", "done": 3, "total": 12' in line)
    newest = read(lines[: first + 1])
    assert newest.percent == 25 and newest.remaining_seconds is not None
    assert newest.metrics["loss"] == pytest.approx(rows["train", 3]["loss"])
    whole = read(lines)
    assert (whole.percent, whole.remaining_seconds) == (100, 0)
    assert whole.metrics["coco/AP"] == pytest.approx(rows["val", 12]["coco/AP"])


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
