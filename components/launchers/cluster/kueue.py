"""What Kueue says of a job that waits in a queue: from its Workload, and the place it has there."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from components.launchers.backend import JobStatus, Phase
from components.launchers.cluster.client import Cluster
from components.launchers.cluster.kinds.kind import Body, holding
from components.launchers.cluster.refusals import ApiError

GROUP, VISIBILITY = "kueue.x-k8s.io", "visibility.kueue.x-k8s.io"
VERSIONS = ("v1beta2", "v1beta1")
"""Of both groups, the newest first; Kueue before 0.15 serves only the last."""
LABEL_JOB = f"{GROUP}/job-uid"

QUEUED = "Queued"
"""It waits for its turn, or for quota."""
INADMISSIBLE = "Inadmissible"
"""Its queue takes nothing now."""
ADMITTED = "Admitted"
"""Kueue has let it go, and its controller has not seen it yet."""
NO_QUEUE = "QueueMissing"
"""There is no queue of that name."""
DEACTIVATED = "Deactivated"
"""Somebody, or Kueue after too many tries, has taken it out of the queue."""
UNSERVED = "Unserved"
"""Kueue knows nothing of it."""
UNKNOWN = "QueueUnknown"
"""Nobody says where it stands: its Workload may not be read, or the API server has trouble."""

_PATIENCE = 5.0
_SHOWN = 400  # Characters of Kueue's own words.


class Queues:
    """The Workloads of a namespace's jobs; nothing is asked of jobs that wait in no queue.

    Args:
        cluster: the cluster and namespace.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._served = ""
        self._places_told = True

    def told(self, jobs: Sequence[JobStatus], *, patience: float | None = None) -> list[JobStatus]:
        """Return jobs, with where those that are suspended stand in their queues; never fails.

        Args:
            jobs: how they are.
            patience: as of Cluster.call; at most a few seconds.
        """
        waiting = [job for job in jobs if job.phase is Phase.SUSPENDED and job.queue]
        if not waiting:
            return list(jobs)
        usual = min(_PATIENCE, self._cluster.timings.patience)
        patience = usual if patience is None else min(patience, usual)
        try:
            workloads = self._of(waiting, patience)
        except ApiError as error:
            told = {job.uid: _unknown(job, error) for job in waiting}
            return [told.get(job.uid, job) for job in jobs]
        places: dict[str, int] = {}
        for queue in sorted({job.queue for job in waiting if _waits(workloads.get(job.uid))}):
            places |= self._places(queue, patience)
        told = {job.uid: self._stands(job, workloads.get(job.uid), places) for job in waiting}
        return [told.get(job.uid, job) for job in jobs]

    def _of(self, jobs: list[JobStatus], patience: float) -> dict[str, Body]:
        """Return the newest Workload of each job, by the job's uid.

        Kueue labels each with its job; a version that does not has made it the job's own all the same.
        """
        found = self._list(patience, f"{LABEL_JOB}={jobs[0].uid}") if len(jobs) == 1 else []
        found = found or self._list(patience, "")
        return {_owner(item): item for item in sorted(found, key=_created)}

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

    def _places(self, queue: str, patience: float) -> dict[str, int]:
        """Return the places in a queue, from 1, by the Workload's name; none where nobody tells them."""
        if not self._places_told:
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
            self._places_told = not (error.unknown or error.status == 403)
            return {}
        return {
            item["metadata"]["name"]: item["positionInLocalQueue"] + 1 for item in body.get("items") or []
        }

    def _stands(self, job: JobStatus, workload: Body | None, places: Mapping[str, int]) -> JobStatus:
        if workload is None:
            why = (
                "Kueue has made no Workload of it yet"
                if self._served
                else "no Kueue is installed, the cluster does not know its Workloads"
            )
            return replace(job, reason=UNSERVED, message=f"in queue {job.queue}: {why}")
        reason, why = _standing(workload)
        place = places.get(workload["metadata"]["name"])
        where = f"{ordinal(place)} in queue {job.queue}" if place else f"in queue {job.queue}"
        message = f"{where}: {why}" if why else where
        held = holding(workload)
        if "Evicted" in held and reason not in (ADMITTED, DEACTIVATED, NO_QUEUE):
            taken = held["Evicted"]
            words = _words(taken)
            reason = taken.get("reason") or "Evicted"
            message = f"taken back by Kueue ({reason}{f': {words}' if words else ''}), " + (
                where if words == why else message
            )
        return replace(job, reason=reason, message=message)


def _waits(workload: Body | None) -> bool:
    return workload is not None and _standing(workload)[0] in (QUEUED, INADMISSIBLE)


def _standing(workload: Body) -> tuple[str, str]:
    """Return a word and a sentence on where a Workload stands by its conditions."""
    held = holding(workload)
    if workload["spec"].get("active") is False:
        told = held.get("Evicted") or {}
        return DEACTIVATED, _words(told) or "its Workload is not active"
    if "Admitted" in held and "Evicted" not in held:
        return ADMITTED, "admitted, and not released yet"
    if "QuotaReserved" in held and "Evicted" not in held:
        return QUEUED, "has its quota, and waits for admission checks"
    conditions = (workload.get("status") or {}).get("conditions") or []
    found: Body = next((item for item in conditions if item["type"] == "QuotaReserved"), {})
    words, reason = _words(found), found.get("reason")
    if words.startswith("LocalQueue ") and words.endswith(" doesn't exist"):
        return NO_QUEUE, words
    if reason == "ExceedsMaxQuota" or "maximum capacity" in words:
        return QUEUED, f"{words}; it never fits unless it asks for less or the queue gets more"
    return INADMISSIBLE if reason in (INADMISSIBLE, "Misconfigured", "Suspended") else QUEUED, words


def _words(condition: Mapping[str, Any]) -> str:
    """Return Kueue's own words, without who took a place from whom in its own numbers."""
    told = " ".join((condition.get("message") or "").split())
    return told.partition("; preemptor path:")[0].rstrip("; ")[:_SHOWN]


def _unknown(job: JobStatus, error: ApiError) -> JobStatus:
    message = f"in queue {job.queue}; where it stands there is not known: {error.message}"
    return replace(job, reason=UNKNOWN, message=message + (f" ({error.fix})" if error.status == 403 else ""))


def _owner(workload: Body) -> str:
    meta = workload["metadata"]
    owners: Iterable[Body] = meta.get("ownerReferences") or []
    by_owner = next((owner["uid"] for owner in owners if owner.get("controller")), "")
    return str((meta.get("labels") or {}).get(LABEL_JOB) or by_owner)


def _created(workload: Body) -> str:
    return str(workload["metadata"].get("creationTimestamp") or "")


def in_vain(job: JobStatus, seconds: float) -> bool:
    """Whether a job waits in a queue that will not let it go.

    Args:
        job: how it is.
        seconds: how long Kueue and the job's controller may take to do what they do in a moment.
    """
    if job.reason in (UNSERVED, ADMITTED) and job.phase is Phase.SUSPENDED:
        return (datetime.now(UTC) - datetime.fromisoformat(job.created)).total_seconds() > seconds
    return job.reason in (NO_QUEUE, DEACTIVATED)


def ordinal(number: int) -> str:
    """Write a place: 1st, 2nd, 3rd, 4th, 11th, 21st."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
