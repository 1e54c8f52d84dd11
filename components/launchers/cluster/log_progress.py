"""Progress of jobs whose status does not report it, parsed from the end of rank 0's log."""

import threading
import time
from contextlib import suppress
from dataclasses import replace

from components.launchers.backend import JobStatus, Phase, PodStatus
from components.launchers.cluster.api_errors import ApiError
from components.launchers.cluster.client import Cluster
from components.launchers.cluster.pod_log import PodLog
from trainer import job_status
from trainer.job_status import Progress

_LINES = 200  # Of the end of a log: a validation may print many.
_FRESH = 10.0  # Seconds for which a reading is reused.


class Readings:
    """Caches the progress of jobs, for callers that poll many jobs every few seconds.

    Args:
        cluster: where the jobs are.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._read: dict[str, tuple[float, Progress | None]] = {}
        """When a pod's log was read, and the progress in it, by the pod's uid."""

    def completed(self, status: JobStatus) -> JobStatus:
        """Return a running job's status with the progress from its log, if there is one."""
        if status.progress is not None or status.phase is not Phase.RUNNING:
            return status
        running = [pod for pod in status.pods if pod.phase == "Running"]
        # Of an elastic job any pod may have rank 0, and one that has not says nothing of it.
        for pod in running if status.elastic else [pod for pod in running if pod.rank == 0]:
            if progress := self._progress(pod):
                return replace(status, progress=progress)
        return status

    def _progress(self, pod: PodStatus) -> Progress | None:
        read_at, progress = self._read.get(pod.uid, (float("-inf"), None))
        if time.monotonic() - read_at > _FRESH:
            log = PodLog(self._cluster, pod.name, pod.uid, threading.Event(), tail=_LINES)
            with suppress(ApiError):  # Progress is optional: the log may be forbidden or not readable now.
                progress = job_status.parse(list(log.lines(follow=False))) or progress
            self._read[pod.uid] = (time.monotonic(), progress)
        return progress
