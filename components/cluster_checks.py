"""Checks that a cluster has what a run needs."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from typing import Any, NamedTuple

from kubernetes import client

from components.environment import SECRET_KEYS
from components.launchers.cluster import job_objects
from components.launchers.cluster.backend import ClusterBackend
from components.launchers.cluster.client import ApiError, Cluster
from components.launchers.cluster.job_objects import Kinds
from components.launchers.cluster.kinds import KINDS, SHARED_RUNTIME, Kind, shared_runtime
from components.launchers.cluster.roles import ROLES, permission_fix
from components.launchers.kubernetes_names import parse_quantity
from trainer.base.errors import ConfigError, KubedetError
from trainer.launching.machine_checks import Check

_PURPOSES = {
    "trainingruntimes": "a TrainJob's own runtime",
    "workflows": "ending the job of a terminated run without delay",
    "workloads": "the reason why a job waits in a queue of Kueue",
    "pods/exec": "`kubedet job exec`",
}
"""What optional permissions are for, by resource."""

UNKNOWN_PREFIX = "not known: "  # Prefix of the detail of a check whose request failed.
_NOT_INSTALLED = "the cluster does not know them"
_TIMEOUT = 5.0


def check_cluster(
    backend: ClusterBackend,
    *,
    nodes: int = 1,
    resources: Mapping[str, int] | None = None,
    secret: str = "",
    claim: str = "",
) -> Iterator[Check]:
    """Check that a cluster has what runs need; raise ApiError if its API server does not answer.

    `nodes` is the size of a job, and `resources` the devices of each node, e.g. {"rdma/hca": 1}; devices
    with the number 0 are only counted. `secret` has the object store's keys, and `claim` is the data root's.
    """
    cluster = backend.cluster
    info = cluster.call("get", "version", client.VersionApi(cluster.api).get_code, patience=_TIMEOUT)
    yield Check("API server", "ok", f"{info.git_version} at {cluster.api.configuration.host}")
    yield from _run_checks({f"namespace {cluster.namespace}": _check_namespace(cluster)})
    kinds = {kind: _check_kind(cluster, kind) for kind in KINDS.values()}
    running = tuple(kind for kind, check in kinds.items() if check.state == "ok")
    absent = {kind.group for kind, check in kinds.items() if check.detail == _NOT_INSTALLED}
    new = None
    with suppress(ApiError, ConfigError):  # Reported by the check of permissions.
        new = Kinds(cluster, running).kind_of_new_job() if running else None
    for kind, check in kinds.items():
        if kind in running:
            launcher = "launcher=kubernetes creates" if kind is new else f"only launcher={kind.name} creates"
            taken = f"{launcher} them" if new else "you may not create any"
            yield replace(check, detail=f"{check.detail}; {taken}")
        elif running and kind.group in absent:
            detail = f"{check.detail}; {running[0].title}s are enough"
            yield replace(check, state="ok", detail=detail, fix="")
        else:
            yield replace(check, state="warning") if running else check
    checks: dict[str, Iterator[Check]] = {}
    if KINDS["trainjob"] in running:
        checks[f"runtime {SHARED_RUNTIME}"] = _check_runtime(cluster)
    others = {kind.plural: f"launcher={kind.name}" for kind in kinds if new and kind is not new}
    for (group, resource), verbs in (item for role in ROLES.values() for item in role.items()):
        if group not in absent:
            purpose = others.get(resource, _PURPOSES.get(resource, ""))
            results = _check_permission(cluster, group, resource, verbs.split(), purpose)
            checks[f"permissions on {resource}"] = results
    if len(absent) < len(kinds):
        checks["jobs of ended runs"] = _check_orphaned_jobs(backend)
    yield from _run_checks(checks)
    yield from check_requirements(cluster, secret=secret, claim=claim, nodes=nodes)
    if resources:
        yield from _run_checks({"nodes": _check_devices(cluster, resources, nodes)})


class PodRequests(NamedTuple):
    """The requests of a pod, e.g. {"cpu": "2"}, and the number of such pods."""

    name: str
    requests: Mapping[str, str]
    pods: int = 1


def check_requirements(
    cluster: Cluster,
    *,
    secret: str = "",
    claim: str = "",
    nodes: int = 1,
    pod_requests: Iterable[PodRequests] = (),
) -> Iterator[Check]:
    """Check a Secret, a claim that `nodes` share, and whether nodes have enough free resources for pods."""
    checks: dict[str, Iterator[Check]] = {}
    if secret:
        checks[f"secret {secret}"] = _check_secret(cluster, secret)
    if claim:
        checks[f"volume claim {claim}"] = _check_claim(cluster, claim, nodes)
    checks["room on nodes"] = _check_free_resources(cluster, pod_requests)
    yield from _run_checks(checks)


def _run_checks(checks: Mapping[str, Iterator[Check]]) -> Iterator[Check]:
    """Yield the results of checks; a failed request becomes the result of its check."""
    for title, results in checks.items():
        try:
            yield from results
        except KubedetError as error:
            if isinstance(error, ApiError) and error.absent:
                fix = "create it as docs/install.md shows, or name another one: `kubectl get` lists them"
                yield Check(title, "missing", "does not exist", fix)
            else:
                yield Check(title, "warning", f"{UNKNOWN_PREFIX}{error.message}", error.fix)


def _check_kind(cluster: Cluster, kind: Kind) -> Check:
    """Check that jobs of a kind can be listed, and that their controller accepts a new one."""
    title = f"{kind.title}s ({kind.controller.removeprefix('the ').partition(' (')[0]})"
    try:
        cluster.request("list", kind.resource, limit=1, patience=_TIMEOUT)
        problem = job_objects.dry_run_problem(cluster, kind)
    except ApiError as error:
        if error.unknown and "namespaces" not in error.message:
            return Check(title, "missing", _NOT_INSTALLED, f"install {kind.controller}")
        return Check(title, "warning", f"{UNKNOWN_PREFIX}{error.message}", error.fix)
    fix = f"look at the pods and logs of {kind.controller}"
    return Check.from_bool(not problem, title, problem or "the cluster runs them", fix, needed=True)


def _check_runtime(cluster: Cluster) -> Iterator[Check]:
    """Check that the namespace has the shared runtime of TrainJobs in this version."""
    runtimes = KINDS["trainjob"].resource._replace(plural="trainingruntimes")
    existing = cluster.find(runtimes, SHARED_RUNTIME, patience=_TIMEOUT)
    problem, fix = "", f"kubectl apply -n {cluster.namespace} -f deploy/trainer/runtime.yaml"
    if existing is None:
        problem = "does not exist, so each job creates its own"
    elif not job_objects.is_managed(existing):
        problem, fix = "was not created by kubedet, so each job creates its own", "rename that runtime"
    elif not _contains(existing["spec"], shared_runtime()["spec"]):
        problem = "differs from the runtime of this version"
    yield Check.from_bool(not problem, f"runtime {SHARED_RUNTIME}", problem or "TrainJobs share it", fix)


def _contains(actual: Any, expected: Any) -> bool:
    """Whether an object has all expected fields; the API server may add defaults."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        return all(name in actual and _contains(actual[name], value) for name, value in expected.items())
    if isinstance(expected, list) and isinstance(actual, list):
        return len(expected) == len(actual) and all(map(_contains, actual, expected))
    return bool(expected == actual)


def _check_permission(
    cluster: Cluster, group: str, resource: str, verbs: list[str], purpose: str
) -> Iterator[Check]:
    name, _, part = resource.partition("/")
    review = client.AuthorizationV1Api(cluster.api).create_self_subject_access_review
    about = {"namespace": cluster.namespace, "group": group, "resource": name, "subresource": part}
    refused = []
    for verb in verbs:
        body = {"spec": {"resourceAttributes": about | {"verb": verb}}}
        answer = cluster.call("create", "selfsubjectaccessreviews", review, body, patience=_TIMEOUT)
        refused += [] if answer.status.allowed else [verb]
    detail = f"not allowed: {', '.join(refused)}" if refused else ", ".join(verbs)
    if refused and purpose:
        detail += f"; only needed for {purpose}"
    fix = permission_fix(resource, refused, cluster.namespace)
    yield Check.from_bool(not refused, f"permissions on {resource}", detail, fix, needed=not purpose)


def _check_orphaned_jobs(backend: ClusterBackend) -> Iterator[Check]:
    names = [job.name for job in backend.list_jobs() if job.orphaned]
    detail = f"{', '.join(names)}: still exist" if names else "none"
    yield Check.from_bool(not names, "jobs of ended runs", detail, f"kubedet job stop {' '.join(names[:1])}")


def _check_namespace(cluster: Cluster) -> Iterator[Check]:
    name, read = cluster.namespace, cluster.core.read_namespace
    try:
        cluster.call("get", "namespaces", read, name, name=name, patience=_TIMEOUT)
        yield Check(f"namespace {name}", "ok", "exists")
    except ApiError as error:
        if error.status != 403:  # Most users may not read namespaces.
            raise


def _check_secret(cluster: Cluster, name: str) -> Iterator[Check]:
    read = cluster.core.read_namespaced_secret
    secret = cluster.call("get", "secrets", read, name, cluster.namespace, name=name, patience=_TIMEOUT)
    keys = sorted(set(secret.data or {}) & set(SECRET_KEYS))
    detail = f"has {', '.join(keys) or 'no key that kubedet reads'}"
    fix = "add AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    yield Check.from_bool(bool(keys), f"secret {name}", detail, fix, needed=True)


def _check_claim(cluster: Cluster, name: str, nodes: int) -> Iterator[Check]:
    """Check a volume claim that `nodes` share. It may be pending until its first pod starts."""
    read, place = cluster.core.read_namespaced_persistent_volume_claim, (name, cluster.namespace)
    claim = cluster.call("get", "persistentvolumeclaims", read, *place, name=name, patience=_TIMEOUT)
    modes = claim.spec.access_modes or []
    phase = (claim.status and claim.status.phase) or "Pending"
    size = ((claim.status and claim.status.capacity) or {}).get("storage", "")
    good = phase != "Lost" and (nodes == 1 or "ReadWriteMany" in modes)
    detail = ", ".join(filter(None, [phase.lower(), size, *modes]))
    fix = "create the claim again" if phase == "Lost" else f"use ReadWriteMany for {nodes} nodes"
    yield Check.from_bool(good, f"volume claim {name}", detail, fix, needed=True)


def _check_free_resources(cluster: Cluster, pod_requests: Iterable[PodRequests]) -> Iterator[Check]:
    """Check whether the nodes have the requested resources free for all pods; otherwise the pods wait."""
    free: dict[str, dict[str, Decimal]] = {}
    for wanted in pod_requests:
        free = free or _read_free_resources(cluster)
        quantities = wanted.requests.items()
        requests = {name: number for name, text in quantities if (number := parse_quantity(text))}
        if not requests:
            continue
        room = sum(
            max(0, min(int(node.get(name, Decimal(0)) // number) for name, number in requests.items()))
            for node in free.values()
        )
        largest = {
            name: max((node.get(name, Decimal(0)) for node in free.values()), default=Decimal(0))
            for name in requests
        }
        maximum_free = ", ".join(f"{name} {_format_amount(number)}" for name, number in largest.items())
        detail = (
            f"room for {room} of {wanted.pods} on {len(free)} ready nodes; "
            f"most free on a node: {maximum_free}"
        )
        title = f"room for {wanted.name} ({', '.join(map(' '.join, quantities))})"
        fix = "wait for other pods, request less (--gpus, --step-cpu, --step-memory, --job), or add nodes"
        yield Check.from_bool(room >= wanted.pods, title, detail, fix)


def _read_free_resources(cluster: Cluster) -> dict[str, dict[str, Decimal]]:
    """Return the resources of each ready node that its pods do not request."""
    free = {
        name: {resource: parse_quantity(text) for resource, text in allocatable.items()}
        for name, allocatable in _read_ready_nodes(cluster).items()
    }
    listing = cluster.core.list_pod_for_all_namespaces
    unfinished = "status.phase!=Succeeded,status.phase!=Failed"
    with suppress(ApiError):  # A user who may not list pods gets the resources of empty nodes.
        for pod in cluster.call("list", "pods", listing, patience=_TIMEOUT, field_selector=unfinished).items:
            for container in pod.spec.containers:
                requests = (container.resources and container.resources.requests) or {}
                node = free.get(pod.spec.node_name, {})
                for resource in requests.keys() & node.keys():
                    node[resource] -= parse_quantity(requests[resource])
    return free


def _format_amount(number: Decimal) -> str:
    """Format a large amount (bytes) in Gi, and any other as a plain number."""
    return f"{number / 2**30:.1f}Gi" if number >= 2**20 else f"{number.normalize():f}"


def _read_ready_nodes(cluster: Cluster) -> dict[str, dict[str, str]]:
    """Return the allocatable resources of each ready node that accepts pods."""
    ready = {}
    for item in cluster.call("list", "nodes", cluster.core.list_node, patience=_TIMEOUT).items:
        conditions = {condition.type: condition.status for condition in item.status.conditions or []}
        if conditions.get("Ready") == "True" and not item.spec.unschedulable:
            ready[item.metadata.name] = item.status.allocatable or {}
    return ready


def _check_devices(cluster: Cluster, resources: Mapping[str, int], nodes: int) -> Iterator[Check]:
    """Check whether enough ready nodes have the devices, free or in use."""
    ready = _read_ready_nodes(cluster).values()
    for name, number in resources.items():
        counts = [int(parse_quantity(allocatable.get(name, ""))) for allocatable in ready]
        fitting = sum(count >= max(number, 1) for count in counts)
        detail = f"{sum(counts)} on {len(ready)} ready nodes; {fitting} of them have {max(number, 1)} or more"
        fix = "add nodes, request less, or install the device plugin; training on CPUs needs none"
        good = fitting >= (nodes if number else 1)
        yield Check.from_bool(good, name, detail, fix, needed=number > 0)
