"""The launcher's sign of life, without which a training job in a cluster ends by itself.

A job outlives its launcher if that is killed, evicted for good, or cut off from the API server. So the
launcher rewrites a small file in the run's folder, and `python -m trainer launch` on every node reads it. If
the file has not changed for the time limit, the workers save a checkpoint, and the job fails with
EXIT_ABANDONED: its GPUs are free. A launcher that comes back before the limit finds the job running; after
it, it starts the job from that checkpoint.
"""

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from trainer import storage
from trainer.base.errors import EXIT_RETRY, KubedetError, MissingError

EXIT_ABANDONED = 75
"""Exit code of a training that saved its state and ended because its launcher was gone (EX_TEMPFAIL).

Below 128, so that no controller restarts the pod.
"""

SIGNAL = signal.SIGHUP
"""Signal that ends the node's launcher when the limit is reached; torchrun handles it as it handles
SIGTERM."""

_LOG = logging.getLogger("launcher")


@contextmanager
def renewed(uri: str, interval: float = 20.0) -> Iterator[None]:
    """Rewrite the heartbeat in a thread while the context lasts.

    A store that cannot be written to is logged once per outage and does not end the context.

    Args:
        uri: the heartbeat's file.
        interval: seconds between two writes.
    """
    closing = threading.Event()
    threading.Thread(target=_renew, args=(uri, interval, closing), name="heartbeat", daemon=True).start()
    try:
        yield
    finally:
        closing.set()


def _renew(uri: str, interval: float, closing: threading.Event) -> None:
    failed = False
    while not closing.is_set():
        try:
            storage.write_json(uri, {"time": time.time()})
            failed = False
        except KubedetError as error:
            if not failed:
                _LOG.warning("the heartbeat cannot be written; still trying: %s", error)
            failed = True
        closing.wait(interval)


class Watch:
    """Decides from the heartbeat whether the launcher is gone.

    The time limit is measured on this machine's clock from the last change of the file. Only for a file that
    this process has never seen change is its age by the writer's clock added, so that a restarted pod does
    not wait for the whole limit again; such a file must then stay unchanged for another third of the limit. A
    store that cannot be read says nothing about the launcher: the time starts again.

    Args:
        uri: the heartbeat's file.
        timeout: seconds without a change after which the launcher is gone.
        abandoned: what this node's process ends with then.
    """

    def __init__(self, uri: str, timeout: float, abandoned: int = EXIT_ABANDONED) -> None:
        self.uri, self.timeout, self.interval = uri, timeout, min(5.0, timeout / 18)
        self.abandoned = abandoned
        self.expired = False
        """Whether the launcher is gone."""
        self._content: bytes | None = None
        self._changed_at = time.monotonic()
        self._earlier_age = 0.0

    def look(self) -> float:
        """Read the heartbeat; returns the seconds since its last change."""
        began = time.monotonic()
        content: bytes | None
        try:
            content = storage.read_bytes(self.uri)
        except MissingError:
            content = b""
        except KubedetError:
            content = None
        now = time.monotonic()
        if content is None or now - began > self.timeout / 3:  # The launcher may have had no store either.
            self._changed_at, self._earlier_age = now, 0.0
            return 0.0
        if content != self._content:
            self._earlier_age = _age(content) if self._content is None else 0.0
            self._content, self._changed_at = content, now
        unchanged = now - self._changed_at
        age = unchanged + self._earlier_age
        self.expired = age >= self.timeout and unchanged >= self.timeout / 3
        return age

    @contextmanager
    def signalling(self) -> Iterator[None]:
        """Send SIGNAL to this process when the launcher is gone, while the context lasts."""
        closing = threading.Event()

        def watch() -> None:
            while not closing.wait(self.interval):
                self.look()
                if self.expired and not closing.is_set():
                    print(
                        f"launch: no sign of life from the launcher for {self.timeout:.0f} s ({self.uri}): "
                        "the training saves its state and ends",
                        file=sys.stderr,
                        flush=True,
                    )
                    os.kill(os.getpid(), SIGNAL)
                    return

        threading.Thread(target=watch, name="heartbeat", daemon=True).start()
        try:
            yield
        finally:
            closing.set()

    def exit_code(self, code: int) -> int:
        """Return the exit code of this node, given that of its workers.

        All nodes must agree that the job ends, although each finds out by itself: the first to do so stops
        the workers of all. So a node whose workers were stopped waits until its own heartbeat is renewed or
        expired.

        Args:
            code: what the workers ended with.

        Returns:
            `abandoned` if the launcher is gone and they did not end by themselves, else the same code.
        """
        while not self.expired and code == EXIT_RETRY and self.look() > self.timeout / 2:
            time.sleep(self.interval)
        return self.abandoned if self.expired and code > 127 else code


def _age(content: bytes) -> float:
    """Return the age of a heartbeat by its writer's clock; 0 if it does not say or is in the future."""
    try:
        return max(0.0, time.time() - float(json.loads(content)["time"]))
    except (ValueError, LookupError, TypeError):
        return 0.0
