"""What `kubedet job` does alike wherever a job runs: it waits for the end of one, or brings it about."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from trainer.errors import LaunchError

if TYPE_CHECKING:
    from components.launchers.backend import JobStatus

POLL_SECONDS = 5.0
"""Between two looks at a job."""


def await_end(job: "JobStatus", look: Callable[[], "JobStatus"], timeout: float) -> "JobStatus":
    """Tell each phase of a job until it has ended; returns how it is then.

    Args:
        job: how it is now.
        look: returns how it is a little later.
        timeout: seconds to wait; 0 is for ever.

    Raises:
        LaunchError: it goes on for longer than that.
    """
    started, reported = time.monotonic(), ""
    while True:
        if job.phase != reported:
            print(f"{job.name} is {job.phase}", flush=True)
            reported = job.phase
        if job.phase.final:
            return job
        remaining = timeout - (time.monotonic() - started) if timeout else POLL_SECONDS
        if remaining <= 0:
            raise LaunchError(
                f"{job.name} is still {job.phase} after {timeout:g} s", fix="wait longer, or stop it"
            )
        time.sleep(min(POLL_SECONDS, remaining))
        job = look()


def stop(job: "JobStatus", delete: Callable[[str], None]) -> int:
    """Delete a job and say so; returns the exit code."""
    print(f"{job.name} is {job.phase}: deleting it and its pods ...", flush=True)
    delete(job.name)
    print(f"deleted {job.name}")
    return 0
