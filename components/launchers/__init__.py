"""One job specification, several ways to run it."""

from components.launchers.spec import JobSpec
from trainer.errors import ConfigError

LAUNCHERS = ("local", "kubernetes")
"""Processes of this machine, or a PyTorchJob through the Training Operator."""


def check(launcher: str) -> None:
    """Refuse a launcher that does not exist.

    Raises:
        ConfigError: naming those that do.
    """
    if launcher not in LAUNCHERS:
        raise ConfigError(f"no launcher {launcher!r}", fix=f"use one of: {', '.join(LAUNCHERS)}")


def run(launcher: str, job: JobSpec) -> None:
    """Run a training job to its end, its output on stdout.

    Args:
        launcher: one of LAUNCHERS.
        job: what to run.

    Raises:
        ConfigError: there is no such launcher, or it cannot run a job of this shape.
        LaunchError: the job failed; the message holds its error or last lines, `exit_code` its code.
        Interrupted: the job was stopped and goes on when it is run again.
    """
    check(launcher)
    if launcher == "local":
        from components.launchers import local

        local.run(job)
    else:  # Imported here: Kubernetes' client takes a second, and training pods do without it.
        from components.launchers.cluster import watch
        from components.launchers.cluster.pytorchjob import PyTorchJobBackend

        watch.run(PyTorchJobBackend.connect(), job)
