"""Jobs in queues of Kueue. Source: Kueue, `workload_types.go` and the visibility API."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from kubernetes import client

from components.launchers.backend import JobStatus, Phase
from components.launchers.cluster.client import ApiError, Cluster
from components.launchers.cluster.kinds import KINDS, Body, Kind, Resource, holding

GROUP, VISIBILITY = "kueue.x-k8s.io", "visibility.kueue.x-k8s.io"
VERSIONS = ("v1beta2", "v1beta1")  # Of both groups, the newest first; Kueue before 0.15 serves only the last.
LABEL_JOB = f"{GROUP}/job-uid"

# Reasons of suspended jobs.
QUEUED = "Queued"  # It waits for its position or for quota.
INADMISSIBLE = "Inadmissible"  # Its queue admits nothing now.
ADMITTED = "Admitted"  # Its controller has not started it yet.
NO_QUEUE = "QueueMissing"
DEACTIVATED = "Deactivated"  # Its Workload: by a person, or by Kueue after too many requeues.
UNSERVED = "Unserved"  # Kueue has no Workload for it.
UNKNOWN = "QueueUnknown"  # Its Workload may not be read, or the API server has trouble.

HOPELESS = (UNSERVED, NO_QUEUE, DEACTIVATED, ADMITTED)
"""Reasons for which a job is given up after a while: its kind or its queue is not served. One that waits for
quota is fine, and so is one whose Workload may not be read."""
_WAITING = (QUEUED, INADMISSIBLE)  # Those that have a position.
_TIMEOUT_SECONDS = 5.0
_MESSAGE_LIMIT = 400  # Characters of a message of Kueue.


def _workloads(cluster: Cluster, versions: Iterable[str], **options: Any) -> tuple[str, list[Body]]:
    """Return the first of these versions of Kueue's API that is served ("" if none), and the Workloads."""
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
    """The Workloads of a namespace's jobs; sends no requests for jobs outside of a queue."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._version = ""
        self._positions_served = True

    def with_positions(self, jobs: Sequence[JobStatus], *, patience: float | None = None) -> list[JobStatus]:
        """Return jobs, the suspended ones with their state and position in their queues; never fails."""
        waiting = [job for job in jobs if job.phase is Phase.SUSPENDED and job.queue]
        if not waiting:
            return list(jobs)
        longest = min(_TIMEOUT_SECONDS, self._cluster.timings.patience)
        patience = longest if patience is None else min(patience, longest)
        updated: dict[str, JobStatus] = {}
        try:
            workloads = self._by_job(waiting, patience)
        except ApiError as error:
            fix = f" ({error.fix})" if error.status == 403 else ""
            for job in waiting:
                message = f"in queue {job.queue}, position unknown: {error.message}{fix}"
                updated[job.uid] = replace(job, reason=UNKNOWN, message=message)
        else:
            positions: dict[str, int] = {}
            in_line = [job for job in waiting if job.uid in workloads]
            for queue in sorted({job.queue for job in in_line if _state(workloads[job.uid])[0] in _WAITING}):
                positions |= self._positions(queue, patience)
            for job in waiting:
                updated[job.uid] = self._with_state(job, workloads.get(job.uid), positions)
        return [updated.get(job.uid, job) for job in jobs]

    def _by_job(self, jobs: list[JobStatus], patience: float) -> dict[str, Body]:
        """Return the newest Workload of each job, by the job's uid (a label; in older versions the owner)."""
        versions = [self._version] if self._version else VERSIONS
        workloads: list[Body] = []
        for selector in [f"{LABEL_JOB}={jobs[0].uid}", ""] if len(jobs) == 1 else [""]:
            if not workloads:
                version, workloads = _workloads(
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

    def _positions(self, queue: str, patience: float) -> dict[str, int]:
        """Return the positions in a queue, from 1, by Workload; none if the API is not served."""
        if not self._positions_served:
            return {}
        queues = f"/apis/{VISIBILITY}/{self._version}/namespaces/{self._cluster.namespace}/localqueues"
        path = f"{queues}/{queue}/pendingworkloads"
        try:
            body = self._cluster.call(
                "get",
                "localqueues/pendingworkloads",
                self._cluster.api.call_api,
                path,
                "GET",
                auth_settings=["BearerToken"],
                response_type="object",
                _return_http_data_only=True,
                name=queue,
                patience=min(patience, 1.0),
            )
        except ApiError as error:
            self._positions_served = not (error.unknown or error.status == 403)
            return {}
        return {
            item["metadata"]["name"]: item["positionInLocalQueue"] + 1 for item in body.get("items") or []
        }

    def _with_state(self, job: JobStatus, workload: Body | None, positions: Mapping[str, int]) -> JobStatus:
        where = f"in queue {job.queue}"
        if workload is None:
            missing = "Kueue has no Workload for it" if self._version else "no Kueue is installed"
            return replace(job, reason=UNSERVED, message=f"{where}: {missing}")
        if position := positions.get(workload["metadata"]["name"]):
            where = f"position {position} {where}"
        reason, detail = _state(workload)
        eviction = holding(workload).get("Evicted")
        if eviction and reason not in (ADMITTED, DEACTIVATED, NO_QUEUE):
            reason = eviction.get("reason") or "Evicted"
            evicted = _message(eviction)
            where = f"taken back by Kueue ({': '.join(filter(None, [reason, evicted]))}), {where}"
            detail = "" if detail == evicted else detail
        return replace(job, reason=reason, message=f"{where}: {detail}" if detail else where)


def _state(workload: Body) -> tuple[str, str]:
    """Return reason and message of a job that waits."""
    true_conditions = holding(workload)
    if workload["spec"].get("active") is False:
        return DEACTIVATED, _message(true_conditions.get("Evicted") or {}) or "its Workload is not active"
    if "Admitted" in true_conditions and "Evicted" not in true_conditions:
        return ADMITTED, "admitted, and not released yet"
    if "QuotaReserved" in true_conditions and "Evicted" not in true_conditions:
        return QUEUED, "has its quota, and waits for admission checks"
    conditions = (workload.get("status") or {}).get("conditions") or []
    quota: Body = next((item for item in conditions if item["type"] == "QuotaReserved"), {})
    message, reason = _message(quota), quota.get("reason")
    if message.startswith("LocalQueue ") and message.endswith(" doesn't exist"):
        return NO_QUEUE, message
    if reason == "ExceedsMaxQuota" or "maximum capacity" in message:
        return QUEUED, f"{message}; it never fits unless it asks for less or the queue gets more"
    return INADMISSIBLE if reason in (INADMISSIBLE, "Misconfigured", "Suspended") else QUEUED, message


def _message(condition: Mapping[str, Any]) -> str:
    """Return a condition's message, without the path of preemption."""
    message = " ".join((condition.get("message") or "").split())
    return message.partition("; preemptor path:")[0].rstrip("; ")[:_MESSAGE_LIMIT]


def in_vain(job: JobStatus, seconds: float, now: datetime) -> bool:
    """Whether a job waits in a queue that will never admit it; Kueue may take `seconds` to look at it."""
    if job.reason in (UNSERVED, ADMITTED) and job.phase is Phase.SUSPENDED:
        return (now - datetime.fromisoformat(job.created)).total_seconds() > seconds
    return job.reason in (NO_QUEUE, DEACTIVATED)


NAMESPACE = "kueue-system"
_MANAGER = "kueue-controller-manager"
_SETUP_PATIENCE = 2.0


@dataclass(frozen=True)
class Release:
    """The installed Kueue, as far as RBAC lets us read it."""

    served: str = ""  # The newest version of its API; empty if there is no Kueue.
    ready: bool = True  # Whether its controller runs, if that may be read.

    def __str__(self) -> str:
        if not self.served:
            return "no Kueue is installed: the cluster does not know its Workloads"
        return f"Kueue (API {GROUP}/{self.served}){'' if self.ready else '; its controller does not run'}"


def release(cluster: Cluster) -> Release:
    """Return the Kueue of a cluster."""
    served, _ = _workloads(cluster, VERSIONS, limit=1, patience=_SETUP_PATIENCE)
    if not served:
        return Release()
    read = client.AppsV1Api(cluster.api).read_namespaced_deployment
    try:
        manager = cluster.call("get", "deployments", read, _MANAGER, NAMESPACE, patience=_SETUP_PATIENCE)
    except ApiError:
        return Release(served)
    return Release(served, bool(manager.status and manager.status.ready_replicas))


def framework(kind: Kind) -> str:
    """Return the name of a kind of job in Kueue's configuration."""
    return f"{kind.group}/{kind.name}"


def remedy(status: JobStatus) -> str:
    """Return the fix for a job that will never be admitted."""
    if status.reason == NO_QUEUE:
        return (
            f"see `kubectl get localqueues` for the queues of its namespace and set kueue_queue to one, or "
            f"create the LocalQueue {status.queue}"
        )
    if status.reason == DEACTIVATED:
        return "see why with `kubectl describe workload`, fix that, and run the same again"
    if status.reason == ADMITTED:
        return (
            "run the same command again: Kueue cannot start a job that was created while it did not "
            "serve its kind; "
            "otherwise look at the log of the job's controller"
        )
    kind = next(kind for kind in KINDS.values() if kind.title == status.kind)
    first = " (needs Kueue 0.14 or later)" if kind.title == "TrainJob" else ""
    others = " or ".join(other.name for other in KINDS.values() if other is not kind)
    return (
        f"name {framework(kind)} in integrations.frameworks of Kueue's configuration (ConfigMap "
        f"kueue-manager-config in {NAMESPACE}){first}, do not exclude this namespace by its "
        f"managedJobsNamespaceSelector, and run the same again; or make it a "
        f"{others} (launcher, --backend), or leave kueue_queue out"
    )
