"""The register of launchers, all for the same job specification: a new one is a file and a line here."""

from dataclasses import dataclass
from importlib import import_module

from components.launchers.backend import JobStatus, Launcher, Look, ignore
from components.launchers.spec import JobSpec
from trainer.base.errors import ConfigError


@dataclass(frozen=True)
class Entry:
    """A launcher in the register."""

    meaning: str
    """What it does, in words."""
    place: str
    """Module and class, imported when it is used: Kubernetes' client takes a second."""
    kinds: tuple[str, ...] = ()
    """Arguments of the class: names of kinds of jobs."""
    pods: bool = True
    """Whether a job runs in pods of its own, which need an image, a name and volumes."""


_CLUSTER = "components.launchers.cluster.backend:ClusterLauncher"
LAUNCHERS = {
    "local": Entry(
        "processes of this machine or of the step's own pod",
        "components.launchers.local:LocalLauncher",
        pods=False,
    ),
    "kubernetes": Entry("a PyTorchJob or a TrainJob: whichever the cluster runs", _CLUSTER),
    "pytorchjob": Entry("a PyTorchJob of the Training Operator", _CLUSTER, ("pytorchjob",)),
    "trainjob": Entry("a TrainJob of Kubeflow Trainer", _CLUSTER, ("trainjob",)),
}
"""The launchers by name."""
DEFAULT = "kubernetes"
"""The one of a run that names none."""


def entry(launcher: str) -> Entry:
    """Return a launcher's entry in the register.

    Raises:
        ConfigError: there is none of that name; it names those that are.
    """
    if launcher not in LAUNCHERS:
        raise ConfigError(f"no launcher {launcher!r}", fix=f"use one of: {', '.join(LAUNCHERS)}")
    return LAUNCHERS[launcher]


def run(launcher: str, job: JobSpec, look: Look = ignore) -> None:
    """Run a training job to its end, its output on stdout.

    Args:
        launcher: one of LAUNCHERS.
        job: what to run.
        look: takes each status of its pods, where it has some.

    Raises:
        ConfigError: there is no such launcher, or it cannot run a job of this shape.
        LaunchError: the job failed; the message holds its error or last lines, `exit_code` its code.
        Interrupted: the job was stopped and goes on when it is run again.
    """
    _create(launcher).run(job, look)


def remove(launcher: str, name: str, *, finished: bool = False) -> JobStatus:
    """Delete a job that is not finished; returns its last status.

    Args:
        launcher: what started it.
        name: its name.
        finished: whether to delete one that is finished, too.

    Raises:
        KubedetError: nobody could tell whether it is there, or it could not be deleted.
    """
    return _create(launcher).remove(name, finished=finished)


def _create(launcher: str) -> Launcher:
    launcher_entry = entry(launcher)
    module, _, name = launcher_entry.place.partition(":")
    instance: Launcher = getattr(import_module(module), name)(*launcher_entry.kinds)
    return instance
