"""Stops a launcher at SIGTERM or SIGINT: deletes its job, unless the run goes on without this pod."""

import time
from collections.abc import Callable
from typing import NoReturn

from components.launchers.backend import Backend
from components.launchers.interrupts import StopRequest, not_deleted, stopped
from trainer.errors import Interrupted, LaunchError

Out = Callable[[str], None]
"""Takes a line."""


def stop(backend: Backend, name: str, request: StopRequest, submitted: bool, out: Out) -> NoReturn:
    """Delete a job, or leave it to the next attempt, and print which; there may be time for two requests.

    Args:
        backend: where it runs.
        name: its name.
        request: the signal.
        submitted: whether it is known to be ours.
        out: takes a line.

    Raises:
        Interrupted: always; with what to do where the job may still be there.
    """
    delete = f"kubedet job stop{backend.options} {name}"
    if request.signal == "SIGTERM" and not backend.ends_with_the_run():
        out(f"job {name}: goes on, for {request.signal} ends this pod and not the run")
        raise Interrupted(
            f"this pod was asked to end ({request.signal}), and the run goes on: so does the job {name}",
            fix=f"let the next attempt of this step take it up; `{delete}` ends it",
        )
    try:
        if submitted:
            backend.abandon(name)
        else:  # The name may be somebody else's; and a creation may be on its way, to arrive late.
            timings = backend.timings
            end = time.monotonic() + timings.late
            backend.withdraw(name, wait=False)
            while time.monotonic() < end:
                time.sleep(timings.backoff)
                backend.withdraw(name, wait=False)
    except LaunchError as error:
        raise not_deleted(request, name, error, stop=delete) from None
    out(f"job {name}: deleted on {request.signal}; its pods are given time to save a checkpoint")
    raise stopped()
