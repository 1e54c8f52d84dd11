"""Who this process is in the cluster: its pod's image, and the workflow that its jobs belong to."""

import logging
import os
import socket
from dataclasses import dataclass
from typing import Any

from components.launchers.cluster.client import Cluster, own_namespace
from components.launchers.cluster.refusals import ApiError

logger = logging.getLogger(__name__)

_STEP = "main"  # Argo's name of the container that runs a step.


@dataclass(frozen=True)
class Own:
    """What the own pod gives to the jobs it starts; all empty outside of a cluster."""

    namespace: str = ""
    """Its namespace: an owner of another one would have the job deleted at once."""
    image: str = ""
    """The image it runs."""
    workflow: dict[str, str] | None = None
    """An ownerReference to its Workflow: when that is deleted, so is the job."""


def own(cluster: Cluster) -> Own:
    """Look at the pod that this process runs in.

    Its name is KFP_POD_NAME, or in a cluster the host's name. A pod that cannot be read is no
    error: the job then has no owner, and needs an image of its own.
    """
    name = os.environ.get("KFP_POD_NAME", "")
    if not name and "KUBERNETES_SERVICE_HOST" in os.environ:
        name = socket.gethostname()
    if not name:
        return Own()
    namespace = own_namespace() or cluster.namespace
    home = cluster if namespace == cluster.namespace else cluster.within(namespace)
    try:
        pod = home.call("get", "pods", lambda: home.core.read_namespaced_pod(name, namespace), name=name)
    except ApiError as error:
        logger.warning("the job will have no owner, for this pod cannot be read: %s", error)
        return Own()
    containers = {container.name: container.image for container in pod.spec.containers}
    image = containers.get(_STEP) or pod.spec.containers[0].image
    owners = [_reference(owner) for owner in pod.metadata.owner_references or [] if owner.kind == "Workflow"]
    return Own(namespace, image, owners[0] if owners else None)


def _reference(owner: Any) -> dict[str, str]:
    """Refer to an owner without blockOwnerDeletion, which RBAC may forbid and a stuck job would abuse."""
    return {"apiVersion": owner.api_version, "kind": owner.kind, "name": owner.name, "uid": owner.uid}
