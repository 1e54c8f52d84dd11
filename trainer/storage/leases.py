"""Leases: of several processes, wherever they run, one at a time does something.

A lease is a folder of numbered objects, of which the last counts. Whoever creates the next number holds it,
for of several writers of one name one succeeds; it writes to it every few seconds, and when it ends it writes
that it did. An object that no longer changes has lost its holder: whoever has watched it for long enough, by
its own clock, creates the next number. A holder that comes back from a long sleep finds that out (`check`).

A store that does not know conditional writes may give a lease twice where two ask in the same moment.
"""

import logging
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from trainer import storage
from trainer.base.errors import StorageError
from trainer.storage import records

_LOG = logging.getLogger("storage")

LAPSE = 60.0
"""Seconds without a change after which a holder is taken for dead."""

_BEATS = 6
"""How often a holder writes within LAPSE."""


def of_data_root(data_root: str) -> str:
    """Return the lease of a data root, for who frees space in it and who begins to need what is in it."""
    return storage.join(data_root, "retention", "lock")


class HeldError(StorageError):
    """Another process holds the lease."""

    passing = True


class Watch:
    """What a process saw of a lease that others hold: with it `hold` may be asked again and again, without
    patience, and still finds out that a holder died.
    """

    def __init__(self) -> None:
        self._before: tuple[int, Any] = (-1, None)
        self._changed = 0.0

    def is_free(self, uri: str, lapse: float = LAPSE) -> bool:
        """Return whether a lease has no holder, or one that has not changed it for `lapse` seconds.

        Raises:
            StorageError: the lease cannot be read.
        """
        return self.look(uri, lapse)[2]

    def look(self, uri: str, lapse: float) -> tuple[int, str, bool]:
        """Return the last number of a lease, its holder, and whether it is free."""
        number = _last(uri)
        content = _read(storage.join(uri, f"{number:09d}.json")) if number else {"beat": -1}
        now = time.monotonic()
        if (number, content) != self._before:
            self._before, self._changed = (number, content), now
        free = content.get("beat") == -1 or now - self._changed > lapse
        return number, str(content.get("holder", "somebody")), bool(free)


class Lease:
    """What the holder has."""

    def __init__(self, uri: str, number: int, holder: str, lapse: float) -> None:
        self._folder, self._number, self._holder, self._lapse = uri, number, holder, lapse
        self._token = secrets.token_hex(8)
        self._seen = time.monotonic()
        self._ended = threading.Event()

    def take(self) -> bool:
        """Create the object; tell whether this process holds the lease now."""
        self._seen = time.monotonic()
        if not storage.create(self._place, self._content(0)) or self._number != _last(self._folder):
            return False
        with suppress(StorageError):
            return bool(_read(self._place).get("token") == self._token)
        return False

    def keep(self) -> None:
        """Write to it until `end`."""
        beat = 0
        while not self._ended.wait(self._lapse / _BEATS):
            beat += 1
            now = time.monotonic()
            try:
                if self._number != _last(self._folder):
                    return
                storage.write_bytes(self._place, self._content(beat), sync=False)
                self._seen = now
            except StorageError as error:
                _LOG.warning("%s is not kept for the moment: %s", self._folder, error.message)

    def check(self) -> None:
        """Refuse to go on where somebody else may hold it by now.

        Raises:
            StorageError: saying so.
        """
        if time.monotonic() - self._seen > self._lapse / 2 or self._number != _last(self._folder):
            raise StorageError(
                f"{self._folder} is not held by this process any more: it slept, or could not reach it, for "
                f"{time.monotonic() - self._seen:.0f} s",
                fix="give the same command again",
                passing=True,
            )

    def end(self) -> None:
        """Let it go, and delete what lies before it."""
        self._ended.set()
        with suppress(StorageError):
            if self._number != _last(self._folder):
                return
            storage.write_bytes(self._place, self._content(-1), sync=False)
            for name in storage.list_files(self._folder):
                if _number(name) < self._number:
                    storage.delete(storage.join(self._folder, name))

    @property
    def _place(self) -> str:
        return storage.join(self._folder, f"{self._number:09d}.json")

    def _content(self, beat: int) -> bytes:
        """Return its content; a beat of -1 is the last."""
        return records.encode({"holder": self._holder, "token": self._token, "beat": beat})


@contextmanager
def hold(
    uri: str, holder: str, *, patience: float, lapse: float = LAPSE, watch: Watch | None = None
) -> Iterator[Lease]:
    """Hold a lease while the block runs.

    Args:
        uri: folder of the lease.
        holder: who this is, for those who wait.
        patience: seconds for which another holder is waited for. One that died is found out after `lapse`.
        lapse: see `LAPSE`; the same for all that share the lease.
        watch: what earlier calls saw of its holder.

    Raises:
        HeldError: another process still holds it.
        StorageError: it cannot be read or written.
    """
    lease = _taken(uri, holder, patience, lapse, watch or Watch())
    thread = threading.Thread(target=lease.keep, name="lease", daemon=True)
    thread.start()
    try:
        yield lease
    finally:
        lease.end()
        thread.join(lapse)


def _taken(uri: str, holder: str, patience: float, lapse: float, watch: Watch) -> Lease:
    begin = time.monotonic()
    logged = False
    while True:
        number, other, free = watch.look(uri, lapse)
        if free:
            lease = Lease(uri, number + 1, holder, lapse)
            if lease.take():
                return lease
            continue
        if time.monotonic() - begin > patience:
            raise HeldError(f"{uri} is held by {other}", fix="wait until it has ended")
        if not logged:
            _LOG.info("waiting for %s, which is held by %s", uri, other)
            logged = True
        time.sleep(min(1.0, lapse / 20))


def _read(place: str) -> dict[str, Any]:
    """Return what a holder wrote; {} where it is just being deleted, or is damaged."""
    with suppress(StorageError):
        tree = storage.read_json(place)
        return tree if isinstance(tree, dict) else {}
    return {}


def _last(uri: str) -> int:
    return max((_number(name) for name in storage.list_files(uri)), default=0)


def _number(name: str) -> int:
    stem = name.removesuffix(".json")
    return int(stem) if stem.isdecimal() and stem.isascii() else 0
