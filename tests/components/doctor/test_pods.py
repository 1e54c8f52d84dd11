"""What the pods of a job find."""

import json

import pytest
from fake_exec import give_exec
from fake_pod import endless

from components.doctor import pods
from components.launchers.cluster.backend import ClusterBackend
from components.launchers.spec import JobSpec
from components.launchers.timings import Timings
from trainer.launching.doctor import Check, Needs


@pytest.fixture
def backend(fake_cluster):
    """A cluster with the job `two`, both of whose pods run."""
    give_exec(fake_cluster)
    fake_cluster.lives |= {"two-master-0": endless, "two-worker-0": endless}
    backend = ClusterBackend.connect(timings=Timings(backoff=0.01, patience=0.2))
    backend.submit(JobSpec(name="two", image="i:1", nodes=2, command=("true",)))
    while {pod.phase for pod in backend.status("two").pods} != {"Running"}:
        pass
    return backend


def test_every_pod_is_looked_into(backend, monkeypatch):
    output = json.dumps([{"title": "GPUs", "state": "missing", "detail": "0 of 8", "fix": "ask for them"}])
    monkeypatch.setattr(pods, "_command", lambda needs: ["printf", "%s", output])
    assert list(pods.check(backend, "two", Needs(gpus=8))) == [
        Check(f"{pod}: GPUs", "missing", "0 of 8", "ask for them") for pod in ("two-master-0", "two-worker-0")
    ]


def test_an_image_without_the_trainer_is_told(backend, monkeypatch):
    monkeypatch.setattr(pods, "_command", lambda needs: ["echo", "python: No module named trainer"])
    checks = list(pods.check(backend, "two", Needs()))
    assert [check.state for check in checks] == ["missing"] * 2
    assert "does not work" in checks[0].detail


def test_an_image_without_python_is_told(backend, monkeypatch):
    monkeypatch.setattr(pods, "_command", lambda needs: ["nonsense"])
    checks = list(pods.check(backend, "two", Needs()))
    assert "cannot run nonsense" in checks[0].detail


def test_a_job_that_is_not_there_or_does_not_run_is_told(backend, fake_cluster):
    assert [check.detail for check in pods.check(backend, "none", Needs())] == ["namespace default has none"]
    fake_cluster.lives["late-master-0"] = lambda pod: pod.sleep(60)
    backend.submit(JobSpec(name="late", image="i:1", command=("true",)))
    assert [check.detail for check in pods.check(backend, "late", Needs())] == ["is pending, no pod runs"]
