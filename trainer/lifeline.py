"""Processes that end with the one that started them, however that one went."""

import os
import threading
from multiprocessing import connection

from trainer.errors import EXIT_RETRY

LAUNCHER = "KUBEDET_LAUNCHER"
"""Environment variable: the id of the process that started this one and lasts as long."""


def end_with(sentinel: int) -> None:
    """End this process at once when another has ended, whatever it does meanwhile.

    Args:
        sentinel: a descriptor that can be read once the other has ended, as multiprocessing's
            sentinels and those of pidfd_open.
    """
    threading.Thread(target=_wait, args=(sentinel,), daemon=True).start()


def end_with_launcher() -> None:
    """End this process with the one that LAUNCHER names; without one, or off Linux, do nothing.

    torchrun stops its workers when it is stopped itself. When it is killed they would go on, in sessions
    of their own, and write where those of the next try write.
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
