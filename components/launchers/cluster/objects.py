"""The PyTorchJob objects of a namespace: made, read and deleted with the SDK of the operator."""

import time
from typing import Any

from kubeflow.training import KubeflowOrgV1PyTorchJob
from kubeflow.training.utils.utils import FakeResponse
from kubernetes.client import V1DeleteOptions

from components.launchers.cluster import pods
from components.launchers.cluster.client import Cluster
from components.launchers.cluster.refusals import ApiError
from trainer.errors import LaunchError

_GROUP, _VERSION, _JOBS = "kubeflow.org", "v1", "pytorchjobs"


def create(cluster: Cluster, name: str, body: dict[str, Any]) -> str:
    """Create a job from its manifest; returns its uid, which TrainingClient.create_job keeps to itself.

    Raises:
        ApiError: it was refused; status 409 where the name is taken.
    """
    training = cluster.training
    model = training.api_client.deserialize(FakeResponse(body), KubeflowOrgV1PyTorchJob)
    made = cluster.call(
        "create",
        _JOBS,
        lambda: training.custom_api.create_namespaced_custom_object(
            _GROUP, _VERSION, cluster.namespace, _JOBS, model
        ),
        name=name,
    )
    return str(made["metadata"]["uid"])


def get(cluster: Cluster, name: str, *, patience: float | None = None) -> Any:
    """Return a job (KubeflowOrgV1PyTorchJob); None if there is none.

    Args:
        cluster: where it is.
        name: its name.
        patience: as of Cluster.call.
    """
    try:
        body = cluster.call(
            "get",
            _JOBS,
            lambda: cluster.training.custom_api.get_namespaced_custom_object(
                _GROUP, _VERSION, cluster.namespace, _JOBS, name
            ),
            name=name,
            patience=patience,
        )
    except ApiError as error:
        if error.absent:
            return None
        raise
    return _model(cluster, body)


def labelled(cluster: Cluster, labels: str) -> list[Any]:
    """Return the jobs (KubeflowOrgV1PyTorchJob) that a label selector chooses."""
    body = cluster.call(
        "list",
        _JOBS,
        lambda: cluster.training.custom_api.list_namespaced_custom_object(
            _GROUP, _VERSION, cluster.namespace, _JOBS, label_selector=labels
        ),
    )
    return [_model(cluster, item) for item in body["items"]]


def _model(cluster: Cluster, body: dict[str, Any]) -> Any:
    """Return a job as the SDK's model, which insists on a field that the cluster does not ask for.

    TrainingClient.get_job fails with a ValueError on such a job.
    """
    spec = {"runPolicy": {}} | (body.get("spec") or {})
    job = FakeResponse(body | {"spec": spec})
    return cluster.training.api_client.deserialize(job, KubeflowOrgV1PyTorchJob)


def delete(cluster: Cluster, name: str, *, uid: str = "", patience: float | None = None) -> None:
    """Ask for a job's deletion; one that is gone is no error.

    Args:
        cluster: where it is.
        name: its name.
        uid: delete this very job, not another that has taken its name.
        patience: as of Cluster.call.
    """
    only = {"uid": uid} if uid else None
    options = V1DeleteOptions(propagation_policy="Background", preconditions=only)
    try:
        cluster.call(
            "delete",
            _JOBS,
            lambda: cluster.training.delete_job(name, cluster.namespace, delete_options=options),
            name=name,
            patience=patience,
        )
    except ApiError as error:
        if not error.absent and not (uid and error.status == 409):
            raise


def await_absence(cluster: Cluster, name: str, *, uid: str = "") -> None:
    """Wait until a job and its pods are gone.

    A job that is made while pods of an older one are there waits for their names: the operator
    makes its workers and Services only after long back-offs.

    Args:
        cluster: where it is.
        name: its name.
        uid: this very job; another that has taken its name is not waited for.

    Raises:
        LaunchError: something is still there after Timings.removal.
    """
    timings = cluster.timings
    end = time.monotonic() + timings.removal
    waits = timings.waits()
    while True:
        there = get(cluster, name)
        if there is not None and uid and there.metadata.uid != uid:
            return
        left = [pod.metadata.name for pod in pods.of_job(cluster, name)]
        if there is None and not left:
            return
        if time.monotonic() > end:
            kept = ", ".join(left) or f"the PyTorchJob {name}, held by a finalizer"
            raise LaunchError(
                f"PyTorchJob {name} was deleted, but after {timings.removal:.0f} s there is still: {kept}",
                fix="see whether its node answers; `kubectl delete pod --force` ends the pods of a dead node",
            )
        time.sleep(min(next(waits), timings.poll))
