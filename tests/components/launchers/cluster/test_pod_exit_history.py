"""How pods ended, through broken streams and deleted pods."""

import pytest
from cluster.api import Fault
from cluster.pods import endless
from kinds import both

from components.launchers.backend import Ending
from components.launchers.cluster.pods import PodHistory


@pytest.fixture
def ends(backend, job, simulated, kind, first):
    """The ends of the job `train`, whose pods run until the test ends them."""
    simulated.lives[first] = endless
    backend.submit(job())
    ends = PodHistory(backend.cluster)
    ends.watch(kind, simulated.job("train"))
    simulated.clock.until(lambda: simulated.requests("GET", "watch=True"))
    yield ends
    ends.stop()


@pytest.fixture
def look(ends, backend):
    """Look at the pods; returns how the one before the present one ended."""

    def look():
        while True:
            status = backend.status("train")
            if [pod.phase for pod in status.pods] == ["Running"]:
                return ends.with_restarts(status).pods[0].before

    return look


@pytest.fixture
def kill(simulated, first):
    """Kill the pod, as it does that runs out of memory, and wait for the next one."""
    return lambda: end(simulated, first, 137, "OOMKilled")


def end(simulated, name, *how):
    old = simulated.pod(name)
    old.exit(*how)
    simulated.clock.until(
        lambda: simulated.pod(name) not in (old, None) and simulated.pod(name).containers[0]
    )


@both
def test_a_deleted_pod_is_reported(look, simulated, kind, first):
    assert look() is None
    old = simulated.pod(first)
    simulated.delete_pod(old)
    assert look() == Ending("deleted")


def test_nothing_is_lost_between_two_streams(look, simulated, timings, kill):
    """A watch that is silent is begun anew again and again, and goes on with the last change it knows of."""
    assert look() is None
    for _ in range(3):
        simulated.faults.append(Fault("GET", "watch=True", status=503))
        simulated.clock.sleep(timings.quiet + 0.02)  # About here the stream ends, and the next one fails.
        kill()
        assert look() == Ending("OOMKilled", "", 137)
    resumed = [seen for seen in simulated.requests("GET", "watch=True") if "resourceVersion=" in seen.path]
    assert resumed


def test_changes_that_are_not_kept_any_more_are_no_end(look, simulated, timings, kill):
    assert look() is None
    simulated.forgotten = 10**6
    simulated.clock.sleep(2 * timings.quiet)
    kill()
    deadline = simulated.clock.monotonic() + 60
    while look() != Ending("OOMKilled", "", 137):
        assert simulated.clock.monotonic() < deadline
        kill()
