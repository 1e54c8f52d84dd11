"""What a job gets from the pod that starts it."""

import pytest

from components.launchers.cluster import client
from components.launchers.cluster.owner import Own, own

WORKFLOW = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "run-x", "uid": "u-1"}


@pytest.fixture
def step(fake_cluster, monkeypatch):
    """The pod of a pipeline's step, which this process seems to run in."""

    def make(**metadata):
        owners = [WORKFLOW | {"controller": True, "blockOwnerDeletion": True}]
        containers = [{"name": "wait", "image": "argoexec"}, {"name": "main", "image": "component:1"}]
        metadata = {"name": "step-pod", "ownerReferences": owners} | metadata
        return fake_cluster.add(
            "pods", "default", {"metadata": metadata, "spec": {"containers": containers}, "status": {}}
        )

    monkeypatch.setenv("KFP_POD_NAME", "step-pod")
    return make


def test_the_job_belongs_to_the_workflow_and_runs_its_image(step, backend, fake_cluster, job):
    step()
    backend.submit(job(image=""))
    body = fake_cluster.job("train")
    assert body["metadata"]["ownerReferences"] == [WORKFLOW]
    assert (
        body["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]["image"]
        == "component:1"
    )


def test_an_image_that_is_named_wins(step, backend, fake_cluster, job):
    step()
    backend.submit(job(image="mine"))
    assert "'image': 'mine'" in str(fake_cluster.job("train"))


def test_an_owner_of_another_namespace_is_none(step, backend, fake_cluster, job, monkeypatch, tmp_path):
    """The garbage collector would delete the job at once."""
    step()
    (tmp_path / "namespace").write_text("default")
    monkeypatch.setattr(client, "_NAMESPACE_FILE", tmp_path / "namespace")
    backend.within("team").submit(job(namespace="team", image=""))
    body = fake_cluster.job("train", "team")
    assert "ownerReferences" not in body["metadata"]
    assert "'image': 'component:1'" in str(body)


def test_only_a_workflow_owns_jobs(step, cluster):
    step(ownerReferences=[WORKFLOW | {"kind": "StatefulSet"}])
    assert own(cluster).workflow is None


def test_outside_of_a_cluster_there_is_nothing(cluster, fake_cluster, monkeypatch):
    for name in ("KFP_POD_NAME", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    assert own(cluster) == Own()
    assert not fake_cluster.seen


def test_a_pod_that_cannot_be_read_is_no_error(step, cluster, fake_cluster, caplog):
    step()
    fake_cluster.denied.add(("get", "pods"))
    assert own(cluster) == Own()
    assert "no owner" in caplog.text
