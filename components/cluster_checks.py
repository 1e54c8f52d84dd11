"""Checks a cluster, a queue of Kueue, and the pods of a job for what a run needs."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, NamedTuple

from kubernetes import client

from components.environment import SECRET_KEYS
from components.launchers.cluster import job_objects, kueue, pod_exec
from components.launchers.cluster.backend import ClusterBackend
from components.launchers.cluster.client import ApiError, Cluster
from components.launchers.cluster.job_objects import Kinds
from components.launchers.cluster.kinds import KINDS, SHARED, Body, Kind, Resource, shared_runtime
from components.launchers.cluster.roles import ROLES, allow
from components.launchers.kubernetes_names import LABEL_QUEUE, amount
from trainer.base.errors import ConfigError, KubedetError
from trainer.launching import machine_checks
from trainer.launching.machine_checks import Check

_PURPOSES = {
    "trainingruntimes": "a TrainJob's own runtime",
    "workflows": "ending the job of a terminated run without delay",
    "workloads": "the reason why a job waits in a queue of Kueue",
    "localqueues/pendingworkloads": "a job's position in its queue",
    "pods/exec": "`kubedet job exec`",
}
"""What optional permissions are for, by resource."""

UNKNOWN = "not known: "  # Begins the detail of a check whose request failed.
_ABSENT = "the cluster does not know them"
_TIMEOUT = 5.0
_MAX_SHOWN = 5  # Nodes that are named.
_CONTROLLER_KINDS = {"DaemonSet", "Node", "ReplicaSet", "StatefulSet"}  # Owners of pods that do not end.


def check_cluster(
    backend: ClusterBackend,
    *,
    nodes: int = 1,
    resources: Mapping[str, int] | None = None,
    secret: str = "",
    claim: str = "",
    step: Mapping[str, str] | None = None,
) -> Iterator[Check]:
    """Check a cluster for what runs need; raise ApiError if its API server does not answer.

    `nodes` are machines of a job, `resources` devices of each, e.g. {"rdma/hca": 1} (0 only counts them).
    `secret` has the object store's keys, `claim` the data root, `step` the requests of a step's pod.
    """
    cluster = backend.cluster
    info = cluster.call("get", "version", client.VersionApi(cluster.api).get_code, patience=_TIMEOUT)
    yield Check("API server", "ok", f"{info.git_version} at {cluster.api.configuration.host}")
    yield from _run({f"namespace {cluster.namespace}": _namespace(cluster)})
    kinds = {kind: _kind(cluster, kind) for kind in KINDS.values()}
    running = tuple(kind for kind, check in kinds.items() if check.state == "ok")
    absent = {kind.group for kind, check in kinds.items() if check.detail == _ABSENT}
    new = None
    with suppress(ApiError, ConfigError):  # The check of the permissions reports them.
        new = Kinds(cluster, running).of_new() if running else None
    for kind, check in kinds.items():
        if kind in running:
            launcher = "launcher=kubernetes takes" if kind is new else f"only launcher={kind.name} takes"
            taken = f"{launcher} them" if new else "you may create none"
            yield replace(check, detail=f"{check.detail}; {taken}")
        elif running and kind.group in absent:
            detail = f"{check.detail}; {running[0].title}s are enough"
            yield replace(check, state="ok", detail=detail, fix="")
        else:
            yield replace(check, state="warning") if running else check
    checks: dict[str, Iterator[Check]] = {}
    if KINDS["trainjob"] in running:
        checks[f"runtime {SHARED}"] = _runtime(cluster)
    others = {kind.plural: f"launcher={kind.name}" for kind in kinds if new and kind is not new}
    for (group, resource), verbs in (item for role in ROLES.values() for item in role.items()):
        if group not in absent:
            purpose = others.get(resource, _PURPOSES.get(resource, ""))
            results = _permission(cluster, group, resource, verbs.split(), purpose)
            checks[f"permissions on {resource}"] = results
    if len(absent) < len(kinds):
        checks["jobs of ended runs"] = _orphaned(backend)
    yield from _run(checks)
    resources = resources or {}
    rooms = {name: Room({name: str(number)}, nodes) for name, number in resources.items() if number}
    rooms |= [titled("a step", Room(step, 1))] if step else []
    counted = [name for name, number in resources.items() if not number]
    yield from check_needs(cluster, secret=secret, claim=claim, nodes=nodes, rooms=rooms, counted=counted)


class Room(NamedTuple):
    """Requests of a pod, e.g. {"cpu": "2"}, and how many of them run at the same time, on a node each."""

    requests: Mapping[str, str]
    pods: int


def titled(pod: str, room: Room) -> tuple[str, Room]:
    """Return the title of the check for the room of a pod, and the room."""
    return f"room for {pod} ({', '.join(map(' '.join, room.requests.items()))})", room


def check_needs(
    cluster: Cluster,
    *,
    secret: str = "",
    claim: str = "",
    nodes: int = 1,
    rooms: Mapping[str, Room] | None = None,
    counted: Sequence[str] = (),
) -> Iterator[Check]:
    """Check a Secret, a claim that `nodes` share, and whether the nodes have `rooms` (by the check's title).

    Devices in `counted` are only counted.
    """
    checks: dict[str, Iterator[Check]] = {}
    if secret:
        checks[f"secret {secret}"] = _secret(cluster, secret)
    if claim:
        checks[f"volume claim {claim}"] = _claim(cluster, claim, nodes)
    if rooms or counted:
        checks["nodes"] = _nodes(cluster, rooms or {}, counted)
    yield from _run(checks)


def _run(checks: Mapping[str, Iterator[Check]]) -> Iterator[Check]:
    """Yield the results of checks by title, also if a request fails."""
    for title, results in checks.items():
        try:
            yield from results
        except KubedetError as error:
            if isinstance(error, ApiError) and error.absent:
                fix = "create it as docs/install.md shows, or name another one: `kubectl get` lists them"
                yield Check(title, "missing", "does not exist", fix)
            else:
                yield Check(title, "warning", f"{UNKNOWN}{error.message}", error.fix)


def _kind(cluster: Cluster, kind: Kind) -> Check:
    """Ask for the jobs of a kind, as the launcher does, and whether its controller would run a new one."""
    title = f"{kind.title}s ({kind.controller.removeprefix('the ').partition(' (')[0]})"
    try:
        cluster.request("list", kind.resource, limit=1, patience=_TIMEOUT)
        problem = job_objects.trouble(cluster, kind)
    except ApiError as error:
        if error.unknown and "namespaces" not in error.message:
            return Check(title, "missing", _ABSENT, f"install {kind.controller}")
        return Check(title, "warning", f"{UNKNOWN}{error.message}", error.fix)
    fix = f"look at the pods and logs of {kind.controller}"
    return Check.ok_if(not problem, title, problem or "the cluster runs them", fix, needed=True)


def _runtime(cluster: Cluster) -> Iterator[Check]:
    """Check that the namespace has the shared runtime of TrainJobs, in this version."""
    runtimes = KINDS["trainjob"].resource._replace(plural="trainingruntimes")
    existing = cluster.find(runtimes, SHARED, patience=_TIMEOUT)
    problem, fix = "", f"kubectl apply -n {cluster.namespace} -f deploy/trainer/runtime.yaml"
    if existing is None:
        problem = "does not exist, so each job creates its own"
    elif not job_objects.is_managed(existing):
        problem, fix = "was not created by kubedet, so each job creates its own", "rename that one"
    elif not _contains(existing["spec"], shared_runtime()["spec"]):
        problem = "differs from this version's"
    yield Check.ok_if(not problem, f"runtime {SHARED}", problem or "TrainJobs share it", fix)


def _contains(actual: Any, expected: Any) -> bool:
    """Whether an object has all fields of the expected one; the API server adds defaults."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        return all(name in actual and _contains(actual[name], value) for name, value in expected.items())
    if isinstance(expected, list) and isinstance(actual, list):
        return len(expected) == len(actual) and all(map(_contains, actual, expected))
    return bool(expected == actual)


def _permission(
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
    fix = allow(resource, refused, cluster.namespace)
    yield Check.ok_if(not refused, f"permissions on {resource}", detail, fix, needed=not purpose)


def _orphaned(backend: ClusterBackend) -> Iterator[Check]:
    names = [job.name for job in backend.list_jobs() if job.orphaned]
    detail = f"{', '.join(names)}: still there" if names else "none"
    yield Check.ok_if(not names, "jobs of ended runs", detail, f"kubedet job stop {' '.join(names[:1])}")


def _namespace(cluster: Cluster) -> Iterator[Check]:
    name, read = cluster.namespace, cluster.core.read_namespace
    try:
        cluster.call("get", "namespaces", read, name, name=name, patience=_TIMEOUT)
        yield Check(f"namespace {name}", "ok", "exists")
    except ApiError as error:
        if error.status != 403:  # Most users may not read namespaces.
            raise


def _secret(cluster: Cluster, name: str) -> Iterator[Check]:
    read = cluster.core.read_namespaced_secret
    secret = cluster.call("get", "secrets", read, name, cluster.namespace, name=name, patience=_TIMEOUT)
    keys = sorted(set(secret.data or {}) & set(SECRET_KEYS))
    detail = f"has {', '.join(keys) or 'no key that kubedet reads'}"
    fix = "add AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    yield Check.ok_if(bool(keys), f"secret {name}", detail, fix, needed=True)


def _claim(cluster: Cluster, name: str, nodes: int) -> Iterator[Check]:
    """Check a volume claim that `nodes` share. One that waits for its first pod is pending until then."""
    read, place = cluster.core.read_namespaced_persistent_volume_claim, (name, cluster.namespace)
    claim = cluster.call("get", "persistentvolumeclaims", read, *place, name=name, patience=_TIMEOUT)
    modes = claim.spec.access_modes or []
    phase = (claim.status and claim.status.phase) or "Pending"
    size = ((claim.status and claim.status.capacity) or {}).get("storage", "")
    good = phase != "Lost" and (nodes == 1 or "ReadWriteMany" in modes)
    detail = ", ".join(filter(None, [phase.lower(), size, *modes]))
    fix = "create it again" if phase == "Lost" else f"use ReadWriteMany for {nodes} nodes"
    yield Check.ok_if(good, f"volume claim {name}", detail, fix, needed=True)


@dataclass
class _Node:
    """A ready node: its allocatable resources, and what its pods request; amounts are Decimal."""

    name: str
    allocatable: dict[str, str]
    requested: Counter[str] = field(default_factory=Counter)  # By all pods now.
    lasting: Counter[str] = field(default_factory=Counter)  # By pods that do not end by themselves.

    def lacks(self, requests: Mapping[str, str], taken: Counter[str]) -> list[str]:
        """Return the resources that are running low."""
        there = {name: amount(self.allocatable.get(name, "")) for name in requests}
        return [
            f"{name} {_shown(there[name])}, of which pods request {_shown(Decimal(taken[name]))}"
            for name, text in requests.items()
            if there[name] - taken[name] < amount(text)
        ]


def _shown(number: Decimal) -> str:
    """Return an amount of bytes in Gi, of anything else as it is."""
    return f"{number / 2**30:.1f}Gi" if number >= 2**20 else f"{number.normalize():f}"


def _nodes(cluster: Cluster, rooms: Mapping[str, Room], counted: Sequence[str]) -> Iterator[Check]:
    """Check whether the nodes have room for pods, at all and now, and count devices."""
    by_name = {}
    for item in cluster.call("list", "nodes", cluster.core.list_node, patience=_TIMEOUT).items:
        conditions = {each.type: each.status for each in item.status.conditions or []}
        if conditions.get("Ready") == "True" and not item.spec.unschedulable:
            by_name[item.metadata.name] = _Node(item.metadata.name, item.status.allocatable or {})
    nodes = list(by_name.values())
    unfinished = "status.phase!=Succeeded,status.phase!=Failed"
    options, listing = {"field_selector": unfinished}, cluster.core.list_pod_for_all_namespaces
    try:
        for pod in cluster.call("list", "pods", listing, patience=_TIMEOUT, **options).items:
            if node := by_name.get(pod.spec.node_name):
                requests = _requests(pod.spec)
                node.requested += requests
                if _CONTROLLER_KINDS & {owner.kind for owner in pod.metadata.owner_references or []}:
                    node.lasting += requests
    except ApiError as error:
        yield Check("free room on nodes", "warning", f"{UNKNOWN}{error.message}", error.fix)
    for title, room in rooms.items():
        yield _room(title, room, nodes)
    for resource in counted:
        total = sum(int(amount(node.allocatable.get(resource, ""))) for node in nodes)
        fix = "none is needed to train on CPUs; else install the device plugin"
        yield Check.ok_if(total > 0, resource, f"{total} on {len(nodes)} ready nodes", fix)


def _room(title: str, room: Room, nodes: list[_Node]) -> Check:
    """Check whether enough nodes have room for a pod each; else pods stay pending."""
    requests, count = room
    fitting = sum(not node.lacks(requests, node.lasting) for node in nodes)
    lacking = {node.name: node.lacks(requests, node.requested) for node in nodes}
    full = [f"{name} has {', '.join(lacks)}" for name, lacks in lacking.items() if lacks]
    free = len(nodes) - len(full)
    sums = f"{fitting} of {len(nodes)} ready nodes can hold it, {free} of them now; needed: {count}"
    detail = "; ".join([sums, *full[:_MAX_SHOWN], *["..."] * (len(full) > _MAX_SHOWN)])
    fix = "wait for other pods, request less (--gpus, --size), add nodes, or install the device plugin"
    return Check.ok_if(free >= count, title, detail, fix, needed=fitting < count)


def _requests(spec: Any) -> Counter[str]:
    """Return the requests of a pod, nearly as the scheduler counts them."""

    def amounts(container: Any) -> Counter[str]:
        requests = (container.resources and container.resources.requests) or {}
        return Counter({name: amount(text) for name, text in requests.items()})

    first = spec.init_containers or []
    sidecars = [container for container in first if container.restart_policy == "Always"]
    total = sum(map(amounts, [*spec.containers, *sidecars]), Counter[str]())
    for container in first:
        total |= amounts(container)
    return total


def check_queue(backend: ClusterBackend, queue: str) -> Iterator[Check]:
    """Check a LocalQueue of Kueue: that it exists and serves the kinds of jobs, and no job waits forever."""
    version = kueue.VERSIONS[0]
    try:
        release = kueue.release(backend.cluster)
        fix = f"install Kueue (0.14 or later for TrainJobs), or check `kubectl get pods -n {kueue.NAMESPACE}`"
        yield Check.ok_if(bool(release.served) and release.ready, "Kueue", str(release), fix, needed=True)
        if not release.served:
            return
        version = release.served
    except ApiError as error:
        yield Check("Kueue", "warning", f"{UNKNOWN}{error.message}", error.fix)
    checks = {
        f"queue {queue}": _queue(backend.cluster, queue, version),
        "jobs in Kueue": _kinds_in_kueue(backend, queue),
        "jobs in queues": _hopeless_jobs(backend),
    }
    yield from _run(checks)


def _queue(cluster: Cluster, name: str, version: str) -> Iterator[Check]:
    queue = cluster.request("get", Resource(kueue.GROUP, version, "localqueues"), name, patience=_TIMEOUT)
    status = queue.get("status") or {}
    active: Body = next((item for item in status.get("conditions") or [] if item["type"] == "Active"), {})
    waiting, admitted = status.get("pendingWorkloads", 0), status.get("admittedWorkloads", 0)
    detail = (
        f"of ClusterQueue {queue['spec'].get('clusterQueue')}; {waiting} wait, {admitted} are admitted; "
        f"{active.get('reason') or 'no reason given'}: {active.get('message', '')}"
    )
    fix = (
        "check with `kubectl describe` that neither queue is stopped (stopPolicy) and the ClusterQueue exists"
    )
    yield Check.ok_if(active.get("status") == "True", f"queue {name}", detail, fix, needed=True)


def _kinds_in_kueue(backend: ClusterBackend, queue: str) -> Iterator[Check]:
    """Check whether Kueue serves each kind of jobs; one kind is enough."""
    suspends: dict[Kind, bool | None] = {}
    for kind, _ in backend.kinds.jobs():
        suspends[kind] = None  # Its webhooks refuse a dry run.
        body = kind.probe()
        body["metadata"]["labels"] = {LABEL_QUEUE: queue}
        if "runtimeRef" in body["spec"]:  # A TrainJob is refused without its runtime.
            body["spec"]["runtimeRef"]["name"] = SHARED
        with suppress(ApiError):
            request = backend.cluster.request
            spec = request("create", kind.resource, body=body, dry_run="All", patience=0.0)["spec"]
            suspends[kind] = bool(spec.get("suspend") or (spec.get("runPolicy") or {}).get("suspend"))
    others = [kind.name for kind, is_served in suspends.items() if is_served]
    for kind, is_served in suspends.items():
        title = f"{kind.title}s in Kueue"
        if is_served:
            yield Check(title, "ok", "served: its webhook suspended a dry run")
        elif is_served is None:
            yield Check(title, "warning", "not known: a dry run is refused", "submit a small job to it")
        else:
            fix = f"name {kueue.framework(kind)} in integrations.frameworks of Kueue's configuration"
            use = f", or use launcher={others[0]}" if others else ""
            detail = "not served (in a dry run): a job of this kind would wait in the queue for ever"
            yield Check(title, "warning" if others else "missing", detail, fix + use)


def _hopeless_jobs(backend: ClusterBackend) -> Iterator[Check]:
    title = "jobs in queues"
    waiting = [job for job in backend.list_jobs() if job.reason and job.queue and job.phase == "suspended"]
    in_vain = [job for job in waiting if kueue.in_vain(job, backend.timings.unserved, backend.clock.now())]
    unknown = [job for job in waiting if job.reason == kueue.UNKNOWN]
    if unknown and not in_vain:
        detail = f"{len(waiting)} wait; their positions are not known"
        yield Check(title, "warning", detail, unknown[0].message)
        return
    names = ", ".join(f"{job.name} ({job.message})" for job in in_vain)
    detail = f"wait in vain: {names}" if in_vain else f"{len(waiting)} wait, none of them in vain"
    fix = "; ".join(dict.fromkeys(kueue.remedy(job) for job in in_vain))
    yield Check.ok_if(not in_vain, title, detail, fix, needed=True)


def check_pods(backend: ClusterBackend, job: str, needs: machine_checks.Needs) -> Iterator[Check]:
    """Run the trainer's own doctor in every pod of a job."""
    status = backend.status(job)
    running = [pod for pod in status.pods if pod.phase == "Running"]
    if not running:
        detail = f"is {status.phase}; no pod runs in namespace {backend.cluster.namespace}"
        yield Check(f"job {job}", "missing", detail, "name a job that runs; see `kubedet job list`")
    command = ["python", "-m", "trainer", "doctor", "--json", "--gpus", str(needs.gpus)]
    command += ["--interface", needs.interface, "--shared-memory", str(needs.shared_memory)]
    command += ["--rdma"] if needs.rdma else []
    for pod in running:
        try:
            _, out = pod_exec.captured(backend.cluster, pod, command)
            for result in [Check(**item) for item in json.loads(out)]:
                yield replace(result, title=f"{pod.name}: {result.title}")
        except KubedetError as error:
            yield Check(pod.name, "missing", error.message, error.fix)
        except (ValueError, TypeError):
            fix = "check that the image contains this version of kubedet"
            yield Check(pod.name, "missing", "`python -m trainer doctor` does not work in it", fix)
