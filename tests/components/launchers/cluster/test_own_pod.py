"""What a job inherits from the pod that starts it."""

import pytest
from cluster.api import Fault
from cluster.fixtures import connect_backend

from components.launchers.cluster import client
from components.launchers.cluster.client import ApiError
from components.launchers.cluster.own_pod import OwnPod, deletes_job_on_stop, read_own_pod

WORKFLOW = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "run-x", "uid": "u-1"}


@pytest.fixture
def step(simulated, monkeypatch):
    """The pod of a pipeline's step, which this process seems to run in."""

    def make(**metadata):
        owners = [WORKFLOW | {"controller": True, "blockOwnerDeletion": True}]
        containers = [{"name": "wait", "image": "argoexec"}, {"name": "main", "image": "component:1"}]
        metadata = {"name": "step-pod", "ownerReferences": owners} | metadata
        return simulated.add(
            "pods", "default", {"metadata": metadata, "spec": {"containers": containers}, "status": {}}
        )

    monkeypatch.setenv("KFP_POD_NAME", "step-pod")
    return make


def test_the_job_belongs_to_the_workflow_and_runs_its_image(step, backend, simulated, job):
    step()
    backend.submit(job(image=""))
    body = simulated.job("train")
    assert body["metadata"]["ownerReferences"] == [WORKFLOW]
    assert (
        body["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["image"]
        == "component:1"
    )


@pytest.mark.parametrize(("named", "taken"), [("", "of-the-task"), ("of-the-job", "of-the-job")])
def test_a_queue_that_the_task_was_given_is_the_jobs(step, backend, simulated, job, named, taken):
    step(labels={"kueue.x-k8s.io/queue-name": "of-the-task"})
    backend.submit(job(kueue_queue=named))
    assert simulated.job("train")["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == taken
    backend.submit(job(kueue_queue=named))  # The next attempt finds the same job.


def test_an_owner_of_another_namespace_is_none(step, backend, simulated, job, monkeypatch, tmp_path):
    """The garbage collector would delete the job at once."""
    step()
    (tmp_path / "namespace").write_text("default")
    monkeypatch.setattr(client, "_NAMESPACE_FILE", tmp_path / "namespace")
    connect_backend(simulated, backend.kinds.possible, namespace="team").submit(
        job(namespace="team", image="")
    )
    body = simulated.job("train", "team")
    assert "ownerReferences" not in body["metadata"]
    assert "'image': 'component:1'" in str(body)


def test_only_a_workflow_owns_jobs(step, cluster):
    step(ownerReferences=[WORKFLOW | {"kind": "StatefulSet"}])
    assert read_own_pod(cluster).workflow is None


def test_outside_of_a_cluster_there_is_nothing(cluster, simulated, monkeypatch):
    for name in ("KFP_POD_NAME", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    assert read_own_pod(cluster) == OwnPod()
    assert not simulated.seen


def test_a_pod_that_cannot_be_read_is_no_error(step, cluster, simulated, caplog):
    step()
    simulated.denied.add(("get", "pods"))
    assert read_own_pod(cluster) == OwnPod()
    assert "no owner" in caplog.text


@pytest.fixture
def workflow(simulated):
    def make(spec=None, **metadata):
        return simulated.add(
            "workflows", "default", {"metadata": {"name": "run-x"} | metadata, "spec": spec or {}}
        )

    return make


@pytest.mark.parametrize(
    ("spec", "metadata", "ends"),
    [
        ({}, {}, False),
        ({"activeDeadlineSeconds": 0}, {}, True),
        ({"shutdown": "Terminate"}, {}, True),
        ({}, {"deletionTimestamp": "2026-01-01T00:00:00Z"}, True),
    ],
    ids=str,
)
def test_a_job_ends_with_its_run_and_not_with_its_steps_pod(step, workflow, cluster, spec, metadata, ends):
    step()
    workflow(spec, **metadata)
    assert deletes_job_on_stop(cluster, read_own_pod(cluster)) is ends
    assert deletes_job_on_stop(cluster, None) is ends  # StopRequest before the job was submitted.


def test_a_workflow_that_is_gone_has_taken_its_run_along(step, cluster):
    step()
    assert deletes_job_on_stop(cluster, read_own_pod(cluster))


@pytest.mark.parametrize("fault", [{"status": 403}, {"status": 503}, {"delay": 5}], ids=str)
def test_a_job_stays_if_the_workflow_cannot_be_read(step, workflow, cluster, simulated, fault):
    """It ends by itself if no launcher adopts it."""
    step()
    workflow()
    mine = read_own_pod(cluster)
    simulated.faults.append(Fault("GET", "workflows", times=9, **fault))
    assert not deletes_job_on_stop(cluster, mine)
    assert len(simulated.requests("GET", "workflows")) == 1  # There is no time for a second.


def test_a_launcher_whose_pod_was_deleted_leaves_the_job_to_the_next_attempt(
    step, workflow, backend, simulated, job
):
    """Its node was cut off: Kubernetes deleted the pod, and the step runs elsewhere."""
    step()
    workflow()
    backend.submit(job())
    simulated.remove("pods", "default", "step-pod")
    late = connect_backend(simulated, backend.kinds.possible)
    assert not late.deletes_job_on_stop()
    with pytest.raises(ApiError, match="step-pod") as error:
        late.submit(job())
    assert "next attempt" in error.value.fix and simulated.job()


def test_an_api_server_that_is_away_gives_no_job_without_an_owner(step, backend, simulated, job):
    step()
    simulated.faults.append(Fault("GET", "/pods/step-pod", times=10**6, status=503))
    with pytest.raises(ApiError):
        backend.submit(job())
    assert simulated.job() is None
