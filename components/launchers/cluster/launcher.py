"""Launchers that run a job in the cluster around this process, as one kind of job or another."""

from components.launchers.backend import JobStatus, Look, ignore
from components.launchers.cluster import watch
from components.launchers.cluster.backend import ClusterBackend
from components.launchers.cluster.kinds import KINDS
from components.launchers.launcher import Launcher
from components.launchers.spec import JobSpec


class ClusterLauncher(Launcher):
    """Runs a job in the cluster.

    Args:
        kinds: names of what the job may become; empty is whatever the cluster has.
    """

    def __init__(self, *kinds: str) -> None:
        self._kinds = [KINDS[name] for name in kinds or KINDS]

    def run(self, job: JobSpec, look: Look = ignore) -> None:
        """Run a job to its end, its output on stdout; see `watch.run`."""
        watch.run(ClusterBackend.connect(kinds=self._kinds), job, look=look)

    def remove(self, name: str, *, finished: bool = False) -> JobStatus:
        """Delete a job that is not finished, or any if `finished`; returns its last status."""
        backend = ClusterBackend.connect(kinds=self._kinds)
        status = backend.status(name)
        if finished or not status.phase.final:
            backend.stop(name)
        return status
