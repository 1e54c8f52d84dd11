"""Interface of a launcher: it runs a job to its end, and removes one that is left over."""

from typing import Protocol

from components.launchers.backend import JobStatus, Look, ignore
from components.launchers.spec import JobSpec


class Launcher(Protocol):
    """A way to run a training job."""

    def run(self, job: JobSpec, look: Look = ignore) -> None:
        """Run a job to its end, its output on stdout.

        Args:
            job: what to run.
            look: takes each status of its pods, where it has some.

        Raises:
            ConfigError: a job of this shape cannot run here.
            LaunchError: the job failed; the message holds its error or last lines, `exit_code` its code.
            Interrupted: the job was stopped and goes on when it is run again.
        """
        ...

    def remove(self, name: str, *, finished: bool = False) -> JobStatus:
        """Delete a job that is not finished, or any if `finished`; returns its last status.

        Raises:
            KubedetError: nobody could tell whether it is there, or it could not be deleted.
        """
        ...
