"""How pods ended, through broken streams and deleted pods."""

import time

import pytest
from fake_api import Fault
from fake_pod import endless
from kinds import both
from patience import until

from components.launchers.backend import Ending
from components.launchers.cluster.pods import PodHistory


@pytest.fixture
def ends(backend, job, fake_cluster, kind, first):
    """The ends of the job `train`, whose pods run until the test ends them."""
    fake_cluster.lives[first] = endless
    backend.submit(job())
    ends = PodHistory(backend.cluster)
    ends.watch(kind, fake_cluster.job("train"))
    until(lambda: fake_cluster.requests("GET", "watch=True"))
    yield ends
    ends.stop()


@pytest.fixture
def look(ends, backend):
    """Look at the pods; returns how the one before the present one ended."""

    def look():
        deadline = time.monotonic() + 60
        while True:
            status = backend.status("train")
            if [pod.phase for pod in status.pods] == ["Running"]:
                return ends.completed(status).pods[0].before
            assert time.monotonic() < deadline

    return look


@pytest.fixture
def kill(fake_cluster, first):
    """Kill the pod, as it does that runs out of memory, and wait for the next one."""
    return lambda: end(fake_cluster, first, 137, "OOMKilled")


def end(fake_cluster, name, *how):
    old = fake_cluster.pod(name)
    old.exit(*how)
    until(lambda: fake_cluster.pod(name) not in (old, None) and fake_cluster.pod(name).containers[0])


@both
def test_a_deleted_pod_is_reported(look, fake_cluster, kind, first):
    assert look() is None
    old = fake_cluster.pod(first)
    fake_cluster.delete_pod(old)
    if kind.name == "pytorchjob":  # JobSet does it by itself.
        fake_cluster._make_pod(fake_cluster.job("train"), "worker", 0, {"spec": old.body["spec"]})
    assert look() == Ending("deleted")


def test_nothing_is_lost_between_two_streams(look, fake_cluster, timings, kill):
    """A watch that is silent is begun anew again and again, and goes on with the last change it knows of."""
    assert look() is None
    for _ in range(3):
        fake_cluster.faults.append(Fault("GET", "watch=True", status=503))
        time.sleep(timings.quiet + 0.02)  # About here the stream ends, and the next one fails.
        kill()
        assert look() == Ending("OOMKilled", "", 137)
    resumed = [seen for seen in fake_cluster.requests("GET", "watch=True") if "resourceVersion=" in seen.path]
    assert resumed


def test_changes_that_are_not_kept_any_more_are_no_end(look, fake_cluster, timings, kill):
    assert look() is None
    fake_cluster.forgotten = 10**6
    time.sleep(2 * timings.quiet)
    kill()
    deadline = time.monotonic() + 60
    while look() != Ending("OOMKilled", "", 137):
        assert time.monotonic() < deadline
        kill()
