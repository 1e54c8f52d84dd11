"""How far jobs are whose own status does not say so: read from the end of rank 0's log."""

import threading
import time
from contextlib import suppress
from dataclasses import replace

from components.launchers.backend import JobStatus, Phase, PodStatus
from components.launchers.cluster.client import Cluster
from components.launchers.cluster.logs import PodLog
from components.launchers.cluster.refusals import ApiError
from trainer import job_status
from trainer.job_status import Progress

_LINES = 200  # Of the end of a log: a validation may print many.
_FRESH = 10.0  # Seconds in which a training says no more about itself.


class Readings:
    """What was read lately, for those who look at many jobs every few seconds.

    Args:
        cluster: where the jobs are.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._read: dict[str, tuple[float, Progress | None]] = {}
        """When a pod's log was read, and what it said, by the pod's uid."""

    def completed(self, status: JobStatus) -> JobStatus:
        """Return a job that runs with how far it is, as far as its log tells."""
        if status.progress is not None or status.phase is not Phase.RUNNING:
            return status
        runs = [pod for pod in status.pods if pod.phase == "Running"]
        # Of an elastic job any pod may have rank 0, and one that has not says nothing of it.
        for pod in runs if status.elastic else [pod for pod in runs if pod.rank == 0]:
            if found := self._of(pod):
                return replace(status, progress=found)
        return status

    def _of(self, pod: PodStatus) -> Progress | None:
        at, found = self._read.get(pod.uid, (float("-inf"), None))
        if time.monotonic() - at > _FRESH:
            log = PodLog(self._cluster, pod.name, pod.uid, threading.Event(), tail=_LINES)
            with suppress(ApiError):  # It may not be read, or not now: a job is told of without it.
                found = job_status.parse(list(log.lines(follow=False))) or found
            self._read[pod.uid] = (time.monotonic(), found)
        return found
