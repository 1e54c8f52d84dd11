"""Checks a cluster, a queue of Kueue and the pods of a job for what a run needs.

`trainer.launching.doctor` checks this machine and those of training processes.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import partial
from typing import Any

from kubernetes import client

from components.environment import SECRET_KEYS
from components.launchers.backend import Phase
from components.launchers.cluster import job_objects, kueue, pod_exec
from components.launchers.cluster.backend import ClusterBackend
from components.launchers.cluster.client import ApiError, Cluster
from components.launchers.cluster.job_objects import Kinds
from components.launchers.cluster.kinds import KINDS, SHARED, Body, Kind, Resource, shared_runtime
from components.launchers.kubernetes_names import amount
from components.launchers.pod_template import LABEL_QUEUE
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
    "trainingruntimes": "without it TrainJobs need the namespace's runtime",
    "workloads": "without it the reason why a job waits in a queue of Kueue is unknown",
    "localqueues/pendingworkloads": "without it a job's position in a queue of Kueue is unknown",
    "workflows": "without it a terminated run ends its training job minutes later",
}
"""Optional permissions, and what does not work without each."""
_ABSENT = "the cluster does not know them"
_PATIENCE = 5.0
_SHOWN = 5  # Nodes or jobs that are named.
_SERVICES = {"DaemonSet", "Node", "ReplicaSet", "StatefulSet"}
"""Owners of pods that do not end by themselves."""


def check_cluster(
    backend: ClusterBackend, *, nodes: int = 1, resources: Mapping[str, int] | None = None, secret: str = "",
    claim: str = "", step: Mapping[str, str] | None = None,
) -> Iterator[Check]:  # fmt: skip
    """Check a cluster for what runs need; if its API server does not answer, that is the only result.

    `nodes` are machines of a job, `resources` devices of each, e.g. {"nvidia.com/gpu": 8, "rdma/hca": 1} (0
    only counts them). `secret` has the object store's keys, `claim` the data root; empty is none. `step` has
    the requests of a step's pod, e.g. {"cpu": "2", "memory": "8Gi"}.
    """
    cluster = backend.cluster
    try:
        api = client.VersionApi(cluster.api)
        info = cluster.call("get", "version", api.get_code, patience=_PATIENCE)
    except ApiError as error:
        yield Check("API server", "missing", error.message, error.fix)
        return
    yield Check("API server", "ok", f"{info.git_version} at {cluster.api.configuration.host}")
    yield from _object(cluster, "namespace", cluster.namespace)
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
    if KINDS["trainjob"] in running:
        yield from _guarded(f"runtime {SHARED}", partial(_runtime, cluster))
    optional = _OPTIONAL | {
        kind.plural: f"only launcher={kind.name} needs it" for kind in kinds if new and kind is not new
    }
    for (group, resource), verbs in PERMISSIONS.items():
        if group not in absent:
            title, without = f"permissions on {resource}", optional.get(resource, "")
            yield from _guarded(title, partial(_permission, cluster, title, group, resource, verbs, without))
    if len(absent) < len(kinds):
        yield from _guarded("jobs of ended runs", partial(_orphaned, backend))
    if secret:
        yield from _object(cluster, "secret", secret)
    if claim:
        yield from _object(cluster, "volume claim", claim, nodes)
    if resources or step:
        yield from _guarded("nodes", partial(_nodes, cluster, nodes, resources or {}, step or {}))


def _guarded(title: str, check: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    """Yield the results of a check; if a request fails, the result is unknown."""
    try:
        yield from check()
    except KubedetError as error:
        yield Check(title, "warning", f"not known: {error.message}", error.fix)


def _kind(cluster: Cluster, kind: Kind) -> Check:
    """Ask for the jobs of a kind, as the launcher does, and whether its controller would run a new one."""
    title = f"{kind.title}s ({kind.controller.removeprefix('the ').partition(' (')[0]})"
    try:
        cluster.request("list", kind.resource, limit=1, patience=_PATIENCE)
        problem = job_objects.trouble(cluster, kind)
    except ApiError as error:
        if error.unknown and "namespaces" not in error.message:
            return Check(title, "missing", _ABSENT, f"install {kind.controller}")
        return Check(title, "warning", f"not known: {error.message}", error.fix)
    if problem:
        return Check(title, "missing", problem, f"look at the pods and logs of {kind.controller}")
    return Check(title, "ok", "the cluster runs them")


def _runtime(cluster: Cluster) -> Iterator[Check]:
    """Check that the namespace has the shared runtime of TrainJobs, in this version."""
    title, apply = f"runtime {SHARED}", f"kubectl apply -n {cluster.namespace} -f deploy/trainer/runtime.yaml"
    runtimes = KINDS["trainjob"].resource._replace(plural="trainingruntimes")
    existing = cluster.find(runtimes, SHARED, patience=_PATIENCE)
    if existing is None:
        yield Check(title, "warning", "does not exist; each job creates its own", apply)
    elif not job_objects.is_managed(existing):
        detail = "was not made by kubedet; each job creates its own"
        yield Check(title, "warning", detail, "give that one another name")
    elif not _contains(existing["spec"], shared_runtime()["spec"]):
        yield Check(title, "warning", "is not the one of this version", apply)
    else:
        yield Check(title, "ok", "TrainJobs share it")


def _contains(actual: Any, expected: Any) -> bool:
    """Whether an object has all fields of the expected one; the API server adds defaults."""
    if isinstance(expected, dict):
        fields = actual if isinstance(actual, dict) else {}
        return all(name in fields and _contains(fields[name], value) for name, value in expected.items())
    if isinstance(expected, list):
        same = isinstance(actual, list) and len(expected) == len(actual)
        return same and all(map(_contains, actual, expected))
    return bool(expected == actual)


def _permission(
    cluster: Cluster, title: str, group: str, resource: str, verbs: tuple[str, ...], without: str
) -> Iterator[Check]:
    name, _, part = resource.partition("/")
    review = client.AuthorizationV1Api(cluster.api).create_self_subject_access_review
    refused = []
    for verb in verbs:
        attributes = client.V1ResourceAttributes(
            namespace=cluster.namespace, group=group, resource=name, subresource=part or None, verb=verb
        )
        spec = client.V1SelfSubjectAccessReviewSpec(resource_attributes=attributes)
        send = partial(review, client.V1SelfSubjectAccessReview(spec=spec))
        answer = cluster.call("create", "selfsubjectaccessreviews", send, patience=_PATIENCE)
        refused += [] if answer.status.allowed else [verb]
    if not refused:
        yield Check(title, "ok", ", ".join(verbs))
        return
    yield Check(
        title,
        "warning" if without else "missing",
        "; ".join(filter(None, [f"not allowed: {', '.join(refused)}", without])),
        f"bind a Role with apiGroups {json.dumps([group])}, resources {json.dumps([resource])}, "
        f"verbs {json.dumps(refused)} in namespace {cluster.namespace}; deploy/ contains one",
    )


def _orphaned(backend: ClusterBackend) -> Iterator[Check]:
    names = [job.name for job in backend.list_jobs() if job.orphaned]
    fix = f"kubedet job stop {names[0]}" if names else ""
    detail = f"{', '.join(names)}: still there" if names else "none"
    yield Check("jobs of ended runs", "warning" if names else "ok", detail, fix)


def _object(cluster: Cluster, kind: str, name: str, nodes: int = 1) -> Iterator[Check]:
    """Read a namespace, secret or volume claim and check it; `nodes` share a claim."""
    title = f"{kind} {name}"
    core, namespace = cluster.core, cluster.namespace
    reads = {
        "namespace": partial(core.read_namespace, name),
        "secret": partial(core.read_namespaced_secret, name, namespace),
        "volume claim": partial(core.read_namespaced_persistent_volume_claim, name, namespace),
    }
    try:
        found: Any = cluster.call("get", kind, reads[kind], name=name, patience=_PATIENCE)
    except ApiError as error:
        if error.status == 404:
            yield Check(title, "missing", "does not exist", "create it as deploy/ shows, or name another")
        elif kind != "namespace" or error.status != 403:  # Most users may not read namespaces.
            yield Check(title, "warning", f"not known: {error.message}", error.fix)
        return
    if kind == "namespace":
        yield Check(title, "ok", "exists")
    elif kind == "secret":
        keys = sorted(set(found.data or {}) & set(SECRET_KEYS))
        fix = "" if keys else "add AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        detail = f"has {', '.join(keys)}" if keys else "has no key that kubedet reads"
        yield Check(title, "ok" if keys else "missing", detail, fix)
    else:
        modes = found.spec.access_modes or []
        phase = found.status.phase if found.status else "Pending"
        size = ((found.status and found.status.capacity) or {}).get("storage", "")
        if phase == "Lost":
            yield Check(title, "missing", "has lost its volume", "create it again")
        elif nodes > 1 and "ReadWriteMany" not in modes:
            fix = f"use ReadWriteMany for {nodes} nodes"
            yield Check(title, "missing", f"is {', '.join(modes)}, for one node", fix)
        else:  # A claim that waits for its first pod is pending until then.
            yield Check(title, "ok", ", ".join(filter(None, [phase.lower(), size, *modes])))


@dataclass
class _Node:
    """A ready node: its allocatable resources, and what its pods request."""

    name: str
    allocatable: dict[str, str]
    requested: Counter[str] = field(default_factory=Counter)  # By all pods now; amounts are Decimal.
    lasting: Counter[str] = field(default_factory=Counter)  # By pods that do not end by themselves.

    def lacks(self, requests: Mapping[str, str], taken: Counter[str]) -> list[str]:
        """Return the resources of which too little is left."""
        lacks = []
        for name, text in requests.items():
            if amount(self.allocatable.get(name, "")) - taken[name] < amount(text):
                used = f", of which pods request {Decimal(taken[name]).normalize():f}" if taken[name] else ""
                lacks.append(f"{name} {self.allocatable.get(name, '0')}{used}")
        return lacks


def _nodes(
    cluster: Cluster, count: int, resources: Mapping[str, int], step: Mapping[str, str]
) -> Iterator[Check]:
    """Check whether the nodes have room for the pods of a job and of a step, at all and now."""
    nodes = {}
    for item in cluster.call("list", "nodes", cluster.core.list_node, patience=_PATIENCE).items:
        conditions = {each.type: each.status for each in item.status.conditions or []}
        if conditions.get("Ready") == "True" and not item.spec.unschedulable:
            nodes[item.metadata.name] = _Node(item.metadata.name, item.status.allocatable or {})
    unfinished = "status.phase!=Succeeded,status.phase!=Failed"
    list_pods = partial(cluster.core.list_pod_for_all_namespaces, field_selector=unfinished)
    try:
        for pod in cluster.call("list", "pods", list_pods, patience=_PATIENCE).items:
            if node := nodes.get(pod.spec.node_name):
                requests = _requests(pod.spec)
                node.requested += requests
                if _SERVICES & {owner.kind for owner in pod.metadata.owner_references or []}:
                    node.lasting += requests
    except ApiError as error:
        detail = f"requests of other pods are not counted: {error.message}"
        yield Check("free room on nodes", "warning", detail, error.fix)
    for resource, number in resources.items():
        if number:
            yield _room(resource, {resource: str(number)}, count, list(nodes.values()))
            continue
        total = sum(int(amount(node.allocatable.get(resource, ""))) for node in nodes.values())
        fix = "" if total else "none is needed to train on CPUs; else install the device plugin"
        yield Check(resource, "ok" if total else "warning", f"{total} on {len(nodes)} ready nodes", fix)
    if step:
        title = f"room for a step ({', '.join(map(' '.join, step.items()))})"
        yield _room(title, step, 1, list(nodes.values()))


def _room(title: str, requests: Mapping[str, str], count: int, nodes: list[_Node]) -> Check:
    """Check whether `count` nodes have room for a pod of these requests each; else pods stay pending."""
    fitting = sum(not node.lacks(requests, node.lasting) for node in nodes)
    full = [f"{node.name} has {', '.join(lacks)}" for node in nodes
            if (lacks := node.lacks(requests, node.requested))]  # fmt: skip
    free = len(nodes) - len(full)
    sums = f"{fitting} of {len(nodes)} ready nodes can hold it, {free} of them now; needed: {count}"
    detail = "; ".join([sums, *full[:_SHOWN], *["..."] * (len(full) > _SHOWN)])
    if free >= count:
        return Check(title, "ok", detail)
    if fitting >= count:
        return Check(title, "warning", detail, "wait for other pods to end, or ask for less")
    fix = "ask for less (--gpus, --size, --step-cpu, --step-memory), install the device plugin, or add nodes"
    return Check(title, "missing", detail, f"{fix} (an autoscaler may do so)")


def _requests(spec: Any) -> Counter[str]:
    """Return the requests of a pod, nearly as the scheduler counts them."""

    def amounts(requests: dict[str, str] | None) -> Counter[str]:
        return Counter({name: amount(text) for name, text in (requests or {}).items()})

    total, largest = Counter[str](), Counter[str]()
    for container in spec.containers:
        total += amounts(container.resources and container.resources.requests)
    for container in spec.init_containers or []:
        requests = amounts(container.resources and container.resources.requests)
        if container.restart_policy == "Always":
            total += requests
        else:
            largest |= requests
    return (total | largest) + amounts(spec.overhead)


def check_queue(backend: ClusterBackend, queue: str) -> Iterator[Check]:
    """Check a LocalQueue of Kueue: that it exists and serves the kinds of jobs, and no job waits in vain."""
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
    yield from _guarded(f"queue {queue}", partial(_queue, backend.cluster, queue, served))
    yield from _guarded("jobs in Kueue", partial(_kinds_in_kueue, backend, queue))
    yield from _guarded("jobs in queues", partial(_in_vain, backend))


def _queue(cluster: Cluster, name: str, version: str) -> Iterator[Check]:
    title = f"queue {name}"
    queue = cluster.find(Resource(kueue.GROUP, version, "localqueues"), name, patience=_PATIENCE)
    if queue is None:
        detail = f"namespace {cluster.namespace} has no such LocalQueue"
        yield Check(title, "missing", detail, "create it, or choose one of `kubectl get localqueues`")
        return
    status, of = queue.get("status") or {}, f"of ClusterQueue {queue['spec'].get('clusterQueue')}"
    active: Body = next((item for item in status.get("conditions") or [] if item["type"] == "Active"), {})
    if active.get("status") == "True":
        waiting, admitted = status.get("pendingWorkloads", 0), status.get("admittedWorkloads", 0)
        yield Check(title, "ok", f"active, {of}; {waiting} wait, {admitted} are admitted")
        return
    reason = ": ".join(filter(None, [active.get("reason"), active.get("message")])) or "no reason given"
    fix = "see `kubectl describe` of both queues: is one stopped (stopPolicy), does the ClusterQueue exist?"
    yield Check(title, "missing", f"takes no jobs, {of}: {reason}", fix)


def _kinds_in_kueue(backend: ClusterBackend, queue: str) -> Iterator[Check]:
    """Check whether Kueue serves each kind of jobs; one kind is enough."""
    suspends: dict[Kind, bool | None] = {}
    for kind, _ in backend.kinds.jobs():
        suspends[kind] = None  # Its webhooks refuse a dry run.
        for runtime in ("", SHARED):
            body = kind.probe()
            body["metadata"]["labels"] = {LABEL_QUEUE: queue}
            if runtime and "runtimeRef" in body["spec"]:  # A TrainJob is refused without its runtime.
                body["spec"]["runtimeRef"]["name"] = runtime
            with suppress(ApiError):
                request = backend.cluster.request
                spec = request("create", kind.resource, body=body, dry_run="All", patience=0.0)["spec"]
                suspends[kind] = bool(spec.get("suspend") or (spec.get("runPolicy") or {}).get("suspend"))
                break
    others = [kind.name for kind, is_served in suspends.items() if is_served]
    for kind, is_served in suspends.items():
        title = f"{kind.title}s in Kueue"
        if is_served:
            yield Check(title, "ok", "served: its webhook suspended a dry run")
        elif is_served is None:
            detail = "not known: the cluster refuses a dry run"
            yield Check(title, "warning", detail, "submit a small job to the queue")
        else:
            fix = f"name {kueue.framework(kind)} in integrations.frameworks of Kueue's configuration"
            use = f", or use launcher={others[0]}" if others else ""
            detail = "not served (in a dry run): a job of this kind would wait in the queue for ever"
            yield Check(title, "warning" if others else "missing", detail, fix + use)


def _in_vain(backend: ClusterBackend) -> Iterator[Check]:
    title = "jobs in queues"
    waiting = [job for job in backend.list_jobs() if job.reason and job.queue and job.phase == "suspended"]
    in_vain = [job for job in waiting if kueue.in_vain(job, backend.timings.unserved)]
    unknown = [job for job in waiting if job.reason == kueue.UNKNOWN]
    if in_vain:
        lines = [f"{job.name} ({job.message})" for job in in_vain[:_SHOWN]]
        lines += ["..."] * (len(in_vain) > _SHOWN)
        fixes = dict.fromkeys(kueue.remedy(job) for job in in_vain)
        yield Check(title, "missing", f"wait in vain: {', '.join(lines)}", "; ".join(fixes))
    elif unknown:
        detail = f"{len(waiting)} wait; their positions are not known"
        yield Check(title, "warning", detail, unknown[0].message)
    else:
        yield Check(title, "ok", f"{len(waiting)} wait, none of them in vain")


def check_pods(backend: ClusterBackend, job: str, needs: machine.Needs) -> Iterator[Check]:
    """Run the trainer's own doctor in every pod of a job."""
    status = backend.status(job)
    running = [pod for pod in status.pods if pod.phase == "Running"]
    command = ["python", "-m", "trainer", "doctor", "--json", "--gpus", str(needs.gpus)]
    command += ["--rdma"] if needs.rdma else []
    command += ["--interface", needs.interface] if needs.interface else []
    command += ["--shared-memory", str(needs.shared_memory)] if needs.shared_memory else []
    if status.phase is Phase.GONE:
        detail = f"namespace {backend.cluster.namespace} has none"
        yield Check(f"job {job}", "missing", detail, "see `kubedet job list`")
    elif not running:
        yield Check(f"job {job}", "missing", f"is {status.phase}, no pod runs", "name a job that runs")
    for pod in running:
        try:
            _, out = pod_exec.captured(backend.cluster, pod, command)
            for result in [Check(**item) for item in json.loads(out)]:
                yield replace(result, title=f"{pod.name}: {result.title}")
        except KubedetError as error:
            yield Check(pod.name, "missing", error.message, error.fix)
        except (ValueError, TypeError):
            fix = "see that the image holds this version of kubedet"
            yield Check(pod.name, "missing", "`python -m trainer doctor` does not work in it", fix)
