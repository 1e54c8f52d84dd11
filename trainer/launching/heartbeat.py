"""The launcher's heartbeat, without which a training job in a cluster ends.

A job would otherwise outlive a launcher that is killed or loses the API server. The launcher rewrites a file
in the run folder, and `python -m trainer launch` reads it on every node. If the file does not change for
the time limit, the workers save a checkpoint and the job fails with EXIT_ABANDONED.
"""

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from trainer import storage
from trainer.base.clock import CLOCK, Clock
from trainer.base.errors import EXIT_RETRY, KubedetError, MissingError

EXIT_ABANDONED = 75
"""Exit code of a training run that saved its state because its launcher was gone (EX_TEMPFAIL). It is below
128, so no controller restarts the pod."""

SIGNAL = signal.SIGHUP  # ends this node at the time limit; torchrun handles it like SIGTERM
_LOG = logging.getLogger("launcher")


@contextmanager
def renew_periodically(
    uri: str,
    interval: float = 20.0,
    clock: Clock = CLOCK,
    write: Callable[[str, object], object] = storage.write_json,
) -> Iterator[None]:
    """Rewrite the heartbeat file in a thread until the context ends; log each storage outage once."""
    closing = False
    changed = clock.condition()

    def renew() -> None:
        failed = False
        while not closing:
            try:
                write(uri, {"time": clock.now().timestamp()})
                failed = False
            except KubedetError as error:
                if not failed:
                    _LOG.warning("the heartbeat cannot be written; still trying: %s", error)
                failed = True
            with changed:
                changed.wait_for(lambda: closing, interval)

    clock.start(renew)
    try:
        yield
    finally:
        with changed:
            closing = True
            changed.notify_all()


class Watch:
    """Decides from the heartbeat whether the launcher is gone.

    The time since the last change is measured with this machine's clock. If this process has seen no change
    yet (a restarted pod) or none since storage could not be read, the age of the file by the writer's clock
    is added, but the file must also stay unchanged for a third of the limit: the launcher may have had the
    same outage.
    """

    def __init__(
        self,
        uri: str,
        timeout: float,
        clock: Clock = CLOCK,
        read: Callable[[str], bytes] = storage.read_bytes,
    ) -> None:
        self._clock, self._read = clock, read
        self.uri, self.timeout, self.interval = uri, timeout, min(5.0, timeout / 18)
        self.expired = False
        """Whether the launcher is gone."""
        self._content: bytes | None = None
        self._changed_at = clock.monotonic()
        self._earlier_age = 0.0

    def poll(self) -> float:
        """Read the heartbeat and return the seconds since its last change."""
        began = self._clock.monotonic()
        content: bytes | None
        try:
            content = self._read(self.uri)
        except MissingError:
            content = b""
        except KubedetError:
            content = None
        now = self._clock.monotonic()
        if content is None or now - began > self.timeout / 3:
            self._content, self._changed_at, self._earlier_age = None, now, 0.0
            return 0.0
        if content != self._content:
            self._earlier_age = 0.0
            if self._content is None:
                # The time in the file is from the writer's clock.
                with suppress(ValueError, LookupError, TypeError):
                    written = float(json.loads(content)["time"])
                    self._earlier_age = max(0.0, self._clock.now().timestamp() - written)
            self._content, self._changed_at = content, now
        unchanged = now - self._changed_at
        age = unchanged + self._earlier_age
        self.expired = age >= self.timeout and unchanged >= self.timeout / 3
        return age

    @contextmanager
    def signal_on_expiry(self) -> Iterator[None]:
        """Send SIGNAL to this process if the launcher is gone before the context ends."""
        closing = threading.Event()

        def watch() -> None:
            while not closing.wait(self.interval):
                self.poll()
                if self.expired and not closing.is_set():
                    print(
                        f"launch: no heartbeat from the launcher for {self.timeout:.0f} s ({self.uri}): "
                        "saving the training state and exiting",
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

    def wait_for_exit_code(self, code: int) -> int:
        """Return the exit code of this node, given that of its workers; wait if the launcher may be gone.

        The first node that finds the launcher gone stops the workers of all nodes. So a node whose workers
        were stopped waits until the heartbeat is renewed or expires.
        """
        while not self.expired and code == EXIT_RETRY and self.poll() > self.timeout / 2:
            self._clock.sleep(self.interval)
        return EXIT_ABANDONED if self.expired and code > 127 else code
