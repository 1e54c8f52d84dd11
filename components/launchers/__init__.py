"""One job specification, several ways to run it."""

from components.launchers import local
from components.launchers.spec import JobSpec
from trainer.errors import ConfigError

BACKENDS = {"local": local.run}


def run(launcher: str, job: JobSpec) -> None:
    """Run a training job to its end.

    Args:
        launcher: `local` starts torchrun on this machine.
        job: what to run.

    Raises:
        ConfigError: there is no such launcher, or it cannot run a job of this shape.
        LaunchError: the job failed; the message holds its error or last lines, `exit_code` its code.
        Interrupted: the job was stopped and goes on when it is run again.
    """
    if launcher not in BACKENDS:
        raise ConfigError(f"no launcher {launcher!r}", fix=f"use one of: {', '.join(BACKENDS)}")
    BACKENDS[launcher](job)
