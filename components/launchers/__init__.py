"""The available launchers. All take the same job specification."""

from typing import TYPE_CHECKING

from components.launchers.backend import JobStatus, Phase
from components.launchers.spec import JobSpec
from trainer.base.errors import ConfigError

if TYPE_CHECKING:
    from components.launchers.cluster.backend import ClusterBackend


LAUNCHERS: dict[str, tuple[str, ...]] = {
    "local": (),
    "kubernetes": ("pytorchjob", "trainjob"),
    "pytorchjob": ("pytorchjob",),
    "trainjob": ("trainjob",),
}
"""The kinds of jobs that each launcher may create in a cluster, the preferred one first. `local` starts
processes in the step's own pod."""
DEFAULT = "kubernetes"  # Launcher of runs that do not choose one.


def in_pods(launcher: str) -> bool:
    """Whether a launcher runs jobs in pods, which need an image, a name and volumes.

    ConfigError: there is no such launcher.
    """
    if launcher not in LAUNCHERS:
        raise ConfigError(f"no launcher {launcher!r}", fix=f"use one of: {', '.join(LAUNCHERS)}")
    return bool(LAUNCHERS[launcher])


def run(launcher: str, job: JobSpec) -> None:
    """Run a training job to its end, and print its output to stdout.

    LaunchError, with the job's message or last lines and its `exit_code`: the job failed. Interrupted: the
    job was stopped, and resumes when it is run again.
    """
    if in_pods(launcher):
        from components.launchers.cluster import watch  # Kubernetes' client takes a second.

        watch.run(_backend(launcher, job.namespace), job)
    else:
        from components.launchers import local

        local.run(job)


def delete_unfinished(launcher: str, name: str) -> JobStatus:
    """Delete a job unless it is finished; return its last status."""
    if not in_pods(launcher):  # A local job ends with the process that started it.
        return JobStatus(name, Phase.GONE)
    backend = _backend(launcher)
    status = backend.status(name)
    if not status.phase.final:
        backend.stop(name)
    return status


def _backend(launcher: str, namespace: str = "") -> "ClusterBackend":
    from components.launchers.cluster.backend import ClusterBackend
    from components.launchers.cluster.kinds import KINDS

    return ClusterBackend.connect(namespace, kinds=[KINDS[name] for name in LAUNCHERS[launcher]])
