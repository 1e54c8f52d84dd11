"""What a run needs, checked before it is started: of a cluster, of the pods of a job.

Each check is a function that yields findings, and CHECKS is the table of those of a cluster. This machine
and those of training processes are checked by `trainer.launching.doctor`.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import partial
from typing import Any, Literal

from kubernetes import client

from components.launchers.backend import Phase
from components.launchers.cluster import job_objects, kueue, pod_exec
from components.launchers.cluster.backend import ClusterBackend
from components.launchers.cluster.client import ApiError, Cluster
from components.launchers.cluster.job_objects import Kinds
from components.launchers.cluster.kinds import KINDS, trainjob
from components.launchers.cluster.kinds.kind import Body, Kind, Resource
from components.launchers.kubernetes_names import amount
from components.launchers.pod_template import LABEL_QUEUE
from components.object_store import SECRET_KEYS
from trainer.base.errors import ConfigError, KubedetError
from trainer.launching import doctor as machine
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
_SHOWN = 5  # Nodes or jobs that are named.


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
    """Cores that the pod of a step asks for, as Kubernetes writes them; empty is not checked."""
    memory: str = ""
    """Memory that it asks for."""


@dataclass(frozen=True)
class _KindState:
    """The state of a kind of jobs in a cluster."""

    kind: Kind
    state: Literal["runs", "absent", "silent", "unknown"] = "runs"
    """silent: it is installed, and its controller does not answer."""
    problem: str = ""
    """Why its jobs would not run; empty if they would."""
    fix: str = ""


@dataclass(frozen=True)
class _Cluster:
    """A cluster, and what the runs need of it."""

    backend: ClusterBackend
    needs: Needs
    kinds: list[_KindState]
    chosen: Kind | None
    """The kind of a new job unless the user names one; None if none may be created."""

    @property
    def api(self) -> Cluster:
        return self.backend.cluster


def check_cluster(backend: ClusterBackend, needs: Needs) -> Iterator[Check]:
    """Check a cluster for what the runs will ask of it; yields one finding alone if it does not answer."""
    cluster = backend.cluster
    try:
        api = client.VersionApi(cluster.api)
        info = cluster.call("get", "version", api.get_code, patience=_PATIENCE)
    except ApiError as error:
        yield Check("API server", "missing", error.message, error.fix)
        return
    yield Check("API server", "ok", f"{info.git_version} at {cluster.api.configuration.host}")
    states = [_kind_state(cluster, kind) for kind in KINDS.values()]
    running = tuple(item.kind for item in states if item.state == "runs")
    target = _Cluster(backend, needs, states, _chosen(cluster, running))
    for title, check in CHECKS.items():
        yield from _findings(title, partial(check, target))


def _findings(title: str, check: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    """Yield the findings of a check; a request that fails leaves it unknown."""
    try:
        yield from check()
    except KubedetError as error:
        yield Check(title, "warning", f"not known: {error.message}", error.fix)


def _namespace(target: _Cluster) -> Iterator[Check]:
    name = target.api.namespace
    try:
        _get(target.api, "namespaces", name, lambda: target.api.core.read_namespace(name))
        yield Check(f"namespace {name}", "ok", "exists")
    except ApiError as error:
        if error.status == 404:
            yield Check(f"namespace {name}", "missing", "does not exist", "create it, or name another")
        elif error.status != 403:  # Few may read it, and nobody needs to.
            yield Check(f"namespace {name}", "warning", error.message, error.fix)


def _kind_state(cluster: Cluster, kind: Kind) -> _KindState:
    """Ask for the jobs of a kind, as the launcher does, and whether its controller would run a new one."""
    try:
        cluster.request("list", kind.resource, limit=1, patience=_PATIENCE)
        problem = Kinds(cluster, (kind,)).trouble(kind)
    except ApiError as error:
        if error.unknown and "namespaces" not in error.message:
            return _KindState(kind, "absent", "the cluster does not know them", f"install {kind.controller}")
        return _KindState(kind, "unknown", f"not known: {error.message}", error.fix)
    if problem:
        return _KindState(kind, "silent", problem, f"look at the pods and logs of {kind.controller}")
    return _KindState(kind)


def _chosen(cluster: Cluster, running: tuple[Kind, ...]) -> Kind | None:
    with suppress(ApiError, ConfigError):  # The check of the permissions says what is missing.
        return Kinds(cluster, running).of_new() if running else None
    return None


def _kinds(target: _Cluster) -> Iterator[Check]:
    """Yield a finding for each kind of jobs; one kind is enough, and the one of a new job is named."""
    running = [item for item in target.kinds if item.state == "runs"]
    for item in target.kinds:
        title = f"{item.kind.title}s ({item.kind.controller.removeprefix('the ').partition(' (')[0]})"
        name = f"launcher={item.kind.name}"
        if item.state == "runs":
            takes = (
                "launcher=kubernetes takes them" if item.kind is target.chosen else f"only {name} takes them"
            )
            note = takes if target.chosen else "you may create none"
            yield Check(title, "ok", f"the cluster runs them; {note}")
        elif item.state == "unknown":
            yield Check(title, "warning", item.problem, item.fix)
        elif not running:
            yield Check(title, "missing", item.problem, item.fix)
        elif item.state == "silent":
            yield Check(title, "warning", f"{item.problem}; {name} would wait in vain", item.fix)
        else:
            yield Check(title, "ok", f"{item.problem}; {running[0].kind.title}s are enough")


def _runtime(target: _Cluster) -> Iterator[Check]:
    """Check the shared runtime of TrainJobs, if the cluster runs them."""
    kind, cluster, title = KINDS["trainjob"], target.api, f"runtime {trainjob.SHARED}"
    if not any(item.kind is kind and item.state == "runs" for item in target.kinds):
        return
    apply = f"kubectl apply -n {cluster.namespace} -f deploy/trainer/runtime.yaml"
    runtimes = kind.resource._replace(plural="trainingruntimes")
    existing = cluster.find(runtimes, trainjob.SHARED, patience=_PATIENCE)
    if existing is None:
        yield Check(title, "warning", "is not there; each job brings one of its own", apply)
        return
    if not job_objects.is_managed(existing):
        detail = "was not made by kubedet; each job brings one of its own"
        yield Check(title, "warning", detail, "give that one another name")
    elif not _holds(trainjob.shared_runtime()["spec"], existing["spec"]):
        yield Check(title, "warning", "is not the one of this version", apply)
    else:
        yield Check(title, "ok", "TrainJobs share it")


def _holds(expected: Any, actual: Any) -> bool:
    """Whether an object has all fields of the expected one; the API server adds defaults."""
    if isinstance(expected, dict):
        return isinstance(actual, dict) and all(
            _holds(value, actual.get(key)) for key, value in expected.items()
        )
    if isinstance(expected, list):
        same = isinstance(actual, list) and len(expected) == len(actual)
        return same and all(map(_holds, expected, actual))
    return bool(expected == actual)


def _permissions(target: _Cluster) -> Iterator[Check]:
    absent = {item.kind.group for item in target.kinds if item.state == "absent"}
    optional = dict(_OPTIONAL)
    if target.chosen:  # The others are needed only if the user names their kind.
        others = [kind for kind in KINDS.values() if kind is not target.chosen]
        optional |= {kind.plural: f"only launcher={kind.name} needs it" for kind in others}
    for (group, resource), verbs in PERMISSIONS.items():
        if group not in absent:
            check = partial(_permission, target.api, group, resource, verbs, optional.get(resource, ""))
            yield from _findings(f"permissions on {resource}", check)


def _permission(
    cluster: Cluster, group: str, resource: str, verbs: tuple[str, ...], without: str
) -> Iterator[Check]:
    """Check the verbs on a resource; `without` says what does not work without an optional permission."""
    title = f"permissions on {resource}"
    refused = [verb for verb in verbs if not _allowed(cluster, group, resource, verb)]
    if not refused:
        yield Check(title, "ok", ", ".join(verbs))
        return
    yield Check(
        title,
        "warning" if without else "missing",
        f"not allowed: {', '.join(refused)}" + (f"; {without}" if without else ""),
        f"bind a Role with apiGroups {json.dumps([group])}, resources {json.dumps([resource])}, "
        f"verbs {json.dumps(refused)} in namespace {cluster.namespace}; deploy/ holds one",
    )


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


def _left_over(target: _Cluster) -> Iterator[Check]:
    """Check for training jobs that hold their GPUs although their run has ended."""
    if all(item.state == "absent" for item in target.kinds):
        return
    names = [job.name for job in target.backend.list_jobs() if job.orphaned]
    if names:
        detail = f"{', '.join(names)}: still there"
        yield Check(_LEFT_OVER, "warning", detail, f"kubedet job stop {names[0]}")
    else:
        yield Check(_LEFT_OVER, "ok", "none")


def _secret(target: _Cluster) -> Iterator[Check]:
    cluster, name = target.api, target.needs.secret
    if not name:
        return
    title = f"secret {name}"
    try:
        read = partial(cluster.core.read_namespaced_secret, name, cluster.namespace)
        secret = _get(cluster, "secrets", name, read)
    except ApiError as error:
        yield _unread(title, error, f"create it as deploy/ shows, in namespace {cluster.namespace}")
        return
    keys = sorted(set(secret.data or {}) & set(SECRET_KEYS))
    if keys:
        yield Check(title, "ok", f"has {', '.join(keys)}")
    else:
        required = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        yield Check(title, "missing", "has no key that kubedet reads", f"add {required}")


def _claim(target: _Cluster) -> Iterator[Check]:
    cluster, needs = target.api, target.needs
    if not needs.claim:
        return
    title = f"volume claim {needs.claim}"
    try:
        read = partial(cluster.core.read_namespaced_persistent_volume_claim, needs.claim, cluster.namespace)
        claim = _get(cluster, "persistentvolumeclaims", needs.claim, read)
    except ApiError as error:
        yield _unread(title, error, f"create it in namespace {cluster.namespace}; see deploy/")
        return
    modes = claim.spec.access_modes or []
    phase = claim.status.phase if claim.status else "Pending"
    size = ((claim.status and claim.status.capacity) or {}).get("storage", "")
    if phase == "Lost":
        yield Check(title, "missing", "has lost its volume", "create it anew")
    elif needs.nodes > 1 and "ReadWriteMany" not in modes:
        fix = f"use a ReadWriteMany claim for {needs.nodes} nodes"
        yield Check(title, "missing", f"is {', '.join(modes)}, for one node alone", fix)
    else:  # A claim that waits for its first pod is pending until then.
        yield Check(title, "ok", ", ".join(filter(None, [phase.lower(), size, *modes])))


def _get(cluster: Cluster, resource: str, name: str, request: Callable[[], Any]) -> Any:
    return cluster.call("get", resource, request, name=name, patience=_PATIENCE)


def _unread(title: str, error: ApiError, fix: str) -> Check:
    """Return the finding on an object that could not be read: missing, or unknown."""
    if error.status == 404:
        return Check(title, "missing", "does not exist", fix)
    if error.status == 403:
        return Check(title, "warning", "not known: you may not read it", "ask someone who may read it")
    return Check(title, "warning", f"not known: {error.message}", error.fix)


_SERVICES = {"DaemonSet", "Node", "ReplicaSet", "StatefulSet"}
"""Owners of pods that do not end by themselves."""


@dataclass
class _Node:
    """A ready node: its allocatable resources, and what its pods request."""

    name: str
    allocatable: dict[str, str]
    requested: Counter[str] = field(default_factory=Counter)
    """By all pods now; amounts are Decimal."""
    lasting: Counter[str] = field(default_factory=Counter)
    """By those that do not end by themselves."""

    def lacks(self, requests: dict[str, str], taken: Counter[str]) -> list[str]:
        """Return the resources of which too little is left beside what pods take."""
        lacks = []
        for name, text in requests.items():
            if amount(self.allocatable.get(name, "")) - taken[name] < amount(text):
                used = f", of which pods request {Decimal(taken[name]).normalize():f}" if taken[name] else ""
                lacks.append(f"{name} {self.allocatable.get(name, '0')}{used}")
        return lacks


def _nodes(target: _Cluster) -> Iterator[Check]:
    """Check whether the nodes can hold the pods of a job and of a step, at all and now."""
    cluster, needs = target.api, target.needs
    step = {name: text for name, text in (("cpu", needs.cpu), ("memory", needs.memory)) if text}
    if not (needs.resources or step):
        return
    found = cluster.call("list", "nodes", cluster.core.list_node, patience=_PATIENCE).items
    nodes = [_Node(node.metadata.name, node.status.allocatable or {}) for node in found if _is_ready(node)]
    try:
        _add_requests(cluster, {node.name: node for node in nodes})
    except ApiError as error:
        detail = f"requests of other pods are not counted: {error.message}"
        yield Check("free room on nodes", "warning", detail, error.fix)
    for resource, number in needs.resources.items():
        if number:
            yield _room(resource, {resource: str(number)}, needs.nodes, nodes)
            continue
        count = sum(int(amount(node.allocatable.get(resource, ""))) for node in nodes)
        fix = "" if count else "none is needed to train on CPUs; else install the device plugin"
        yield Check(resource, "ok" if count else "warning", f"{count} on {len(nodes)} ready nodes", fix)
    if step:
        yield _room(f"room for a step ({', '.join(map(' '.join, step.items()))})", step, 1, nodes)


def _room(title: str, requests: dict[str, str], count: int, nodes: list[_Node]) -> Check:
    """Check whether `count` nodes can hold a pod of these requests each; else pods stay pending."""
    fitting = sum(not node.lacks(requests, node.lasting) for node in nodes)
    short = {node.name: node.lacks(requests, node.requested) for node in nodes}
    lines = [f"{name} has {', '.join(lacks)}" for name, lacks in short.items() if lacks]
    free = len(nodes) - len(lines)
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    sums = f"{fitting} of {len(nodes)} ready nodes can hold it, {free} of them now; needed: {count}"
    detail = "; ".join([sums, *lines[:_SHOWN], *more])
    if free >= count:
        return Check(title, "ok", detail)
    if fitting >= count:
        return Check(title, "warning", detail, "wait for other pods to end, or ask for less")
    fix = "ask for less (--gpus, --size, --step-cpu, --step-memory), install the device plugin, or add nodes"
    return Check(title, "missing", detail, f"{fix} (an autoscaler may do so)")


def _add_requests(cluster: Cluster, nodes: dict[str, _Node]) -> None:
    """Add the requests of all pods to their nodes."""
    unfinished = "status.phase!=Succeeded,status.phase!=Failed"
    request = partial(cluster.core.list_pod_for_all_namespaces, field_selector=unfinished)
    for pod in cluster.call("list", "pods", request, patience=_PATIENCE).items:
        if node := nodes.get(pod.spec.node_name):
            requests = _requests(pod.spec)
            node.requested += requests
            if _SERVICES & {owner.kind for owner in pod.metadata.owner_references or []}:
                node.lasting += requests


def _requests(spec: Any) -> Counter[str]:
    """Return what the scheduler counts for a pod: its containers together, or a larger init container.

    Init containers that go on (sidecars) count with the containers, and so does the pod's overhead.
    (https://kubernetes.io/docs/concepts/workloads/pods/sidecar-containers/#resource-sharing-within-containers)
    """
    running: Counter[str] = Counter()
    largest: Counter[str] = Counter()
    for container in spec.init_containers or []:
        requests = _of_container(container)
        largest |= running + requests
        if container.restart_policy == "Always":
            running += requests
    for container in spec.containers:
        running += _of_container(container)
    return (running | largest) + _amounts(spec.overhead)


def _of_container(container: Any) -> Counter[str]:
    return _amounts(container.resources and container.resources.requests)


def _amounts(requests: dict[str, str] | None) -> Counter[str]:
    return Counter({name: amount(text) for name, text in (requests or {}).items()})


def _is_ready(node: Any) -> bool:
    conditions = {item.type: item.status for item in node.status.conditions or []}
    return conditions.get("Ready") == "True" and not node.spec.unschedulable


_LEFT_OVER = "jobs of ended runs"
CHECKS: dict[str, Callable[[_Cluster], Iterator[Check]]] = {
    "namespace": _namespace,
    "kinds of jobs": _kinds,
    f"runtime {trainjob.SHARED}": _runtime,
    "permissions": _permissions,
    _LEFT_OVER: _left_over,
    "secret": _secret,
    "volume claim": _claim,
    "nodes": _nodes,
}
"""The checks of a cluster, by the title of what is reported if one cannot be made."""


def check_queue(backend: ClusterBackend, queue: str) -> Iterator[Check]:
    """Check a LocalQueue of Kueue: that it exists, serves the kinds of jobs, and no job waits in vain."""
    served = kueue.VERSIONS[0]
    try:
        release = kueue.release(backend.cluster)
    except ApiError as error:
        yield Check("Kueue", "warning", f"not known: {error.message}", error.fix)
    else:
        if not release.served:
            fix = "install Kueue (0.14 or newer for TrainJobs), or leave kueue_queue out"
            yield Check("Kueue", "missing", "the cluster does not know its Workloads", fix)
            return
        served = release.served
        fix = "" if release.ready else f"look at its pods: kubectl get pods -n {kueue.NAMESPACE}"
        yield Check("Kueue", "ok" if release.ready else "missing", str(release), fix)
    yield from _findings(f"queue {queue}", partial(_queue, backend.cluster, queue, served))
    yield from _findings("jobs in Kueue", partial(_kinds_in_kueue, backend, queue))
    yield from _findings("jobs in queues", partial(_in_vain, backend))


def _queue(cluster: Cluster, name: str, version: str) -> Iterator[Check]:
    """Check whether a LocalQueue exists and admits jobs."""
    title = f"queue {name}"
    queue = cluster.find(Resource(kueue.GROUP, version, "localqueues"), name, patience=_PATIENCE)
    if queue is None:
        detail = f"namespace {cluster.namespace} has no such LocalQueue"
        fix = "see `kubectl get localqueues` for those it has, or create this one"
        yield Check(title, "missing", detail, fix)
        return
    status = queue.get("status") or {}
    of = f"of ClusterQueue {queue['spec'].get('clusterQueue')}"
    active: Body = next((item for item in status.get("conditions") or [] if item["type"] == "Active"), {})
    if active.get("status") == "True":
        waiting, admitted = status.get("pendingWorkloads", 0), status.get("admittedWorkloads", 0)
        yield Check(title, "ok", f"active, {of}; {waiting} wait, {admitted} are admitted")
        return
    why = ": ".join(filter(None, [active.get("reason"), active.get("message")])) or "Kueue does not say why"
    fix = "see `kubectl describe` of both queues: is one stopped (stopPolicy), does the ClusterQueue exist?"
    yield Check(title, "missing", f"takes no jobs, {of}: {why}", fix)


def _kinds_in_kueue(backend: ClusterBackend, queue: str) -> Iterator[Check]:
    """Check for each kind of jobs in the cluster whether Kueue serves it."""
    cluster = backend.cluster
    kinds = [kind for kind, _ in backend.kinds.jobs()]
    named: list[str] | None = None
    with suppress(ApiError):  # Few may read it; there are other signs.
        named = kueue.frameworks(cluster)
    served = {kind.name: _served(cluster, kind, queue, named) for kind in kinds}
    for kind in kinds:
        title = f"{kind.title}s in Kueue"
        answer, sign = served[kind.name]
        others = [other for other, (yes, _) in served.items() if yes]
        if answer:
            yield Check(title, "ok", f"served, by {sign}")
        elif answer is None:
            yield Check(title, "warning", f"not known: {sign}", "a small job in the queue shows it")
        else:
            # One kind is enough; a job of the other would wait for ever.
            detail = f"not served, by {sign}: a job of it waits in the queue for ever"
            fix = f"name {kueue.framework(kind)} in integrations.frameworks of Kueue's configuration"
            use = f", or use launcher={others[0]}" if others else ""
            yield Check(title, "warning" if others else "missing", detail, fix + use)


def _served(cluster: Cluster, kind: Kind, queue: str, named: list[str] | None) -> tuple[bool | None, str]:
    """Return whether Kueue serves a kind (None if unknown), and the evidence."""
    if named is not None:
        return kueue.framework(kind) in named, "its configuration"
    changed = _rehearsed(cluster, kind, queue)
    if changed is not None:
        return _suspended(changed), f"what its webhook makes of a {kind.title}, which was not created"
    return None, "its configuration may not be read, and its webhook refuses a dry run"


def _rehearsed(cluster: Cluster, kind: Kind, queue: str) -> Body | None:
    """Return a job with a queue as the webhooks change it, by a dry run; None where they refuse it."""
    for runtime in ("", trainjob.SHARED):
        body = kind.probe()
        body["metadata"]["labels"] = {LABEL_QUEUE: queue}
        if runtime and "runtimeRef" in body["spec"]:  # A TrainJob is refused where its runtime is absent.
            body["spec"]["runtimeRef"]["name"] = runtime
        with suppress(ApiError):
            return job_objects.rehearse(cluster, kind, body)
    return None


def _suspended(job: Body) -> bool:
    spec = job["spec"]
    return bool(spec.get("suspend") or (spec.get("runPolicy") or {}).get("suspend"))


def _in_vain(backend: ClusterBackend) -> Iterator[Check]:
    """Check for jobs that will never be admitted."""
    waiting = [job for job in backend.list_jobs() if job.reason and job.queue and job.phase == "suspended"]
    in_vain = [job for job in waiting if kueue.in_vain(job, backend.timings.unserved)]
    unknown = [job for job in waiting if job.reason == kueue.UNKNOWN]
    if unknown and not in_vain:
        detail = f"{len(waiting)} wait; where they stand is not known"
        yield Check("jobs in queues", "warning", detail, unknown[0].message)
        return
    if not in_vain:
        yield Check("jobs in queues", "ok", f"{len(waiting)} wait, none of them in vain")
        return
    lines = [f"{job.name} ({job.message})" for job in in_vain[:_SHOWN]]
    more = [f"and {len(in_vain) - _SHOWN} more"] if len(in_vain) > _SHOWN else []
    fixes = dict.fromkeys(kueue.remedy(job) for job in in_vain)
    yield Check("jobs in queues", "missing", f"wait in vain: {', '.join(lines + more)}", "; ".join(fixes))


def check_pods(backend: ClusterBackend, job: str, needs: machine.Needs) -> Iterator[Check]:
    """Run the trainer's own doctor in every pod of a job."""
    status = backend.status(job)
    if status.phase is Phase.GONE:
        where = backend.cluster.namespace
        yield Check(f"job {job}", "missing", f"namespace {where} has none", "see `kubedet job list`")
        return
    running = [pod for pod in status.pods if pod.phase == "Running"]
    if not running:
        yield Check(f"job {job}", "missing", f"is {status.phase}, no pod runs", "name a job that runs")
    core, namespace = backend.cluster.core, backend.cluster.namespace
    for pod in running:
        try:
            _, out = pod_exec.captured(core, namespace, pod, _command(needs))
            for result in [Check(**item) for item in json.loads(out)]:
                yield replace(result, title=f"{pod.name}: {result.title}")
        except KubedetError as error:
            yield Check(pod.name, "missing", error.message, error.fix)
        except (ValueError, TypeError):
            fix = "see that the image holds this version of kubedet"
            yield Check(pod.name, "missing", "`python -m trainer doctor` does not work in it", fix)


def _command(needs: machine.Needs) -> list[str]:
    words = ["python", "-m", "trainer", "doctor", "--json", "--gpus", str(needs.gpus)]
    words += ["--rdma"] if needs.rdma else []
    words += ["--interface", needs.interface] if needs.interface else []
    return words + (["--shared-memory", str(needs.shared_memory)] if needs.shared_memory else [])
