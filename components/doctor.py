"""What a run needs, checked before it starts: in a cluster, in a queue of Kueue, in the pods of a job.

`trainer.launching.doctor` checks this machine and those of training processes.
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
    "trainingruntimes": "without it only TrainJobs can run that the namespace's runtime fits",
    "workloads": "without it nobody tells why a job waits in a queue of Kueue",
    "localqueues/pendingworkloads": "without it nobody tells a job's place in a queue of Kueue",
    "workflows": "without it a terminated run ends its training job minutes later",
}
"""Optional permissions, and what does not work without each."""
_PATIENCE = 5.0
_SHOWN = 5  # Nodes or jobs that are named.
_SERVICES = {"DaemonSet", "Node", "ReplicaSet", "StatefulSet"}
"""Owners of pods that do not end by themselves."""


@dataclass(frozen=True)
class Needs:
    """What the runs will ask of the cluster."""

    nodes: int = 1
    """Machines."""
    resources: dict[str, int] = field(default_factory=dict)
    """Devices of each machine, e.g. {"nvidia.com/gpu": 8, "rdma/hca": 1}; 0 only counts them."""
    secret: str = ""
    """Secret with the object store's keys; empty is none."""
    claim: str = ""
    """PersistentVolumeClaim with the data root; empty is none."""
    step: dict[str, str] = field(default_factory=dict)
    """Requests of a step's pod, e.g. {"cpu": "2", "memory": "8Gi"}; empty checks none."""


@dataclass(frozen=True)
class _Trouble:
    """Why jobs of a kind would not run."""

    state: Literal["absent", "silent", "unknown"]
    """silent: it is installed, and its controller does not answer."""
    detail: str
    fix: str


def check_cluster(backend: ClusterBackend, needs: Needs) -> Iterator[Check]:
    """Check a cluster for what the runs will ask of it; if it does not answer, that is the only result."""
    cluster = backend.cluster
    try:
        api = client.VersionApi(cluster.api)
        info = cluster.call("get", "version", api.get_code, patience=_PATIENCE)
    except ApiError as error:
        yield Check("API server", "missing", error.message, error.fix)
        return
    yield Check("API server", "ok", f"{info.git_version} at {cluster.api.configuration.host}")
    troubles = {kind: _trouble(cluster, kind) for kind in KINDS.values()}
    new = _kind_of_new(cluster, tuple(kind for kind, trouble in troubles.items() if trouble is None))
    runs_trainjobs = troubles[KINDS["trainjob"]] is None
    none_known = all(trouble is not None and trouble.state == "absent" for trouble in troubles.values())
    checks: dict[str, Callable[[], Iterator[Check]] | None] = {
        "namespace": partial(_namespace, cluster),
        "kinds of jobs": partial(_kinds, troubles, new),
        f"runtime {SHARED}": partial(_runtime, cluster) if runs_trainjobs else None,
        "permissions": partial(_permissions, cluster, troubles, new),
        "jobs of ended runs": None if none_known else partial(_orphaned, backend),
        "secret": partial(_secret, cluster, needs.secret) if needs.secret else None,
        "volume claim": partial(_claim, cluster, needs.claim, needs.nodes) if needs.claim else None,
        "nodes": partial(_nodes, cluster, needs) if needs.resources or needs.step else None,
    }
    for title, check in checks.items():
        if check:
            yield from _guarded(title, check)


def _guarded(title: str, check: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    """Yield the results of a check; if a request fails, the result is unknown."""
    try:
        yield from check()
    except KubedetError as error:
        yield Check(title, "warning", f"not known: {error.message}", error.fix)


def _namespace(cluster: Cluster) -> Iterator[Check]:
    title, name = f"namespace {cluster.namespace}", cluster.namespace
    try:
        _get(cluster, "namespaces", name, partial(cluster.core.read_namespace, name))
        yield Check(title, "ok", "exists")
    except ApiError as error:
        if error.status == 404:
            yield Check(title, "missing", "does not exist", "create it, or name another")
        elif error.status != 403:  # Few may read it, and nobody needs to.
            yield Check(title, "warning", error.message, error.fix)


def _trouble(cluster: Cluster, kind: Kind) -> _Trouble | None:
    """Ask for the jobs of a kind, as the launcher does, and whether its controller would run a new one."""
    try:
        cluster.request("list", kind.resource, limit=1, patience=_PATIENCE)
        problem = Kinds(cluster, (kind,)).trouble(kind)
    except ApiError as error:
        if error.unknown and "namespaces" not in error.message:
            return _Trouble("absent", "the cluster does not know them", f"install {kind.controller}")
        return _Trouble("unknown", f"not known: {error.message}", error.fix)
    if not problem:
        return None
    return _Trouble("silent", problem, f"look at the pods and logs of {kind.controller}")


def _kind_of_new(cluster: Cluster, running: tuple[Kind, ...]) -> Kind | None:
    with suppress(ApiError, ConfigError):  # The check of the permissions says what is missing.
        return Kinds(cluster, running).of_new() if running else None
    return None


def _kinds(troubles: dict[Kind, _Trouble | None], new: Kind | None) -> Iterator[Check]:
    """Check each kind of jobs: one kind is enough, and that of a new job is named."""
    running = [kind for kind, trouble in troubles.items() if trouble is None]
    for kind, trouble in troubles.items():
        title = f"{kind.title}s ({kind.controller.removeprefix('the ').partition(' (')[0]})"
        name = f"launcher={kind.name}"
        if trouble is None:
            takes = "launcher=kubernetes takes them" if kind is new else f"only {name} takes them"
            yield Check(title, "ok", f"the cluster runs them; {takes if new else 'you may create none'}")
        elif trouble.state == "unknown":
            yield Check(title, "warning", trouble.detail, trouble.fix)
        elif not running:
            yield Check(title, "missing", trouble.detail, trouble.fix)
        elif trouble.state == "silent":
            yield Check(title, "warning", f"{trouble.detail}; {name} would wait in vain", trouble.fix)
        else:
            yield Check(title, "ok", f"{trouble.detail}; {running[0].title}s are enough")


def _runtime(cluster: Cluster) -> Iterator[Check]:
    """Check that the namespace has the shared runtime of TrainJobs, in this version."""
    title = f"runtime {SHARED}"
    apply = f"kubectl apply -n {cluster.namespace} -f deploy/trainer/runtime.yaml"
    runtimes = KINDS["trainjob"].resource._replace(plural="trainingruntimes")
    existing = cluster.find(runtimes, SHARED, patience=_PATIENCE)
    if existing is None:
        yield Check(title, "warning", "is not there; each job brings one of its own", apply)
    elif not job_objects.is_managed(existing):
        detail = "was not made by kubedet; each job brings one of its own"
        yield Check(title, "warning", detail, "give that one another name")
    elif not _holds(shared_runtime()["spec"], existing["spec"]):
        yield Check(title, "warning", "is not the one of this version", apply)
    else:
        yield Check(title, "ok", "TrainJobs share it")


def _holds(expected: Any, actual: Any) -> bool:
    """Whether an object has all fields of the expected one; the API server adds defaults."""
    if isinstance(expected, dict):
        fields = actual if isinstance(actual, dict) else {}
        return all(name in fields and _holds(value, fields[name]) for name, value in expected.items())
    if isinstance(expected, list):
        same = isinstance(actual, list) and len(expected) == len(actual)
        return same and all(map(_holds, expected, actual))
    return bool(expected == actual)


def _permissions(
    cluster: Cluster, troubles: dict[Kind, _Trouble | None], new: Kind | None
) -> Iterator[Check]:
    absent = {kind.group for kind, trouble in troubles.items() if trouble and trouble.state == "absent"}
    others = [kind for kind in troubles if new and kind is not new]
    optional = _OPTIONAL | {kind.plural: f"only launcher={kind.name} needs it" for kind in others}
    for (group, resource), verbs in PERMISSIONS.items():
        if group not in absent:
            check = partial(_permission, cluster, group, resource, verbs, optional.get(resource, ""))
            yield from _guarded(f"permissions on {resource}", check)


def _permission(
    cluster: Cluster, group: str, resource: str, verbs: tuple[str, ...], without: str
) -> Iterator[Check]:
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
    spec = client.V1SelfSubjectAccessReviewSpec(resource_attributes=attributes)
    review = client.V1SelfSubjectAccessReview(spec=spec)
    send = partial(client.AuthorizationV1Api(cluster.api).create_self_subject_access_review, review)
    answer = cluster.call("create", "selfsubjectaccessreviews", send, patience=_PATIENCE)
    return bool(answer.status.allowed)


def _orphaned(backend: ClusterBackend) -> Iterator[Check]:
    names = [job.name for job in backend.list_jobs() if job.orphaned]
    fix = f"kubedet job stop {names[0]}" if names else ""
    detail = f"{', '.join(names)}: still there" if names else "none"
    yield Check("jobs of ended runs", "warning" if names else "ok", detail, fix)


def _secret(cluster: Cluster, name: str) -> Iterator[Check]:
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
        fix = "add AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        yield Check(title, "missing", "has no key that kubedet reads", fix)


def _claim(cluster: Cluster, name: str, nodes: int) -> Iterator[Check]:
    title = f"volume claim {name}"
    try:
        read = partial(cluster.core.read_namespaced_persistent_volume_claim, name, cluster.namespace)
        claim = _get(cluster, "persistentvolumeclaims", name, read)
    except ApiError as error:
        yield _unread(title, error, f"create it in namespace {cluster.namespace}; see deploy/")
        return
    modes = claim.spec.access_modes or []
    phase = claim.status.phase if claim.status else "Pending"
    size = ((claim.status and claim.status.capacity) or {}).get("storage", "")
    if phase == "Lost":
        yield Check(title, "missing", "has lost its volume", "create it again")
    elif nodes > 1 and "ReadWriteMany" not in modes:
        detail, fix = f"is {', '.join(modes)}, for one node alone", f"use ReadWriteMany for {nodes} nodes"
        yield Check(title, "missing", detail, fix)
    else:  # A claim that waits for its first pod is pending until then.
        yield Check(title, "ok", ", ".join(filter(None, [phase.lower(), size, *modes])))


def _get(cluster: Cluster, resource: str, name: str, request: Callable[[], Any]) -> Any:
    return cluster.call("get", resource, request, name=name, patience=_PATIENCE)


def _unread(title: str, error: ApiError, fix: str) -> Check:
    if error.status == 404:
        return Check(title, "missing", "does not exist", fix)
    if error.status == 403:
        return Check(title, "warning", "not known: you may not read it", "ask someone who may read it")
    return Check(title, "warning", f"not known: {error.message}", error.fix)


@dataclass
class _Node:
    """A ready node: its allocatable resources, and what its pods request."""

    name: str
    allocatable: dict[str, str]
    requested: Counter[str] = field(default_factory=Counter)
    """By all pods now; amounts are Decimal."""
    lasting: Counter[str] = field(default_factory=Counter)
    """By pods that do not end by themselves."""

    def lacks(self, requests: dict[str, str], taken: Counter[str]) -> list[str]:
        """Return the resources of which too little is left."""
        lacks = []
        for name, text in requests.items():
            if amount(self.allocatable.get(name, "")) - taken[name] < amount(text):
                used = f", of which pods request {Decimal(taken[name]).normalize():f}" if taken[name] else ""
                lacks.append(f"{name} {self.allocatable.get(name, '0')}{used}")
        return lacks


def _nodes(cluster: Cluster, needs: Needs) -> Iterator[Check]:
    """Check whether the nodes can hold the pods of a job and of a step, at all and now."""
    found = cluster.call("list", "nodes", cluster.core.list_node, patience=_PATIENCE).items
    nodes = {item.metadata.name: _Node(item.metadata.name, item.status.allocatable or {})
             for item in found if _is_ready(item)}  # fmt: skip
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
    for resource, number in needs.resources.items():
        if number:
            yield _room(resource, {resource: str(number)}, needs.nodes, list(nodes.values()))
            continue
        count = sum(int(amount(node.allocatable.get(resource, ""))) for node in nodes.values())
        fix = "" if count else "none is needed to train on CPUs; else install the device plugin"
        yield Check(resource, "ok" if count else "warning", f"{count} on {len(nodes)} ready nodes", fix)
    if needs.step:
        title = f"room for a step ({', '.join(map(' '.join, needs.step.items()))})"
        yield _room(title, needs.step, 1, list(nodes.values()))


def _room(title: str, requests: dict[str, str], count: int, nodes: list[_Node]) -> Check:
    """Check whether `count` nodes can hold a pod of these requests each; else pods stay pending."""
    fitting = sum(not node.lacks(requests, node.lasting) for node in nodes)
    full = [f"{node.name} has {', '.join(lacks)}" for node in nodes
            if (lacks := node.lacks(requests, node.requested))]  # fmt: skip
    free = len(nodes) - len(full)
    sums = f"{fitting} of {len(nodes)} ready nodes can hold it, {free} of them now; needed: {count}"
    detail = "; ".join([sums, *_some(full)])
    if free >= count:
        return Check(title, "ok", detail)
    if fitting >= count:
        return Check(title, "warning", detail, "wait for other pods to end, or ask for less")
    fix = "ask for less (--gpus, --size, --step-cpu, --step-memory), install the device plugin, or add nodes"
    return Check(title, "missing", detail, f"{fix} (an autoscaler may do so)")


def _some(lines: list[str]) -> list[str]:
    return lines[:_SHOWN] + ([f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else [])


def _requests(spec: Any) -> Counter[str]:
    """Return what the scheduler counts for a pod.

    Source: https://kubernetes.io/docs/concepts/workloads/pods/sidecar-containers/, "Resource sharing".
    """
    running: Counter[str] = Counter()
    largest: Counter[str] = Counter()
    for container in spec.init_containers or []:
        requests = _amounts(container.resources and container.resources.requests)
        largest |= running + requests
        if container.restart_policy == "Always":
            running += requests
    for container in spec.containers:
        running += _amounts(container.resources and container.resources.requests)
    return (running | largest) + _amounts(spec.overhead)


def _amounts(requests: dict[str, str] | None) -> Counter[str]:
    return Counter({name: amount(text) for name, text in (requests or {}).items()})


def _is_ready(node: Any) -> bool:
    conditions = {item.type: item.status for item in node.status.conditions or []}
    return conditions.get("Ready") == "True" and not node.spec.unschedulable


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
    """Check whether Kueue serves each kind of jobs: by its configuration, else by what its webhook does."""
    cluster = backend.cluster
    kinds = [kind for kind, _ in backend.kinds.jobs()]
    served: dict[Kind, bool | None] = {}
    try:
        named = kueue.frameworks(cluster)
        served = {kind: kueue.framework(kind) in named for kind in kinds}
        evidence = "its configuration"
    except ApiError:  # Few may read it.
        served = {kind: _suspends(cluster, kind, queue) for kind in kinds}
        evidence = "what its webhook makes of a {}, which was not created"
    for kind in kinds:
        title, by = f"{kind.title}s in Kueue", evidence.format(kind.title)
        others = [other.name for other, answer in served.items() if answer]
        if served[kind]:
            yield Check(title, "ok", f"served, by {by}")
        elif served[kind] is None:
            detail = "not known: its configuration may not be read, and its webhook refuses a dry run"
            yield Check(title, "warning", detail, "a small job in the queue shows it")
        else:  # One kind is enough.
            fix = f"name {kueue.framework(kind)} in integrations.frameworks of Kueue's configuration"
            use = f", or use launcher={others[0]}" if others else ""
            detail = f"not served, by {by}: a job of it waits in the queue for ever"
            yield Check(title, "warning" if others else "missing", detail, fix + use)


def _suspends(cluster: Cluster, kind: Kind, queue: str) -> bool | None:
    """Whether the webhooks suspend a job with a queue, by a dry run; None if they refuse it."""
    for runtime in ("", SHARED):
        body = kind.probe()
        body["metadata"]["labels"] = {LABEL_QUEUE: queue}
        if runtime and "runtimeRef" in body["spec"]:  # A TrainJob is refused if its runtime does not exist.
            body["spec"]["runtimeRef"]["name"] = runtime
        with suppress(ApiError):
            spec = job_objects.rehearse(cluster, kind, body)["spec"]
            return bool(spec.get("suspend") or (spec.get("runPolicy") or {}).get("suspend"))
    return None


def _in_vain(backend: ClusterBackend) -> Iterator[Check]:
    title = "jobs in queues"
    waiting = [job for job in backend.list_jobs() if job.reason and job.queue and job.phase == "suspended"]
    in_vain = [job for job in waiting if kueue.in_vain(job, backend.timings.unserved)]
    unknown = [job for job in waiting if job.reason == kueue.UNKNOWN]
    if in_vain:
        lines = _some([f"{job.name} ({job.message})" for job in in_vain])
        fixes = dict.fromkeys(kueue.remedy(job) for job in in_vain)
        yield Check(title, "missing", f"wait in vain: {', '.join(lines)}", "; ".join(fixes))
    elif unknown:
        detail = f"{len(waiting)} wait; where they stand is not known"
        yield Check(title, "warning", detail, unknown[0].message)
    else:
        yield Check(title, "ok", f"{len(waiting)} wait, none of them in vain")


def check_pods(backend: ClusterBackend, job: str, needs: machine.Needs) -> Iterator[Check]:
    """Run the trainer's own doctor in every pod of a job."""
    status = backend.status(job)
    running = [pod for pod in status.pods if pod.phase == "Running"]
    if status.phase is Phase.GONE:
        detail = f"namespace {backend.cluster.namespace} has none"
        yield Check(f"job {job}", "missing", detail, "see `kubedet job list`")
    elif not running:
        yield Check(f"job {job}", "missing", f"is {status.phase}, no pod runs", "name a job that runs")
    for pod in running:
        try:
            command, namespace = _command(needs), backend.cluster.namespace
            _, out = pod_exec.captured(backend.cluster.core, namespace, pod, command)
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
