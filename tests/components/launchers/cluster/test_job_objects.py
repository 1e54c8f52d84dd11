"""A runtime that a TrainJob brings along: made before it, owned by it, gone with it."""

import time

import pytest
from fake_api import Fault

from components.launchers.cluster.backend import ClusterBackend
from components.launchers.cluster.client import ApiError
from components.launchers.cluster.kinds import KINDS

RUNTIMES = "trainingruntimes"


@pytest.fixture
def backend(fake_cluster, timings):
    fake_cluster.installed = {"trainjobs"}
    return ClusterBackend.connect(timings=timings, kinds=[KINDS["trainjob"]])


def runtimes(cluster):
    return [body for (resource, *_), body in list(cluster.objects.items()) if resource == RUNTIMES]


def owners(cluster):
    (runtime,) = runtimes(cluster)
    return [(owner["kind"], owner["uid"]) for owner in runtime["metadata"].get("ownerReferences") or []]


def gone(cluster, seconds=30):
    end = time.monotonic() + seconds
    while runtimes(cluster) and time.monotonic() < end:
        time.sleep(0.01)
    return not runtimes(cluster)


def test_a_runtime_of_its_own_belongs_to_the_job_and_goes_with_it(backend, job, fake_cluster):
    backend.submit(job(backoff=3))
    assert owners(fake_cluster) == [("TrainJob", fake_cluster.job("train")["metadata"]["uid"])]
    (runtime,) = runtimes(fake_cluster)
    # With it a job that is deleted in the foreground would wait for ever.
    assert "blockOwnerDeletion" not in str(runtime)
    backend.stop("train")
    assert gone(fake_cluster)


def test_a_job_that_is_refused_leaves_no_runtime(backend, job, fake_cluster):
    fake_cluster.faults.append(Fault("POST", "/trainjobs", status=422, message="no such field"))
    with pytest.raises(ApiError, match="no such field"):
        backend.submit(job(backoff=3))
    assert runtimes(fake_cluster) == []
    assert fake_cluster.job("train") is None


def test_the_runtime_of_a_deleted_job_is_taken_over_before_the_cluster_collects_it(
    backend, job, fake_cluster
):
    fake_cluster.trainer.collection_seconds = 0.3
    fake_cluster.lives["train-node-0-0"] = lambda pod: (pod.run(), pod.exit(1))
    backend.submit(job(backoff=3))
    while not backend.status("train").phase.final:
        time.sleep(0.01)
    backend.submit(job(backoff=3))  # It failed: it is deleted, and made anew.
    time.sleep(0.6)
    assert owners(fake_cluster) == [("TrainJob", fake_cluster.job("train")["metadata"]["uid"])]


@pytest.mark.slow
@pytest.mark.parametrize(
    "message",
    ['TrainingRuntime.trainer.kubeflow.org "NAME" not found: must be created', "runtime 'NAME' not found"],
    ids=["Trainer", "Kueue"],
)
def test_a_runtime_that_a_controller_has_not_seen_yet_is_waited_for(backend, job, fake_cluster, message):
    backend.submit(job(backoff=3))
    (runtime,) = runtimes(fake_cluster)
    words = message.replace("NAME", runtime["metadata"]["name"])
    backend.stop("train")
    fake_cluster.faults.append(Fault("POST", "/trainjobs", status=403, message=words, times=2))
    backend.submit(job(backoff=3))
    assert owners(fake_cluster) == [("TrainJob", fake_cluster.job("train")["metadata"]["uid"])]
    backend.stop("train")
    fake_cluster.faults.append(Fault("POST", "/trainjobs", status=403, message=words, times=10**6))
    with pytest.raises(ApiError, match="not found"):
        backend.submit(job(backoff=3))
    assert runtimes(fake_cluster) == []


@pytest.mark.parametrize("away", [0, 10**6], ids=["for a moment", "for long"])
def test_a_job_whose_answer_was_lost_owns_its_runtime(backend, job, fake_cluster, away):
    fake_cluster.faults.append(Fault("POST", "/trainjobs", lost=True))
    fake_cluster.faults.append(Fault("POST", "/trainjobs", drop=True, times=away))
    backend.submit(job(backoff=3))
    assert owners(fake_cluster) == [("TrainJob", fake_cluster.job("train")["metadata"]["uid"])]


def test_a_runtime_that_may_not_be_patched_is_reported_and_the_job_runs(backend, job, fake_cluster, caplog):
    fake_cluster.denied.add(("patch", RUNTIMES))
    backend.submit(job(backoff=3))
    assert fake_cluster.job("train")
    assert "stays when its job is deleted" in caplog.text
