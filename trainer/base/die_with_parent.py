"""Ends a process when its parent ends, even if the parent is killed."""

import os
import threading
from multiprocessing import connection

from trainer.base.errors import EXIT_RETRY

LAUNCHER = "KUBEDET_LAUNCHER"
"""Environment variable: the process id of the launcher. This process exits when the launcher ends."""


def die_with_process(sentinel: int) -> None:
    """Exit as soon as another process ends; `sentinel` is its descriptor (pidfd_open)."""

    def wait() -> None:
        connection.wait([sentinel])
        os._exit(EXIT_RETRY)

    threading.Thread(target=wait, daemon=True).start()


def die_with_launcher() -> None:
    """Exit when the process in LAUNCHER ends; do nothing if it is unset or this is not Linux.

    If torchrun is killed, its workers go on, and would write to the same files as the workers of the next
    attempt.
    """
    launcher = os.environ.get(LAUNCHER)
    if launcher is None or not hasattr(os, "pidfd_open"):
        return
    try:
        sentinel = os.pidfd_open(int(launcher))
    except ProcessLookupError:
        os._exit(EXIT_RETRY)
    except OSError:  # A sandbox without this call.
        return
    die_with_process(sentinel)
