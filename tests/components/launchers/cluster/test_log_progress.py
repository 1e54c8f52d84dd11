"""How far a job is: what its own status says, or else the end of its log."""

import time

import pytest
from fake_api import Fault

from components.launchers.cluster.logs import Readings
from trainer.base import log
from trainer.launching import job_status
from trainer.launching.job_status import LOSS, SPEED

MASTER = "train-master-0"
EVENT = {
    "task": job_status.TASK, "done": 430, "total": 1000, "unit": job_status.UNIT, "rate": 2.0, "eta": 285.0,
    "note": job_status.measured(0.532, 41.0), "end": False,
}  # fmt: skip


@pytest.fixture
def running(backend, job, fake_cluster):
    """A job that runs, and its pod."""
    fake_cluster.lives[MASTER] = lambda pod: (pod.run(), pod.sleep(3600))
    backend.submit(job())
    end = time.monotonic() + 60
    while backend.status("train").phase != "running":
        assert time.monotonic() < end
        time.sleep(0.01)
    return backend.status("train"), fake_cluster.pod(MASTER)


def test_the_log_of_rank_0_tells(backend, running):
    status, pod = running
    assert backend.with_progress(status).progress is None
    pod.say(f"12:00:00 train: {log.describe(EVENT)}", "something else")
    assert Readings(backend.cluster).completed(status).progress == job_status.Progress(
        43, 285, {LOSS: 0.532, SPEED: 41.0}
    )


def test_a_log_is_read_again_only_after_a_while(backend, running, fake_cluster, monkeypatch):
    status, pod = running
    for _ in range(5):
        backend.with_progress(status)
    assert len(fake_cluster.requests("GET", "/log")) == 1
    pod.say(f"12:00:00 train: {log.describe(EVENT)}")
    monkeypatch.setattr("components.launchers.cluster.logs._FRESH", 0.0)
    assert backend.with_progress(status).progress.percent == 43


def test_a_log_that_may_not_be_read_is_no_trouble(backend, running, fake_cluster):
    status, _ = running
    fake_cluster.faults.append(Fault("GET", "/log", status=403, times=9))
    assert backend.with_progress(status) == status
