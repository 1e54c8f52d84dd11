"""Reads the pod of this process: image, the Workflow that owns its jobs, and whether its run has ended."""

import logging
import os
import socket
from dataclasses import dataclass
from typing import Any

from components.launchers.cluster.client import ApiError, Cluster, own_namespace
from components.launchers.cluster.kinds import Resource
from components.launchers.cluster.termination import has_ended
from components.launchers.kubernetes_names import LABEL_QUEUE

logger = logging.getLogger(__name__)

_WORKFLOWS = Resource("argoproj.io", "v1alpha1", "workflows")
_SINGLE_ATTEMPT: dict[str, Any] = {"patience": 0.0, "_request_timeout": (1.0, 1.0)}
"""A single attempt with short time limits (one second each): after a stop signal, little time is left."""
_POD_NAME = "KFP_POD_NAME"  # Kubeflow sets it in the pods of steps.
_STEP = "main"  # Argo's name of the container that runs a step.


@dataclass(frozen=True)
class OwnPod:
    """Settings that jobs inherit from the pod that starts them; empty outside a cluster."""

    namespace: str = ""  # An owner reference across namespaces would get the job deleted at once.
    image: str = ""
    workflow: dict[str, str] | None = None  # An ownerReference: when the Workflow is deleted, so is the job.
    queue: str = ""  # Kueue's queue from the pod's label, which is meant for the job.
    name: str = ""


def read_own_pod(cluster: Cluster) -> OwnPod:
    """Read the pod of this process. If RBAC forbids it, the job has no owner, and its image must be set.

    Raises ApiError if the API server does not respond (then the owner is unknown), or if this pod was deleted
    (then the next attempt of the step adopts the job).
    """
    try:
        return _request_own_pod(cluster)
    except ApiError as error:
        if _is_pod_deleted(error):
            error.fix = "look at the step's next attempt, which continues with the job"
            raise
        if error.transient:
            raise
        logger.warning("the job will have no owner, because this pod cannot be read: %s", error)
        return OwnPod()


def delete(cluster: Cluster) -> None:
    """Delete the pod of this process without a grace period, so that Kubeflow runs its step again."""
    name, home = _locate_own_pod(cluster)
    request = home.core.delete_namespaced_pod
    home.call("delete", "pods", request, name, home.namespace, name=name, grace_period_seconds=0)


def deletes_job_on_stop(cluster: Cluster, own: OwnPod | None) -> bool:
    """Whether to delete the job when this process is stopped.

    True outside of a pipeline, and if the run was terminated, was deleted or has ended. If only this pod is
    evicted or deleted, the next attempt of the step adopts the job. Kubeflow leaves about one second for
    these requests, but the process of `termination` has usually sent them before.
    """
    name, home = _locate_own_pod(cluster)
    if not name:
        return True
    try:
        own = own or _request_own_pod(cluster, single_attempt=True)
        return own.workflow is None or run_has_ended(home, own.workflow["name"])
    except ApiError as error:
        # A job without a launcher ends itself: see `trainer.launching.heartbeat`.
        return error.status == 404 and not _is_pod_deleted(error)


def _is_pod_deleted(error: ApiError) -> bool:
    """Whether the pod of this step was deleted, so that its next attempt may have adopted the job."""
    return error.absent and _POD_NAME in os.environ


def run_has_ended(cluster: Cluster, workflow: str) -> bool:
    """Return whether a run has ended according to its Workflow; sends one request without retries."""
    body = cluster.find(_WORKFLOWS, workflow, **_SINGLE_ATTEMPT)
    return body is None or has_ended(body, cluster.clock.now())


def read_workflow(cluster: Cluster) -> dict[str, Any]:
    """Return the Workflow that this process's pod belongs to; empty if none."""
    owner, (_, home) = _request_own_pod(cluster).workflow, _locate_own_pod(cluster)
    return (home.find(_WORKFLOWS, owner["name"], **_SINGLE_ATTEMPT) if owner else None) or {}


def _locate_own_pod(cluster: Cluster) -> tuple[str, Cluster]:
    """Return the name of this pod ("" outside a cluster), and a client for its namespace."""
    is_pod = "KUBERNETES_SERVICE_HOST" in os.environ
    name = os.environ.get(_POD_NAME, "") or (socket.gethostname() if is_pod else "")
    namespace = own_namespace() or cluster.namespace
    return name, cluster if namespace == cluster.namespace else cluster.in_namespace(namespace)


def _request_own_pod(cluster: Cluster, *, single_attempt: bool = False) -> OwnPod:
    name, home = _locate_own_pod(cluster)
    if not name:
        return OwnPod()
    read, options = home.core.read_namespaced_pod, _SINGLE_ATTEMPT if single_attempt else {}
    pod = home.call("get", "pods", read, name, home.namespace, name=name, **options)
    images = {container.name: container.image for container in pod.spec.containers}
    # Without blockOwnerDeletion, which RBAC may forbid, and with which a stuck job would block the deletion.
    owners = [
        {"apiVersion": owner.api_version, "kind": owner.kind, "name": owner.name, "uid": owner.uid}
        for owner in pod.metadata.owner_references or []
        if owner.kind == "Workflow"
    ]
    image, queue = next(iter(images.values()), ""), (pod.metadata.labels or {}).get(LABEL_QUEUE, "")
    return OwnPod(
        home.namespace,
        images.get(_STEP) or image,
        owners[0] if owners else None,
        queue,
        pod.metadata.name,
    )
