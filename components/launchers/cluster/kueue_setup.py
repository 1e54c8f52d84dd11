"""The cluster's Kueue installation: version, configuration, and how to fix jobs that it ignores."""

import re
from contextlib import suppress
from dataclasses import dataclass

from kubernetes import client

from components.launchers.backend import JobStatus
from components.launchers.cluster import kueue
from components.launchers.cluster.api_errors import ApiError
from components.launchers.cluster.client import Cluster
from components.launchers.cluster.kinds import KINDS
from components.launchers.cluster.kinds.kind import Kind
from trainer.bounded_text import yaml_value

NAMESPACE = "kueue-system"
_MANAGER, _CONFIG = "kueue-controller-manager", "kueue-manager-config"
_PATIENCE = 2.0
_LONGEST = 1_000_000  # A ConfigMap has at most 1 MiB.
_DEFAULT = ("batch/job",)
"""What Kueue serves where its configuration names nothing."""
_FIRST = {"TrainJob": "0.14"}
"""The first Kueue that knows a kind, where that is not long ago."""


@dataclass(frozen=True)
class Release:
    """The installed Kueue, as far as RBAC lets us read it."""

    version: str = ""
    """v0.19.2; empty is unknown."""
    served: str = ""
    """The version of its API that was asked for first and answered; empty where there is no Kueue."""
    ready: bool = True
    """Whether its controller runs, as far as that may be seen."""

    def __str__(self) -> str:
        """Say it in a sentence."""
        if not self.served:
            return "no Kueue is installed: the cluster does not know its Workloads"
        age = "0.15 or newer" if self.served == kueue.VERSIONS[0] else "older than 0.15"
        known = f"Kueue {self.version}" if self.version else f"a Kueue {age}, its version may not be read"
        trouble = "" if self.ready else "; its controller does not run"
        return f"{known} (API {kueue.GROUP}/{self.served}){trouble}"


def release(cluster: Cluster) -> Release:
    """Return the Kueue of a cluster; a version that may not be read is left out.

    Raises:
        ApiError: the namespace's Workloads may not be listed, which tells nothing.
    """
    served = next((version for version in kueue.VERSIONS if _serves(cluster, version)), "")
    if not served:
        return Release()
    apps = client.AppsV1Api(cluster.api)
    try:
        manager = cluster.call(
            "get",
            "deployments",
            lambda: apps.read_namespaced_deployment(_MANAGER, NAMESPACE),
            name=_MANAGER,
            patience=_PATIENCE,
        )
    except ApiError:
        return Release(_labelled(cluster), served)
    images = [container.image or "" for container in manager.spec.template.spec.containers]
    tags = [match[1] for match in map(re.compile(r":(v?\d[\w.+-]*)(?:@|$)").search, images) if match]
    ready = bool(manager.status and manager.status.ready_replicas)
    return Release(tags[0] if tags else _labelled(cluster), served, ready)


def _serves(cluster: Cluster, version: str) -> bool:
    try:
        cluster.call(
            "list",
            "workloads",
            lambda: cluster.custom.list_namespaced_custom_object(
                kueue.GROUP, version, cluster.namespace, "workloads", limit=1
            ),
            patience=_PATIENCE,
        )
    except ApiError as error:
        if not error.unknown:
            raise
        return False
    return True


def _labelled(cluster: Cluster) -> str:
    """Return the version that Kueue's chart writes on its definitions."""
    extensions = client.ApiextensionsV1Api(cluster.api)
    name = f"workloads.{kueue.GROUP}"
    try:
        definition = cluster.call(
            "get",
            "customresourcedefinitions",
            lambda: extensions.read_custom_resource_definition(name),
            name=name,
            patience=_PATIENCE,
        )
    except ApiError:
        return ""
    return (definition.metadata.labels or {}).get("app.kubernetes.io/version", "")


def frameworks(cluster: Cluster) -> list[str]:
    """Return the kinds of jobs that Kueue's configuration names: trainer.kubeflow.org/trainjob, ...

    Raises:
        ApiError: the configuration may not be read, or is elsewhere.
    """
    config_map = cluster.call(
        "get",
        "configmaps",
        lambda: cluster.core.read_namespaced_config_map(_CONFIG, NAMESPACE),
        name=_CONFIG,
        patience=_PATIENCE,
    )
    for text in (config_map.data or {}).values():
        try:
            body = yaml_value(text, _LONGEST)
        except ValueError:
            continue
        if isinstance(body, dict) and body.get("kind") == "Configuration":
            return list((body.get("integrations") or {}).get("frameworks") or _DEFAULT)
    return list(_DEFAULT)


def framework(kind: Kind) -> str:
    """Return what Kueue's configuration calls a kind of job."""
    return f"{kind.group}/{kind.name}"


def explain(cluster: Cluster, status: JobStatus) -> list[str]:
    """Explain a suspended job that Kueue ignores: return the installed version and configuration."""
    if status.reason not in (kueue.UNSERVED, kueue.ADMITTED):
        return []
    try:
        lines = [str(release(cluster))]
    except ApiError as error:
        return [f"which Kueue there is is not known: {error.message}"]
    with suppress(ApiError):  # Few may read it.
        lines.append(f"its configuration names {', '.join(frameworks(cluster))}")
    return lines


def remedy(status: JobStatus) -> str:
    """Return the fix for a job that will never be admitted."""
    if status.reason == kueue.NO_QUEUE:
        return (
            f"see `kubectl get localqueues` for the queues of its namespace and set kueue_queue to one, or "
            f"create the LocalQueue {status.queue}"
        )
    if status.reason == kueue.DEACTIVATED:
        return "see why with `kubectl describe workload`; run the same again once that is mended"
    if status.reason == kueue.ADMITTED:
        return (
            "run the same again: Kueue cannot start a job that was made while it did not serve its kind; "
            "else look at the log of the job's controller"
        )
    kind = next((kind for kind in KINDS.values() if kind.title == status.kind), None)
    if kind is None:
        return "leave kueue_queue out"
    since = f" ({_FIRST[kind.title]} is the first Kueue that can)" if kind.title in _FIRST else ""
    others = " or ".join(other.name for other in KINDS.values() if other is not kind)
    return (
        f"have {framework(kind)} named in integrations.frameworks of Kueue's configuration (ConfigMap "
        f"{_CONFIG} in {NAMESPACE}){since}, and this namespace not left out by its "
        f"managedJobsNamespaceSelector, and run the same again; or make it a {others} (launcher, --backend), "
        "or leave kueue_queue out"
    )
