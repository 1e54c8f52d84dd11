"""Progress in a job's status: the newest, seldom, with the token of now, and never at the training's cost."""

import re
import socket
import time

import pytest
from finished_runs import stopped_after
from status_server import StatusServer

from trainer.base import log
from trainer.launching import job_status
from trainer.launching.job_status import Reporter
from trainer.training.loop import train


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
