"""Checks of a cluster: API server, kinds of jobs, permissions, Secret, volume claim, devices."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from kubernetes import client

from components.doctor import job_kinds
from components.launchers import kubernetes_names
from components.launchers.cluster.backend import ClusterBackend
from components.launchers.cluster.client import ApiError, Cluster
from components.object_store import SECRET_KEYS
from trainer.base.errors import KubedetError
from trainer.launching.doctor import Check

PERMISSIONS = {
    ("kubeflow.org", "pytorchjobs"): ("create", "get", "list", "delete"),
    ("trainer.kubeflow.org", "trainjobs"): ("create", "get", "list", "delete"),
    ("trainer.kubeflow.org", "trainingruntimes"): ("create", "get", "patch", "delete"),
    ("", "pods"): ("get", "list", "watch"),
    ("", "pods/log"): ("get",),
    ("", "events"): ("list",),
    ("argoproj.io", "workflows"): ("get", "watch"),
    ("kueue.x-k8s.io", "workloads"): ("list",),
    ("visibility.kueue.x-k8s.io", "localqueues/pendingworkloads"): ("get",),
    ("", "pods/exec"): ("create", "get"),
}
"""API group and resource, and the verbs that the launcher and the operator's commands use."""

_OPTIONAL = {
    "pods/exec": "only `kubedet job exec` needs it",
    "trainingruntimes": "without it only TrainJobs can run that the namespace's runtime fits",
    "workloads": "without it nobody tells why a job waits in a queue of Kueue",
    "localqueues/pendingworkloads": "without it nobody tells a job's place in a queue of Kueue",
    "workflows": "without it a terminated run ends its training job minutes later",
}
"""Optional permissions, and what does not work without each."""
_PATIENCE = 5.0
_SHOWN = 5  # Nodes that are named.


@dataclass(frozen=True)
class Needs:
    """What the runs will ask of the cluster."""

    nodes: int = 1
    """Machines."""
    resources: dict[str, int] = field(default_factory=dict)
    """Devices of each machine, e.g. {"nvidia.com/gpu": 8, "rdma/hca": 1}; 0 asks what there is."""
    secret: str = ""
    """Secret with the object store's keys; empty is none."""
    claim: str = ""
    """PersistentVolumeClaim with the data root; empty is none."""
    cpu: str = ""
    """Cores that the pod of a step asks for, as Kubernetes writes them; empty is not looked at."""
    memory: str = ""
    """Memory that it asks for."""


def check(cluster: Cluster, needs: Needs) -> Iterator[Check]:
    """Check a cluster; only its first findings where it does not answer.

    Args:
        cluster: the cluster and namespace.
        needs: what the runs will ask of it.
    """
    try:
        version = client.VersionApi(cluster.api)
        version_info = cluster.call("get", "version", version.get_code, patience=_PATIENCE)
    except ApiError as error:
        yield Check("API server", "missing", error.message, error.fix)
        return
    where = cluster.api.configuration.host
    yield Check("API server", "ok", f"{version_info.git_version} at {where}")
    yield from _namespace(cluster)
    states = job_kinds.look(cluster)
    yield from job_kinds.checks(states)
    yield from job_kinds.runtime(cluster, states)
    absent = {state.kind.group for state in states if not state.known}
    for (group, resource), verbs in PERMISSIONS.items():
        if group not in absent:
            spared = (_OPTIONAL | job_kinds.spared(states)).get(resource, "")
            yield from _permission(cluster, group, resource, verbs, spared)
    if any(state.known for state in states):
        yield from _left_over(cluster)
    if needs.secret:
        yield from _secret(cluster, needs.secret)
    if needs.claim:
        yield from _claim(cluster, needs)
    if needs.resources or needs.cpu or needs.memory:
        yield from _nodes(cluster, needs)


def _left_over(cluster: Cluster) -> Iterator[Check]:
    """Check for training jobs that hold their GPUs although their run has ended."""
    try:
        names = [job.name for job in ClusterBackend(cluster).list_jobs() if job.orphaned]
    except KubedetError as error:
        yield Check("jobs of ended runs", "warning", f"not known: {error.message}", error.fix)
        return
    if names:
        yield Check(
            "jobs of ended runs",
            "warning",
            f"{', '.join(names)}: still there",
            f"kubedet job stop {names[0]}",
        )
    else:
        yield Check("jobs of ended runs", "ok", "none")


def _namespace(cluster: Cluster) -> Iterator[Check]:
    title = f"namespace {cluster.namespace}"
    try:
        _get(cluster, "namespaces", cluster.namespace, lambda: cluster.core.read_namespace(cluster.namespace))
        yield Check(title, "ok", "exists")
    except ApiError as error:
        if error.status == 404:
            yield Check(title, "missing", "does not exist", "create it, or name another")
        elif error.status != 403:  # Few may read it, and nobody needs to.
            yield Check(title, "warning", error.message, error.fix)


def _permission(
    cluster: Cluster, group: str, resource: str, verbs: tuple[str, ...], without: str
) -> Iterator[Check]:
    """Look for the verbs on a resource; `without` says what does not work where a permission is optional."""
    title = f"permissions on {resource}"
    try:
        refused = [verb for verb in verbs if not _allowed(cluster, group, resource, verb)]
    except ApiError as error:
        yield Check(title, "warning", f"not known: {error.message}", error.fix)
        return
    if not refused:
        yield Check(title, "ok", ", ".join(verbs))
        return
    yield Check(title, "warning" if without else "missing",
        f"not allowed: {', '.join(refused)}" + (f"; {without}" if without else ""),
        f"bind a Role with apiGroups [\"{group}\"], resources [\"{resource}\"], "
        f"verbs {list(refused)} in namespace {cluster.namespace}; deploy/ holds one".replace("'", '"'),
    )  # fmt: skip


def _allowed(cluster: Cluster, group: str, resource: str, verb: str) -> bool:
    name, _, part = resource.partition("/")
    attributes = client.V1ResourceAttributes(
        namespace=cluster.namespace, group=group, resource=name, subresource=part or None, verb=verb
    )
    review = client.V1SelfSubjectAccessReview(
        spec=client.V1SelfSubjectAccessReviewSpec(resource_attributes=attributes)
    )
    api = client.AuthorizationV1Api(cluster.api)
    answer = cluster.call(
        "create",
        "selfsubjectaccessreviews",
        lambda: api.create_self_subject_access_review(review),
        patience=_PATIENCE,
    )
    return bool(answer.status.allowed)


def _secret(cluster: Cluster, name: str) -> Iterator[Check]:
    title = f"secret {name}"
    try:
        secret = _get(
            cluster, "secrets", name, lambda: cluster.core.read_namespaced_secret(name, cluster.namespace)
        )
    except ApiError as error:
        yield _unread(title, error, f"create it as deploy/ shows, in namespace {cluster.namespace}")
        return
    keys = sorted(set(secret.data or {}) & set(SECRET_KEYS))
    if keys:
        yield Check(title, "ok", f"has {', '.join(keys)}")
    else:
        required = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        yield Check(title, "missing", "has no key that kubedet reads", f"add {required}")


def _claim(cluster: Cluster, needs: Needs) -> Iterator[Check]:
    title = f"volume claim {needs.claim}"
    core, namespace = cluster.core, cluster.namespace
    try:
        claim = _get(
            cluster, "persistentvolumeclaims", needs.claim,
            lambda: core.read_namespaced_persistent_volume_claim(needs.claim, namespace),
        )  # fmt: skip
    except ApiError as error:
        yield _unread(title, error, f"create it in namespace {namespace}; see deploy/")
        return
    modes = claim.spec.access_modes or []
    phase = claim.status.phase if claim.status else "Pending"
    size = ((claim.status and claim.status.capacity) or {}).get("storage", "")
    if phase == "Lost":
        yield Check(title, "missing", "has lost its volume", "create it anew")
    elif needs.nodes > 1 and "ReadWriteMany" not in modes:
        yield Check(title, "missing", f"is {', '.join(modes)}, for one node alone",
            f"use a ReadWriteMany claim for {needs.nodes} nodes",
        )  # fmt: skip
    else:  # A claim that waits for its first pod is pending until then.
        yield Check(title, "ok", ", ".join(filter(None, [phase.lower(), size, *modes])))


def _nodes(cluster: Cluster, needs: Needs) -> Iterator[Check]:
    """Check the allocatable resources of the nodes."""
    try:
        nodes = cluster.call("list", "nodes", cluster.core.list_node, patience=_PATIENCE).items
    except ApiError as error:
        fix = "ask someone who may list nodes to run this" if error.status == 403 else error.fix
        title = "devices" if needs.resources else "nodes"
        yield Check(title, "warning", f"not known: {error.message}", fix)
        return
    usable = [node for node in nodes if _ready(node)]
    taken = _taken(cluster)
    if isinstance(taken, ApiError):
        fix = (
            "ask someone who may list the pods of all namespaces to run this"
            if taken.status == 403
            else taken.fix
        )
        detail = f"requests of other pods are not counted: {taken.message}"
        yield Check("free room on nodes", "warning", detail, fix)
        taken = ({}, {})
    yield from _devices(usable, needs, taken[0])
    requests = {"cpu": needs.cpu, "memory": needs.memory}
    if requested := {name: amount for name, amount in requests.items() if amount}:
        yield _room(usable, requested, *taken)


_Amounts = dict[str, Counter[str]]
"""Amounts of each resource (Decimal), by node."""

_SERVICES = ("DaemonSet", "Node", "ReplicaSet", "StatefulSet")
"""Owners of pods that do not end by themselves."""


def _taken(cluster: Cluster) -> tuple[_Amounts, _Amounts] | ApiError:
    """Return what all pods of each node request, and what those that stay do; or why that is not known."""
    unfinished = "status.phase!=Succeeded,status.phase!=Failed"
    core = cluster.core
    try:
        pods = cluster.call(
            "list",
            "pods",
            lambda: core.list_pod_for_all_namespaces(field_selector=unfinished),
            patience=_PATIENCE,
        ).items
    except ApiError as error:
        return error
    every: _Amounts = {}
    lasting: _Amounts = {}
    for pod in pods:
        owners = {owner.kind for owner in pod.metadata.owner_references or []}
        for amounts in (every, lasting) if owners & set(_SERVICES) else (every,):
            amounts.setdefault(pod.spec.node_name, Counter()).update(_requests(pod.spec))
    return every, lasting


def _requests(spec: Any) -> Counter[str]:
    """Return what the scheduler counts for a pod: its containers together, or a larger init container.

    Init containers that go on (sidecars) count with the containers, and so does the pod's overhead.
    (https://kubernetes.io/docs/concepts/workloads/pods/sidecar-containers/#resource-sharing-within-containers)
    """
    running: Counter[str] = Counter()
    largest: Counter[str] = Counter()
    for container in spec.init_containers or []:
        if container.restart_policy == "Always":
            running += _amounts(container)
            largest |= running
        else:
            largest |= running + _amounts(container)
    for container in spec.containers:
        running += _amounts(container)
    overhead = {name: kubernetes_names.amount(text) for name, text in (spec.overhead or {}).items()}
    return (running | largest) + Counter(overhead)


def _amounts(container: Any) -> Counter[str]:
    requests = (container.resources and container.resources.requests) or {}
    return Counter({name: kubernetes_names.amount(text) for name, text in requests.items()})


def _devices(usable: list[Any], needs: Needs, taken: _Amounts) -> Iterator[Check]:
    for resource, number in needs.resources.items():
        counts = [int(_allocatable(node, resource)) for node in usable]
        fitting = sum(count >= max(1, number) for count in counts)
        free = sum(_free(node, resource, taken) >= max(1, number) for node in usable)
        detail = f"{sum(counts)} on {sum(map(bool, counts))} of {len(usable)} ready nodes"
        if number == 0:
            fix = "" if fitting else "none is needed to train on CPUs; else install the device plugin"
            yield Check(resource, "ok" if fitting else "warning", detail, fix)
        elif free >= needs.nodes:
            yield Check(resource, "ok", f"{detail}; {free} have {number} or more free")
        elif fitting >= needs.nodes:
            detail += f"; {fitting} have {number} or more, but only {free} have them free now"
            yield Check(resource, "warning", detail, "wait for other pods to end, or ask for fewer")
        else:
            yield Check(resource, "missing",
                f"{detail}; {needs.nodes} with {number} each are asked for, {fitting} are there",
                "install the device plugin, wait for nodes (an autoscaler may add some), or ask for fewer",
            )  # fmt: skip


def _room(usable: list[Any], requested: dict[str, str], every: _Amounts, lasting: _Amounts) -> Check:
    """Check whether a node can hold the pod of a step, which else stays pending.

    Args:
        usable: the nodes (V1Node).
        requested: what the pod requests, by resource.
        every: what all pods of the nodes request now.
        lasting: what those of them request that do not end by themselves.
    """
    text = ", ".join(f"{name} {amount}" for name, amount in requested.items())
    title = f"room for a step ({text})"
    short = {node.metadata.name: _short(node, requested, lasting) for node in usable}
    fitting = [node for node in usable if not short[node.metadata.name]]
    lines = [f"{name} has {', '.join(lacks)}" for name, lacks in short.items() if lacks]
    shortages = f"; {'; '.join(lines[:_SHOWN])}" if lines else ""
    shortages += f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    detail = f"{len(fitting)} of {len(usable)} ready nodes can hold it{shortages}"
    fix = "ask for less (--size, --step-cpu, --step-memory), or add nodes (an autoscaler may do so)"
    if not fitting:
        return Check(title, "missing", detail, fix)
    busy = [_short(node, requested, every) for node in fitting]
    if all(busy):
        lines = [
            f"{node.metadata.name} has {', '.join(lacks)}" for node, lacks in zip(fitting, busy, strict=True)
        ]
        return Check(title, "warning", f"{detail}, but not now: {'; '.join(lines[:_SHOWN])}",
            f"wait for other pods to end, or {fix}",
        )  # fmt: skip
    return Check(title, "ok", detail)


def _short(node: Any, requested: dict[str, str], taken: _Amounts) -> list[str]:
    """Return the resources of which a node has too little left beside what its pods request."""
    lacks = []
    for name, amount in requested.items():
        if _free(node, name, taken) < kubernetes_names.amount(amount):
            used = _allocatable(node, name) - _free(node, name, taken)
            requests = f", of which pods request {used.normalize():f}" if used else ""
            lacks.append(f"{name} {(node.status.allocatable or {}).get(name, '0')}{requests}")
    return lacks


def _free(node: Any, resource: str, taken: _Amounts) -> Decimal:
    return _allocatable(node, resource) - taken.get(node.metadata.name, Counter())[resource]


def _allocatable(node: Any, resource: str) -> Decimal:
    return kubernetes_names.amount((node.status.allocatable or {}).get(resource, ""))


def _ready(node: Any) -> bool:
    conditions = {item.type: item.status for item in node.status.conditions or []}
    return conditions.get("Ready") == "True" and not node.spec.unschedulable


def _get(cluster: Cluster, resource: str, name: str, request: Any) -> Any:
    return cluster.call("get", resource, request, name=name, patience=_PATIENCE)


def _unread(title: str, error: ApiError, fix: str) -> Check:
    """Return the check of an object that could not be read: missing, or unknown."""
    if error.status == 404:
        return Check(title, "missing", "does not exist", fix)
    if error.status == 403:
        fix = "ask someone who may whether it exists"
        return Check(title, "warning", "not known: you may not read it", fix)
    return Check(title, "warning", f"not known: {error.message}", error.fix)
