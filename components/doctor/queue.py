"""Checks of a Kueue queue: that it exists, that Kueue serves the kind of job, that no job waits in vain."""

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from components.launchers.cluster import job_objects, kueue
from components.launchers.cluster.backend import ClusterBackend
from components.launchers.cluster.client import ApiError, Cluster
from components.launchers.cluster.kinds import trainjob
from components.launchers.cluster.kinds.kind import Body, Kind
from components.launchers.pod_template import LABEL_QUEUE
from trainer.launching.doctor import Check

_PATIENCE = 5.0
_SHOWN = 5  # Jobs that are named.


def check(backend: ClusterBackend, queue: str) -> Iterator[Check]:
    """Check a queue; nothing is made.

    Args:
        backend: the cluster and namespace.
        queue: name of the LocalQueue.
    """
    cluster, served = backend.cluster, kueue.VERSIONS[0]
    try:
        release = kueue.release(cluster)
    except ApiError as error:
        yield Check("Kueue", "warning", f"not known: {error.message}", error.fix)
    else:
        if not release.served:
            yield Check("Kueue", "missing", "the cluster does not know its Workloads",
                "install Kueue (0.14 or newer for TrainJobs), or leave kueue_queue out",
            )  # fmt: skip
            return
        served = release.served
        fix = "" if release.ready else f"look at its pods: kubectl get pods -n {kueue.NAMESPACE}"
        yield Check("Kueue", "ok" if release.ready else "missing", str(release), fix)
    yield _queue(cluster, queue, served)
    yield from _kinds(backend, queue)
    yield from _left_alone(backend)


def _queue(cluster: Cluster, name: str, version: str) -> Check:
    """Check whether a LocalQueue exists and admits jobs."""
    title = f"queue {name}"
    try:
        queue = cluster.call(
            "get",
            "localqueues",
            lambda: cluster.custom.get_namespaced_custom_object(
                kueue.GROUP, version, cluster.namespace, "localqueues", name
            ),
            name=name,
            patience=_PATIENCE,
        )
    except ApiError as error:
        if error.absent:
            return Check(title, "missing", f"namespace {cluster.namespace} has no such LocalQueue",
                "see `kubectl get localqueues` for those it has, or create this one",
            )  # fmt: skip
        return Check(title, "warning", f"not known: {error.message}", error.fix)
    status = queue.get("status") or {}
    of = f"of ClusterQueue {queue['spec'].get('clusterQueue')}"
    active: Body = next((item for item in status.get("conditions") or [] if item["type"] == "Active"), {})
    if active.get("status") == "True":
        counts = (
            f"{status.get('pendingWorkloads', 0)} wait, {status.get('admittedWorkloads', 0)} are admitted"
        )
        return Check(title, "ok", f"active, {of}; {counts}")
    why = ": ".join(filter(None, [active.get("reason"), active.get("message")])) or "Kueue says nothing of it"
    return Check(title, "missing", f"takes no jobs, {of}: {why}",
        "see `kubectl describe` of both queues: is one stopped (stopPolicy), is the ClusterQueue there?",
    )  # fmt: skip


def _kinds(backend: ClusterBackend, queue: str) -> Iterator[Check]:
    """Check for each kind of jobs in the cluster whether Kueue serves it."""
    cluster = backend.cluster
    try:
        kinds = [kind for kind, _ in backend.kinds.jobs()]
    except ApiError as error:
        yield Check("jobs in Kueue", "warning", f"not known: {error.message}", error.fix)
        return
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
    if _has_workloads(cluster, kind):
        return True, "the Workloads of the namespace"
    return None, "its configuration may not be read, and there is no Workload of such a job"


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


def _has_workloads(cluster: Cluster, kind: Kind) -> bool:
    for version in kueue.VERSIONS:
        request = partial(
            cluster.custom.list_namespaced_custom_object,
            kueue.GROUP, version, cluster.namespace, "workloads",
        )  # fmt: skip
        try:
            workloads: Any = cluster.call("list", "workloads", request, patience=_PATIENCE)
        except ApiError:
            continue
        owners = (item["metadata"].get("ownerReferences") or [] for item in workloads["items"])
        return any(owner["kind"] == kind.title for group in owners for owner in group)
    return False


def _left_alone(backend: ClusterBackend) -> Iterator[Check]:
    """Check for jobs that will never be admitted."""
    try:
        jobs = backend.list_jobs()
    except ApiError as error:
        yield Check("jobs in queues", "warning", f"not known: {error.message}", error.fix)
        return
    waiting = [job for job in jobs if job.reason and job.queue and job.phase == "suspended"]
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
