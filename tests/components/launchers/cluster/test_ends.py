"""How pods ended, remembered through streams that break and pods that are gone."""

import time

import pytest
from fake_api import Fault
from fake_cluster import endless

from components.launchers.backend import Ending
from components.launchers.cluster.ends import Ends

MASTER = "train-master-0"


@pytest.fixture
def ends(backend, job, fake_cluster):
    """The ends of the job `train`, whose pods run until the test ends them."""
    fake_cluster.lives[MASTER] = endless
    backend.submit(job())
    with Ends(backend.cluster) as ends:
        ends.watch("training.kubeflow.org/job-name=train", lambda labels: 0)
        deadline = time.monotonic() + 10
        while not fake_cluster.requests("GET", "watch=true"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield ends


@pytest.fixture
def look(ends, backend):
    """Look at the pods; returns how the one before the present one ended."""

    def look():
        (pod,) = ends.remembered(backend.status("train")).pods
        return pod.before

    return look


def kill(fake_cluster):
    fake_cluster.pod(MASTER).exit(137, "OOMKilled")


def test_a_pod_that_is_gone_is_remembered(look, fake_cluster):
    assert look() is None
    kill(fake_cluster)
    assert look() == Ending("OOMKilled", "", 137)
    fake_cluster.pod(MASTER).exit(143)
    assert look() == Ending("Error", "", 143)


def test_a_pod_that_was_deleted_is_told_so(look, fake_cluster):
    assert look() is None
    old = fake_cluster.pod(MASTER)
    fake_cluster.delete_pod(old)
    fake_cluster._make_pod(fake_cluster.job("train"), "master", 0, {"spec": old.body["spec"]})
    assert look() == Ending("deleted")


def test_nothing_is_lost_between_two_streams(look, fake_cluster, timings):
    """A watch that is silent is begun anew again and again, and goes on with the last change it knows of."""
    assert look() is None
    for _ in range(3):
        fake_cluster.faults.append(Fault("GET", "watch=true", status=503))
        time.sleep(timings.quiet + 0.02)  # About here the stream ends, and the next one fails.
        kill(fake_cluster)
        assert look() == Ending("OOMKilled", "", 137)
    resumed = [seen for seen in fake_cluster.requests("GET", "watch=true") if "resourceVersion=" in seen.path]
    assert resumed


def test_changes_that_are_not_kept_any_more_are_no_end(look, fake_cluster, timings):
    assert look() is None
    fake_cluster.forgotten = 10**6
    time.sleep(2 * timings.quiet)
    kill(fake_cluster)
    deadline = time.monotonic() + 5
    while look() != Ending("OOMKilled", "", 137):
        assert time.monotonic() < deadline
        kill(fake_cluster)


def test_a_pod_whose_end_nobody_saw_is_waited_for_once(look, fake_cluster, timings):
    assert look() is None
    fake_cluster.denied.add(("watch", "pods"))
    time.sleep(timings.quiet + 0.3)
    kill(fake_cluster)
    assert look() is None
    begun = time.monotonic()
    assert look() is None
    assert time.monotonic() - begun < 0.5
