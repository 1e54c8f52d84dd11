"""Finds out why jobs wait in queues of Kueue. Source: Kueue, `workload_types.go`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from kubernetes import client

from components.launchers.backend import JobStatus, Phase
from components.launchers.cluster.client import ApiError, Cluster
from components.launchers.cluster.kinds import KINDS, Kind, Resource, find_true_conditions
from components.launchers.pod_template import Body

GROUP = "kueue.x-k8s.io"
VERSIONS = ("v1beta2", "v1beta1")  # The newest first; Kueue before 0.15 serves only the last.
LABEL_JOB = f"{GROUP}/job-uid"

# Reasons of suspended jobs.
QUEUED = "Queued"  # Waiting for its turn or for quota.
INADMISSIBLE = "Inadmissible"  # Its queue currently admits nothing.
ADMITTED = "Admitted"  # Its controller has not started it yet.
NO_QUEUE = "QueueMissing"
DEACTIVATED = "Deactivated"  # Its Workload was deactivated by a user, or by Kueue after too many requeues.
UNSERVED = "Unserved"  # Kueue has no Workload for it.
UNKNOWN = "QueueUnknown"  # Its Workload may not be read, or the API server has trouble.

GIVE_UP_REASONS = (UNSERVED, NO_QUEUE, DEACTIVATED, ADMITTED)
"""The launcher gives up a job that waits long for these reasons: Kueue does not serve its kind or its queue.
The launcher keeps waiting if the job needs quota, or if its Workload cannot be read."""
_TIMEOUT_SECONDS = 5.0
_MESSAGE_LIMIT = 400  # Maximum length of a message of Kueue.


def _list_workloads(cluster: Cluster, versions: Iterable[str], **options: Any) -> tuple[str, list[Body]]:
    """Return the first version of Kueue's API that is served ("" if none), and the Workloads."""
    for version in versions:
        try:
            body = cluster.request("list", Resource(GROUP, version, "workloads"), **options)
        except ApiError as error:
            if not error.unknown:
                raise
        else:
            return version, list(body["items"])
    return "", []


class Queues:
    """Reads the Workloads of queued jobs in a namespace."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._version = ""

    def with_reasons(self, jobs: Sequence[JobStatus], *, patience: float | None = None) -> list[JobStatus]:
        """Return the jobs, with the reason why suspended ones wait in their queue. Never raises an error."""
        waiting = [job for job in jobs if job.phase is Phase.SUSPENDED and job.queue]
        if not waiting:
            return list(jobs)
        longest = min(_TIMEOUT_SECONDS, self._cluster.timings.patience)
        patience = longest if patience is None else min(patience, longest)
        try:
            workloads = self._workloads_by_uid(waiting, patience)
            updated = {job.uid: self._with_state(job, workloads.get(job.uid)) for job in waiting}
        except ApiError as error:
            text = error.message + (f" ({error.fix})" if error.status == 403 else "")
            message = "in queue {}, reason unknown: {}"
            updated = {
                job.uid: replace(job, reason=UNKNOWN, message=message.format(job.queue, text))
                for job in waiting
            }
        return [updated.get(job.uid, job) for job in jobs]

    def _workloads_by_uid(self, jobs: list[JobStatus], patience: float) -> dict[str, Body]:
        """Return the newest Workload of each job, by the job's uid (a label; in older versions the owner)."""
        versions = [self._version] if self._version else VERSIONS
        workloads: list[Body] = []
        for selector in [f"{LABEL_JOB}={jobs[0].uid}", ""] if len(jobs) == 1 else [""]:
            if not workloads:
                version, workloads = _list_workloads(
                    self._cluster, versions, label_selector=selector, patience=patience
                )
                self._version = self._version or version
        by_job = {}
        for workload in sorted(workloads, key=lambda item: item["metadata"].get("creationTimestamp") or ""):
            meta = workload["metadata"]
            owners: Iterable[Body] = meta.get("ownerReferences") or []
            owner = next((owner["uid"] for owner in owners if owner.get("controller")), "")
            by_job[(meta.get("labels") or {}).get(LABEL_JOB) or owner] = workload
        return by_job

    def _with_state(self, job: JobStatus, workload: Body | None) -> JobStatus:
        where = f"in queue {job.queue}"
        if workload is None:
            missing = "Kueue has no Workload for it" if self._version else "no Kueue is installed"
            return replace(job, reason=UNSERVED, message=f"{where}: {missing}")
        reason, detail = _waiting_reason(workload)
        eviction = find_true_conditions(workload).get("Evicted")
        if eviction and reason not in (ADMITTED, DEACTIVATED, NO_QUEUE):
            reason = eviction.get("reason") or "Evicted"
            evicted = _message(eviction)
            where = f"taken back by Kueue ({': '.join(filter(None, [reason, evicted]))}), {where}"
            detail = "" if detail == evicted else detail
        return replace(job, reason=reason, message=f"{where}: {detail}" if detail else where)


def _waiting_reason(workload: Body) -> tuple[str, str]:
    """Return the reason why a job waits, and a message."""
    true_conditions = find_true_conditions(workload)
    if workload["spec"].get("active") is False:
        return DEACTIVATED, _message(true_conditions.get("Evicted") or {}) or "its Workload is not active"
    if "Admitted" in true_conditions and "Evicted" not in true_conditions:
        return ADMITTED, "admitted, but not started yet"
    if "QuotaReserved" in true_conditions and "Evicted" not in true_conditions:
        return QUEUED, "has its quota, and waits for admission checks"
    conditions = (workload.get("status") or {}).get("conditions") or []
    quota: Body = next((item for item in conditions if item["type"] == "QuotaReserved"), {})
    message, reason = _message(quota), quota.get("reason")
    if message.startswith("LocalQueue ") and message.endswith(" doesn't exist"):
        return NO_QUEUE, message
    if reason == "ExceedsMaxQuota" or "maximum capacity" in message:
        return QUEUED, f"{message}; it never fits unless it requests less or the queue gets more quota"
    return INADMISSIBLE if reason in (INADMISSIBLE, "Misconfigured", "Suspended") else QUEUED, message


def _message(condition: Mapping[str, Any]) -> str:
    """Return a condition's message, without the path of preemption."""
    message = " ".join((condition.get("message") or "").split())
    return message.partition("; preemptor path:")[0].rstrip("; ")[:_MESSAGE_LIMIT]


def is_never_admitted(job: JobStatus, seconds: float, now: datetime) -> bool:
    """Whether a job waits in a queue that will never admit it; Kueue may need `seconds` to process it."""
    if job.reason in (UNSERVED, ADMITTED) and job.phase is Phase.SUSPENDED:
        return (now - datetime.fromisoformat(job.created)).total_seconds() > seconds
    return job.reason in (NO_QUEUE, DEACTIVATED)


NAMESPACE = "kueue-system"
_MANAGER = "kueue-controller-manager"
_SETUP_PATIENCE = 2.0


@dataclass(frozen=True)
class InstalledKueue:
    """The version and state of the installed Kueue, if RBAC allows reading them."""

    served: str = ""  # The newest version of its API; empty if there is no Kueue.
    ready: bool = True  # Whether its controller runs, if that may be read.

    def __str__(self) -> str:
        if not self.served:
            return "no Kueue is installed: the cluster does not know its Workloads"
        return f"Kueue (API {GROUP}/{self.served}){'' if self.ready else '; its controller does not run'}"


def find_installed(cluster: Cluster) -> InstalledKueue:
    """Return the Kueue that is installed in a cluster."""
    served, _ = _list_workloads(cluster, VERSIONS, limit=1, patience=_SETUP_PATIENCE)
    if not served:
        return InstalledKueue()
    read = client.AppsV1Api(cluster.api).read_namespaced_deployment
    try:
        manager = cluster.call("get", "deployments", read, _MANAGER, NAMESPACE, patience=_SETUP_PATIENCE)
    except ApiError:
        return InstalledKueue(served)
    return InstalledKueue(served, bool(manager.status and manager.status.ready_replicas))


def framework_name(kind: Kind) -> str:
    """Return the name of a kind of job in Kueue's configuration."""
    return f"{kind.group}/{kind.name}"


def find_remedy(status: JobStatus) -> str:
    """Return the fix for a job that will never be admitted."""
    if status.reason == NO_QUEUE:
        return (
            "set kueue_queue to a LocalQueue of the namespace (see `kubectl get localqueues`), or create "
            f"the LocalQueue {status.queue}"
        )
    if status.reason == DEACTIVATED:
        return "find the cause with `kubectl describe workload`, fix it, and run the same command again"
    if status.reason == ADMITTED:
        return (
            "run the same command again: Kueue cannot start a job that was created while it did not "
            "serve its kind; if that does not help, look at the log of the job's controller"
        )
    kind = next(kind for kind in KINDS.values() if kind.title == status.kind)
    first = " (needs Kueue 0.14 or later)" if kind.title == "TrainJob" else ""
    others = " or ".join(other.name for other in KINDS.values() if other is not kind)
    return (
        f"name {framework_name(kind)} in integrations.frameworks of Kueue's configuration (ConfigMap "
        f"kueue-manager-config in {NAMESPACE}){first}, do not exclude this namespace by its "
        f"managedJobsNamespaceSelector, and run the same command again; or use a "
        f"{others} (launcher, --backend), or omit kueue_queue"
    )
