"""From a PyTorchJob and its pods to how the job is."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from components.launchers.backend import JobStatus, Phase, PodStatus
from components.launchers.cluster import pods
from components.launchers.render.labels import LABEL_SPEC

_FINAL = {"Failed": Phase.FAILED, "Succeeded": Phase.SUCCEEDED, "Suspended": Phase.SUSPENDED}


def status(job: Any, found: Iterable[Any]) -> JobStatus:
    """Tell how a job is.

    Args:
        job: the job (KubeflowOrgV1PyTorchJob).
        found: its pods (V1Pod).
    """
    told = pods.statuses(found, master="Master" in _replicas(job))
    phase, reason, message = _phase(job, told)
    return JobStatus(
        name=job.metadata.name,
        phase=phase,
        reason=reason,
        message=message,
        pods=told,
        created=pods.rfc3339(job.metadata.creation_timestamp),
        nodes=_nodes(job),
        elastic="Master" not in _replicas(job),
        uid=job.metadata.uid or "",
        spec=(job.metadata.labels or {}).get(LABEL_SPEC, ""),
    )


def failed(job: Any) -> bool:
    """Whether a job has failed."""
    return _phase(job, ())[0] is Phase.FAILED


class Incarnations:
    """Counts the pods that were made anew: the operator replaces them and keeps no count."""

    def __init__(self) -> None:
        self._uids: dict[str, dict[str, list[str]]] = {}

    def count(self, status: JobStatus) -> JobStatus:
        """Return a status whose pods' restarts include the pods of their names before them."""
        if status.phase is Phase.SUSPENDED:  # By a queue, which is no fault of the pods.
            self._uids.pop(status.name, None)
            return status
        uids = self._uids.setdefault(status.name, {})
        pods = tuple(_counted(uids.setdefault(pod.name, []), pod) for pod in status.pods)
        again = status.phase is Phase.PENDING and any(pod.restarts for pod in pods)
        return replace(status, pods=pods, phase=Phase.RESTARTING if again else status.phase)


def _counted(uids: list[str], pod: PodStatus) -> PodStatus:
    if pod.uid not in uids:
        uids.append(pod.uid)
    return replace(pod, restarts=pod.restarts + uids.index(pod.uid))


def _phase(job: Any, told: tuple[PodStatus, ...]) -> tuple[Phase, str, str]:
    """Return phase, reason and message: the end by the conditions that hold, the rest by the pods.

    The operator says Running as soon as one pod runs, and says it late.
    """
    conditions = (job.status.conditions if job.status else None) or []
    holding = {item.type: item for item in conditions if item.status == "True"}
    for kind, phase in _FINAL.items():
        if kind in holding:
            return phase, holding[kind].reason or "", holding[kind].message or ""
    policy = job.spec.run_policy
    if policy and policy.suspend:
        return Phase.SUSPENDED, "", ""
    elastic_policy = job.spec.elastic_policy
    needed = (elastic_policy.min_replicas if elastic_policy else None) or _nodes(job)
    if sum(pod.phase in ("Running", "Succeeded") for pod in told) >= needed:
        return Phase.RUNNING, "", ""
    if "Restarting" in holding:
        return Phase.RESTARTING, holding["Restarting"].reason or "", holding["Restarting"].message or ""
    waiting = next((pod for pod in told if pod.phase == "Pending" and pod.reason), None)
    return Phase.PENDING, waiting.reason if waiting else "", waiting.message if waiting else ""


def _replicas(job: Any) -> dict[str, Any]:
    return job.spec.pytorch_replica_specs or {}


def _nodes(job: Any) -> int:
    return sum(1 if item.replicas is None else item.replicas for item in _replicas(job).values())
