"""Ends a process together with its parent, however the parent ended."""

import os
import threading
from multiprocessing import connection

from trainer.base.errors import EXIT_RETRY

LAUNCHER = "KUBEDET_LAUNCHER"
"""Environment variable: the id of the launcher, with which this process ends."""


def end_with(sentinel: int) -> None:
    """End this process as soon as another has ended, whatever it is doing.

    Args:
        sentinel: a descriptor that can be read once the other has ended, as multiprocessing's
            sentinels and those of pidfd_open.
    """
    threading.Thread(target=_wait, args=(sentinel,), daemon=True).start()


def end_with_launcher() -> None:
    """End this process with the one that LAUNCHER names; without one, or off Linux, do nothing.

    torchrun stops its workers when it is stopped itself. When it is killed they would go on, in sessions
    of their own, and write to the same files as the workers of the next attempt.
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
    end_with(sentinel)


def _wait(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(EXIT_RETRY)
