"""What the doctor finds in a queue of Kueue."""

import pytest
from fake_kueue import give_kueue

from components.doctor.queue import check
from components.launchers.cluster.backend import ClusterBackend
from components.launchers.render import trainjob
from components.launchers.spec import JobSpec
from components.launchers.timings import Timings

PYTORCH, TRAIN = "kubeflow.org/pytorchjob", "trainer.kubeflow.org/trainjob"
LONG_AGO = "2026-01-01T00:00:00Z"


@pytest.fixture
def backend(fake_cluster):
    fake_cluster.installed |= {"trainjobs"}
    return ClusterBackend.connect(timings=Timings(backoff=0.01, patience=0.2))


@pytest.fixture
def look(backend, monkeypatch):
    """Checks the queue `gpus`; returns the findings by title."""
    monkeypatch.setattr("components.doctor.queue._PATIENCE", 0.2)
    return lambda queue="gpus": {found.title: found for found in check(backend, queue)}


def hide_configuration(fake_cluster):
    fake_cluster.denied.add(("get", "configmaps"))


def test_a_queue_that_takes_jobs_of_both_kinds_is_well_and_nothing_is_made(look, fake_cluster):
    give_kueue(fake_cluster)
    found = look()
    assert {item.state for item in found.values()} == {"ok"}
    assert found["Kueue"].detail == "Kueue v0.19.2 (API kueue.x-k8s.io/v1beta2)"
    assert found["queue gpus"].detail == "active, of ClusterQueue gpus-of-all; 2 wait, 1 are admitted"
    assert found["PyTorchJobs in Kueue"].detail == "served, by its configuration"
    assert found["TrainJobs in Kueue"].detail == "served, by its configuration"
    assert found["jobs in queues"].detail == "0 wait, none of them in vain"
    assert not [seen for seen in fake_cluster.seen if seen.method != "GET"]


def test_without_kueue_all_is_said(look):
    (found,) = look().values()
    assert (found.title, found.state) == ("Kueue", "missing")
    assert "leave kueue_queue out" in found.fix


def test_a_queue_that_does_not_exist_is_missing(look, fake_cluster):
    give_kueue(fake_cluster)
    found = look("none")["queue none"]
    assert (found.state, found.detail) == ("missing", "namespace default has no such LocalQueue")


def test_a_queue_that_takes_nothing_says_why(look, fake_cluster):
    give_kueue(fake_cluster).queue("gpus", active=False, message="Can't submit new workloads to clusterQueue")
    found = look()["queue gpus"]
    assert found.state == "missing"
    assert "ClusterQueueIsInactive: Can't submit new workloads to clusterQueue" in found.detail
    assert "stopPolicy" in found.fix


def test_a_kind_that_no_integration_serves_is_told_with_the_other(look, fake_cluster):
    give_kueue(fake_cluster, serves=[TRAIN])
    found = look()["PyTorchJobs in Kueue"]
    assert found.state == "warning"
    assert "waits in the queue for ever" in found.detail
    assert found.fix == (
        f"name {PYTORCH} in integrations.frameworks of Kueue's configuration, or use launcher=trainjob"
    )


def test_where_no_kind_is_served_that_is_missing(look, fake_cluster):
    give_kueue(fake_cluster, serves=[])
    found = look()
    assert [found[f"{kind}s in Kueue"].state for kind in ("PyTorchJob", "TrainJob")] == ["missing"] * 2


@pytest.mark.parametrize("serves", [[PYTORCH], []])
def test_without_the_configuration_the_webhook_tells_of_pytorchjobs(look, fake_cluster, serves):
    give_kueue(fake_cluster, serves=serves)
    hide_configuration(fake_cluster)
    found = look()["PyTorchJobs in Kueue"]
    assert found.state == ("ok" if serves else "missing")
    assert "what its webhook makes of a PyTorchJob, which was not created" in found.detail
    posts = fake_cluster.requests("POST")
    assert posts and all("dryRun=All" in seen.path for seen in posts)


@pytest.mark.parametrize("serves", [[TRAIN], []])
def test_and_of_trainjobs_where_the_runtime_is_that_they_share(look, fake_cluster, serves):
    give_kueue(fake_cluster, serves=serves)
    hide_configuration(fake_cluster)
    fake_cluster.add("trainingruntimes", "default", trainjob.shared_runtime())
    found = look()["TrainJobs in Kueue"]
    assert found.state == ("ok" if serves else "missing")
    assert "what its webhook makes of a TrainJob" in found.detail
    assert not [seen for seen in fake_cluster.requests("POST") if "dryRun=All" not in seen.path]


def test_and_the_workloads_that_are_there_tell_of_trainjobs(look, fake_cluster, monkeypatch):
    kueue = give_kueue(fake_cluster)
    hide_configuration(fake_cluster)
    monkeypatch.setattr(fake_cluster, "refusal", lambda resource, *_: (403, "no such runtime"))
    assert look()["TrainJobs in Kueue"].state == "warning"
    meta = {
        "name": "t",
        "uid": "1234567",
        "namespace": "default",
        "labels": {"kueue.x-k8s.io/queue-name": "gpus"},
    }
    kueue.adopt({"kind": "TrainJob", "metadata": meta, "spec": {"runtimeRef": {}}})
    found = look()["TrainJobs in Kueue"]
    assert (found.state, found.detail) == ("ok", "served, by the Workloads of the namespace")


def test_jobs_that_wait_in_vain_are_named(look, backend, fake_cluster):
    give_kueue(fake_cluster, serves=[])
    for name in ("old", "new"):
        fields = {"command": ("true",), "image": "i:1", "kueue_queue": "gpus"}
        backend.submit(JobSpec(name=name, **fields))
    fake_cluster.job("old")["metadata"]["creationTimestamp"] = LONG_AGO
    found = look()["jobs in queues"]
    assert found.state == "missing"
    assert found.detail == "wait in vain: old (in queue gpus: Kueue has made no Workload of it yet)"
    assert f"have {PYTORCH} named in integrations.frameworks" in found.fix


def test_what_may_not_be_read_is_a_warning(look, fake_cluster):
    give_kueue(fake_cluster)
    fake_cluster.denied |= {("list", "workloads"), ("get", "localqueues")}
    found = look()
    assert found["Kueue"].state == found["queue gpus"].state == "warning"
    assert 'resources ["localqueues"]' in found["queue gpus"].fix
    assert found["jobs in queues"].state == "ok"
