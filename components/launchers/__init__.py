"""The register of launchers, all for the same job specification."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from components.launchers.backend import JobStatus, Phase
from components.launchers.spec import JobSpec
from trainer.base.errors import ConfigError

if TYPE_CHECKING:
    from components.launchers.cluster.backend import ClusterBackend


@dataclass(frozen=True)
class Entry:
    """A launcher in the register."""

    meaning: str  # What it does, in words.
    kinds: tuple[str, ...] = ()
    """Kinds of jobs that it may create in a cluster, the preferred one first; empty if it runs on this
    machine."""

    @property
    def pods(self) -> bool:
        """Whether a job runs in pods, which need an image, a name and volumes."""
        return bool(self.kinds)


LAUNCHERS = {
    "local": Entry("processes of this machine or of the step's own pod"),
    "kubernetes": Entry("a PyTorchJob or a TrainJob: whichever the cluster runs", ("pytorchjob", "trainjob")),
    "pytorchjob": Entry("a PyTorchJob of the Training Operator", ("pytorchjob",)),
    "trainjob": Entry("a TrainJob of Kubeflow Trainer", ("trainjob",)),
}
DEFAULT = "kubernetes"  # The launcher of a run that names none.


def entry(launcher: str) -> Entry:
    """Return a launcher's entry in the register; ConfigError if there is no such launcher."""
    if launcher not in LAUNCHERS:
        raise ConfigError(f"no launcher {launcher!r}", fix=f"use one of: {', '.join(LAUNCHERS)}")
    return LAUNCHERS[launcher]


def run(launcher: str, job: JobSpec) -> None:
    """Run a training job to its end, its output on stdout.

    If it failed, a LaunchError has its error or last lines and its `exit_code`; Interrupted means that it was
    stopped and resumes when it is run again.
    """
    if entry(launcher).pods:
        from components.launchers.cluster import watch  # Kubernetes' client takes a second.

        watch.run(_backend(launcher, job.namespace), job)
    else:
        from components.launchers import local

        local.run(job)


def remove(launcher: str, name: str) -> JobStatus:
    """Delete a job unless it is finished; returns its last status."""
    if not entry(launcher).pods:  # It ends with the process that started it.
        return JobStatus(name, Phase.GONE)
    backend = _backend(launcher)
    status = backend.status(name)
    if not status.phase.final:
        backend.stop(name)
    return status


def _backend(launcher: str, namespace: str = "") -> "ClusterBackend":
    from components.launchers.cluster.backend import ClusterBackend
    from components.launchers.cluster.kinds import KINDS

    return ClusterBackend.connect(namespace, kinds=[KINDS[name] for name in entry(launcher).kinds])
