"""`kubedet job` of jobs that wait in a queue of Kueue."""

import json

import pytest
from fake_kueue import QUOTA, give_kueue
from fake_pod import endless

LONG_AGO = "2026-01-01T00:00:00Z"


@pytest.fixture
def submit(kubedet, fake_cluster):
    """Submits a job to the queue `gpus`."""

    def submit(name):
        fake_cluster.lives[f"{name}-master-0"] = endless
        words = ["--backend", "pytorchjob", "--name", name, "--image", "i:1", "--set", "kueue_queue=gpus"]
        return kubedet("job", "submit", *words, "--", "true")

    return submit


def test_status_has_position_and_reason(kubedet, submit, fake_cluster):
    kueue = give_kueue(fake_cluster)
    submit("a")
    kueue.ahead("other")
    kueue.waits("a", QUOTA)
    code, out, _ = kubedet("job", "status", "a")
    assert code == 0
    assert "on 1 node, a PyTorchJob, queue gpus\n" in out
    assert out.endswith(f"\na: position 2 in queue gpus: {QUOTA}\n")
    status = json.loads(kubedet("job", "status", "-o", "json", "a")[1])
    assert (status["phase"], status["reason"], status["queue"]) == ("suspended", "Queued", "gpus")
    assert status["message"] == f"position 2 in queue gpus: {QUOTA}"


def test_status_of_a_job_that_nobody_serves_says_what_to_do(kubedet, submit, fake_cluster):
    give_kueue(fake_cluster, serves=())
    submit("a")
    assert "fix: " not in kubedet("job", "status", "a")[1]  # It is there since a moment.
    fake_cluster.job("a")["metadata"]["creationTimestamp"] = LONG_AGO
    lines = kubedet("job", "status", "a")[1].splitlines()
    assert lines[-3:-1] == [
        "a: in queue gpus: Kueue has no Workload for it",
        "Kueue (API kueue.x-k8s.io/v1beta2)",
    ]
    assert lines[-1].startswith("fix: name kubeflow.org/pytorchjob in integrations.frameworks")
