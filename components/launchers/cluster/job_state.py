"""Computes a job's status from its object and its pods."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from components.launchers.backend import JobStatus, Phase, PodStatus
from components.launchers.cluster import pods
from components.launchers.cluster.kinds.kind import Body, Kind
from components.launchers.render.labels import LABEL_QUEUE, LABEL_SPEC


def status(kind: Kind, job: Body, job_pods: Iterable[Any]) -> JobStatus:
    """Return a job's status.

    Args:
        kind: what it is.
        job: the job.
        job_pods: its pods (V1Pod).
    """
    meta = job["metadata"]
    created = meta.get("creationTimestamp") or ""
    # A job of this name that was deleted a moment ago leaves pods of the same labels.
    own_pods = [pod for pod in job_pods if pods.rfc3339(pod.metadata.creation_timestamp) >= created]
    pod_statuses = pods.statuses(own_pods, lambda labels: kind.rank(job, labels), kind.attempt_label)
    phase, reason, message = _phase(kind, job, pod_statuses)
    labels = meta.get("labels") or {}
    return JobStatus(
        name=meta["name"],
        phase=phase,
        reason=reason,
        message=message,
        pods=pod_statuses,
        created=created,
        nodes=kind.nodes(job),
        elastic=kind.elastic(job),
        uid=meta.get("uid") or "",
        spec=labels.get(LABEL_SPEC, ""),
        kind=kind.title,
        queue=labels.get(LABEL_QUEUE, ""),
        workflow=next(
            (owner["name"] for owner in meta.get("ownerReferences") or () if owner["kind"] == "Workflow"), ""
        ),
        progress=kind.progress(job),
    )


class Incarnations:
    """Counts replaced pods: controllers replace them and keep no count."""

    def __init__(self) -> None:
        self._uids: dict[str, dict[int, list[str]]] = {}
        self._before: dict[str, set[str]] = {}
        """Pods from before a suspension, which may take a while to terminate."""

    def count(self, status: JobStatus) -> JobStatus:
        """Return a status whose pods' restarts include the pods of their ranks before them."""
        if status.phase is Phase.SUSPENDED:  # By a queue, which is no fault of the pods.
            self._uids.pop(status.name, None)
            self._before.setdefault(status.name, set()).update(pod.uid for pod in status.pods)
            return status
        uids = self._uids.setdefault(status.name, {})
        had_pods = any(uids.values())
        old = self._before.get(status.name, set())
        pods = tuple(
            pod if pod.uid in old else _counted(uids.setdefault(pod.rank, []), pod) for pod in status.pods
        )
        lost = not pods or any(pod.leaving or pod.phase == "Failed" for pod in pods)
        restarted = any(pod.restarts for pod in pods) or (had_pods and lost)
        restarting = status.phase is Phase.PENDING and restarted
        return replace(status, pods=pods, phase=Phase.RESTARTING if restarting else status.phase)


def _counted(uids: list[str], pod: PodStatus) -> PodStatus:
    if pod.uid not in uids:
        uids.append(pod.uid)
    unknown = max(0, uids.index(pod.uid) - pod.attempt)  # The controller's own count is of those, too.
    return replace(pod, restarts=pod.restarts + unknown)


def _phase(kind: Kind, job: Body, pod_statuses: tuple[PodStatus, ...]) -> tuple[Phase, str, str]:
    """Return phase, reason and message: the end by the job's conditions, the rest by the pods."""
    standing = kind.standing(job)
    if standing.phase is not None:
        return standing.phase, standing.reason, standing.message
    if sum(pod.counts for pod in pod_statuses) >= kind.needed(job):
        return Phase.RUNNING, "", ""
    if standing.restarting:
        return Phase.RESTARTING, standing.reason, standing.message
    waiting = next((pod for pod in pod_statuses if pod.phase == "Pending" and pod.reason), None)
    return Phase.PENDING, waiting.reason if waiting else "", waiting.message if waiting else ""
