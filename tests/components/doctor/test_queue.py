"""What the doctor finds in a queue of Kueue."""

import pytest
from fake_kueue import give_kueue

from components.doctor.queue import check
from components.launchers.cluster.backend import ClusterBackend
from components.launchers.cluster.kinds import trainjob
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
    return lambda queue="gpus": {finding.title: finding for finding in check(backend, queue)}


def hide_configuration(fake_cluster):
    fake_cluster.denied.add(("get", "configmaps"))


def test_a_queue_that_takes_jobs_of_both_kinds_is_well_and_nothing_is_made(look, fake_cluster):
    give_kueue(fake_cluster)
    checks = look()
    assert {item.state for item in checks.values()} == {"ok"}
    assert checks["Kueue"].detail == "Kueue v0.19.2 (API kueue.x-k8s.io/v1beta2)"
    assert checks["queue gpus"].detail == "active, of ClusterQueue gpus-of-all; 2 wait, 1 are admitted"
    assert checks["PyTorchJobs in Kueue"].detail == "served, by its configuration"
    assert checks["TrainJobs in Kueue"].detail == "served, by its configuration"
    assert checks["jobs in queues"].detail == "0 wait, none of them in vain"
    assert not [seen for seen in fake_cluster.seen if seen.method != "GET"]


def test_without_kueue_all_is_said(look):
    (finding,) = look().values()
    assert (finding.title, finding.state) == ("Kueue", "missing")
    assert "leave kueue_queue out" in finding.fix


def test_a_queue_that_does_not_exist_is_missing(look, fake_cluster):
    give_kueue(fake_cluster)
    finding = look("none")["queue none"]
    assert (finding.state, finding.detail) == ("missing", "namespace default has no such LocalQueue")


def test_a_queue_that_takes_nothing_says_why(look, fake_cluster):
    give_kueue(fake_cluster).queue("gpus", active=False, message="Can't submit new workloads to clusterQueue")
    finding = look()["queue gpus"]
    assert finding.state == "missing"
    assert "ClusterQueueIsInactive: Can't submit new workloads to clusterQueue" in finding.detail
    assert "stopPolicy" in finding.fix


def test_a_kind_that_no_integration_serves_is_told_with_the_other(look, fake_cluster):
    give_kueue(fake_cluster, serves=[TRAIN])
    finding = look()["PyTorchJobs in Kueue"]
    assert finding.state == "warning"
    assert "waits in the queue for ever" in finding.detail
    assert finding.fix == (
        f"name {PYTORCH} in integrations.frameworks of Kueue's configuration, or use launcher=trainjob"
    )


def test_where_no_kind_is_served_that_is_missing(look, fake_cluster):
    give_kueue(fake_cluster, serves=[])
    checks = look()
    assert [checks[f"{kind}s in Kueue"].state for kind in ("PyTorchJob", "TrainJob")] == ["missing"] * 2


@pytest.mark.parametrize("serves", [[PYTORCH], []])
def test_without_the_configuration_the_webhook_tells_of_pytorchjobs(look, fake_cluster, serves):
    give_kueue(fake_cluster, serves=serves)
    hide_configuration(fake_cluster)
    finding = look()["PyTorchJobs in Kueue"]
    assert finding.state == ("ok" if serves else "missing")
    assert "what its webhook makes of a PyTorchJob, which was not created" in finding.detail
    posts = fake_cluster.requests("POST")
    assert posts and all("dryRun=All" in seen.path for seen in posts)


@pytest.mark.parametrize("serves", [[TRAIN], []])
def test_and_of_trainjobs_where_the_runtime_is_that_they_share(look, fake_cluster, serves):
    give_kueue(fake_cluster, serves=serves)
    hide_configuration(fake_cluster)
    fake_cluster.add("trainingruntimes", "default", trainjob.shared_runtime())
    finding = look()["TrainJobs in Kueue"]
    assert finding.state == ("ok" if serves else "missing")
    assert "what its webhook makes of a TrainJob" in finding.detail
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
    finding = look()["TrainJobs in Kueue"]
    assert (finding.state, finding.detail) == ("ok", "served, by the Workloads of the namespace")


def test_jobs_that_wait_in_vain_are_named(look, backend, fake_cluster):
    give_kueue(fake_cluster, serves=[])
    for name in ("old", "new"):
        fields = {"command": ("true",), "image": "i:1", "kueue_queue": "gpus"}
        backend.submit(JobSpec(name=name, **fields))
    fake_cluster.job("old")["metadata"]["creationTimestamp"] = LONG_AGO
    finding = look()["jobs in queues"]
    assert finding.state == "missing"
    assert finding.detail == "wait in vain: old (in queue gpus: Kueue has made no Workload of it yet)"
    assert f"have {PYTORCH} named in integrations.frameworks" in finding.fix


def test_what_may_not_be_read_is_a_warning(look, fake_cluster):
    give_kueue(fake_cluster)
    fake_cluster.denied |= {("list", "workloads"), ("get", "localqueues")}
    checks = look()
    assert checks["Kueue"].state == checks["queue gpus"].state == "warning"
    assert 'resources ["localqueues"]' in checks["queue gpus"].fix
    assert checks["jobs in queues"].state == "ok"
