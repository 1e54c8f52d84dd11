"""The state of a job in Kueue: the conditions of its Workload, and its position in the queue."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from components.launchers.backend import JobStatus, Phase
from components.launchers.cluster.api_errors import ApiError
from components.launchers.cluster.client import Cluster
from components.launchers.cluster.kinds.kind import Body, holding

GROUP, VISIBILITY = "kueue.x-k8s.io", "visibility.kueue.x-k8s.io"
VERSIONS = ("v1beta2", "v1beta1")
"""Of both groups, the newest first; Kueue before 0.15 serves only the last."""
LABEL_JOB = f"{GROUP}/job-uid"

QUEUED = "Queued"
"""It waits for its position or for quota."""
INADMISSIBLE = "Inadmissible"
"""Its queue admits nothing now."""
ADMITTED = "Admitted"
"""Kueue has admitted it, and its controller has not started it yet."""
NO_QUEUE = "QueueMissing"
"""There is no queue of that name."""
DEACTIVATED = "Deactivated"
"""Its Workload was deactivated: by a person, or by Kueue after too many requeues."""
UNSERVED = "Unserved"
"""Kueue has no Workload for it."""
UNKNOWN = "QueueUnknown"
"""Its state is unknown: its Workload may not be read, or the API server has trouble."""

_PATIENCE = 5.0
_SHOWN = 400  # Characters of Kueue's own words.


class Queues:
    """The Workloads of a namespace's jobs; sends no requests for jobs outside of a queue.

    Args:
        cluster: the cluster and namespace.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._served = ""
        self._positions_served = True

    def with_positions(self, jobs: Sequence[JobStatus], *, patience: float | None = None) -> list[JobStatus]:
        """Return jobs, the suspended ones with their state and position in their queues; never fails.

        Args:
            jobs: how they are.
            patience: as of Cluster.call; at most a few seconds.
        """
        waiting = [job for job in jobs if job.phase is Phase.SUSPENDED and job.queue]
        if not waiting:
            return list(jobs)
        longest = min(_PATIENCE, self._cluster.timings.patience)
        patience = longest if patience is None else min(patience, longest)
        try:
            workloads = self._workloads(waiting, patience)
        except ApiError as error:
            updated = {job.uid: _unknown(job, error) for job in waiting}
            return [updated.get(job.uid, job) for job in jobs]
        positions: dict[str, int] = {}
        for queue in sorted({job.queue for job in waiting if _waits(workloads.get(job.uid))}):
            positions |= self._positions(queue, patience)
        updated = {job.uid: self._with_state(job, workloads.get(job.uid), positions) for job in waiting}
        return [updated.get(job.uid, job) for job in jobs]

    def _workloads(self, jobs: list[JobStatus], patience: float) -> dict[str, Body]:
        """Return the newest Workload of each job, by the job's uid.

        Kueue labels each with its job's uid; versions that do not still set the owner reference.
        """
        workloads = self._list(patience, f"{LABEL_JOB}={jobs[0].uid}") if len(jobs) == 1 else []
        workloads = workloads or self._list(patience, "")
        return {_owner(item): item for item in sorted(workloads, key=_created)}

    def _list(self, patience: float, selector: str) -> list[Body]:
        for version in [self._served] if self._served else VERSIONS:
            try:
                body = self._cluster.call(
                    "list",
                    "workloads",
                    lambda version=version: self._cluster.custom.list_namespaced_custom_object(  # type: ignore[misc]
                        GROUP, version, self._cluster.namespace, "workloads", label_selector=selector
                    ),
                    patience=patience,
                )
            except ApiError as error:
                if not error.unknown:
                    raise
                continue
            self._served = version
            return list(body["items"])
        return []

    def _positions(self, queue: str, patience: float) -> dict[str, int]:
        """Return the positions in a queue, from 1, by Workload; none where the API is not served."""
        if not self._positions_served:
            return {}
        try:
            body = self._cluster.call(
                "get",
                "localqueues/pendingworkloads",
                lambda: self._cluster.api.call_api(
                    f"/apis/{VISIBILITY}/{self._served}/namespaces/{self._cluster.namespace}"
                    f"/localqueues/{queue}/pendingworkloads",
                    "GET", auth_settings=["BearerToken"], response_type="object", _return_http_data_only=True,
                ),
                name=queue,
                patience=min(patience, 1.0),
            )  # fmt: skip
        except ApiError as error:
            self._positions_served = not (error.unknown or error.status == 403)
            return {}
        return {
            item["metadata"]["name"]: item["positionInLocalQueue"] + 1 for item in body.get("items") or []
        }

    def _with_state(self, job: JobStatus, workload: Body | None, positions: Mapping[str, int]) -> JobStatus:
        if workload is None:
            why = (
                "Kueue has made no Workload of it yet"
                if self._served
                else "no Kueue is installed, the cluster does not know its Workloads"
            )
            return replace(job, reason=UNSERVED, message=f"in queue {job.queue}: {why}")
        reason, why = _standing(workload)
        position = positions.get(workload["metadata"]["name"])
        where = f"{ordinal(position)} in queue {job.queue}" if position else f"in queue {job.queue}"
        message = f"{where}: {why}" if why else where
        conditions = holding(workload)
        if "Evicted" in conditions and reason not in (ADMITTED, DEACTIVATED, NO_QUEUE):
            eviction = conditions["Evicted"]
            words = _words(eviction)
            reason = eviction.get("reason") or "Evicted"
            message = f"taken back by Kueue ({reason}{f': {words}' if words else ''}), " + (
                where if words == why else message
            )
        return replace(job, reason=reason, message=message)


def _waits(workload: Body | None) -> bool:
    return workload is not None and _standing(workload)[0] in (QUEUED, INADMISSIBLE)


def _standing(workload: Body) -> tuple[str, str]:
    """Return the reason and the message of a Workload's state, from its conditions."""
    holding_conditions = holding(workload)
    if workload["spec"].get("active") is False:
        eviction = holding_conditions.get("Evicted") or {}
        return DEACTIVATED, _words(eviction) or "its Workload is not active"
    if "Admitted" in holding_conditions and "Evicted" not in holding_conditions:
        return ADMITTED, "admitted, and not released yet"
    if "QuotaReserved" in holding_conditions and "Evicted" not in holding_conditions:
        return QUEUED, "has its quota, and waits for admission checks"
    conditions = (workload.get("status") or {}).get("conditions") or []
    quota: Body = next((item for item in conditions if item["type"] == "QuotaReserved"), {})
    words, reason = _words(quota), quota.get("reason")
    if words.startswith("LocalQueue ") and words.endswith(" doesn't exist"):
        return NO_QUEUE, words
    if reason == "ExceedsMaxQuota" or "maximum capacity" in words:
        return QUEUED, f"{words}; it never fits unless it asks for less or the queue gets more"
    return INADMISSIBLE if reason in (INADMISSIBLE, "Misconfigured", "Suspended") else QUEUED, words


def _words(condition: Mapping[str, Any]) -> str:
    """Return a condition's message, without the path of preemption."""
    message = " ".join((condition.get("message") or "").split())
    return message.partition("; preemptor path:")[0].rstrip("; ")[:_SHOWN]


def _unknown(job: JobStatus, error: ApiError) -> JobStatus:
    message = f"in queue {job.queue}; where it stands there is not known: {error.message}"
    return replace(job, reason=UNKNOWN, message=message + (f" ({error.fix})" if error.status == 403 else ""))


def _owner(workload: Body) -> str:
    meta = workload["metadata"]
    references: Iterable[Body] = meta.get("ownerReferences") or []
    by_owner = next((owner["uid"] for owner in references if owner.get("controller")), "")
    return str((meta.get("labels") or {}).get(LABEL_JOB) or by_owner)


def _created(workload: Body) -> str:
    return str(workload["metadata"].get("creationTimestamp") or "")


def in_vain(job: JobStatus, seconds: float) -> bool:
    """Whether a job waits in a queue that will never admit it.

    Args:
        job: how it is.
        seconds: how long Kueue and the job's controller may take to do what they do in a moment.
    """
    if job.reason in (UNSERVED, ADMITTED) and job.phase is Phase.SUSPENDED:
        return (datetime.now(UTC) - datetime.fromisoformat(job.created)).total_seconds() > seconds
    return job.reason in (NO_QUEUE, DEACTIVATED)


def ordinal(number: int) -> str:
    """Write a position: 1st, 2nd, 3rd, 4th, 11th, 21st."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
