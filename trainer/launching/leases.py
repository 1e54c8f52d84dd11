"""Leases: one process at a time, on any machine, works on something.

A lease is a folder of numbered objects; the creator of the last one holds the lease and rewrites it every few
seconds. If it stops changing, by the clock of a process that watches it, the holder counts as dead.
A store without conditional writes may give a lease to two processes that ask at the same moment.
"""

import logging
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from trainer import storage
from trainer.base import json_files
from trainer.base.errors import StorageError

_LOG = logging.getLogger("storage")
EXPIRY_SECONDS = 60.0  # seconds without a change after which a holder counts as dead
_RENEWALS_PER_EXPIRY = 6  # writes of a holder within EXPIRY_SECONDS


def of_data_root(data_root: str) -> str:
    """Return the lease for freeing space in a data root, and for starting to use its data."""
    return storage.join(data_root, "retention", "lock")


class HeldError(StorageError):
    """Another process holds the lease."""

    transient = True


class Watch:
    """What a process has observed of a lease: lets it find dead holders by quick checks instead of
    waiting.
    """

    def __init__(self) -> None:
        self._before: tuple[int, Any] = (-1, None)
        self._changed = 0.0

    def is_free(self, uri: str, lapse: float = EXPIRY_SECONDS) -> bool:
        """Return whether a lease has no holder, or one that has not changed it for `lapse` seconds."""
        return self.look(uri, lapse)[2]

    def look(self, uri: str, lapse: float) -> tuple[int, str, bool]:
        """Return the last number of a lease, its holder, and whether it is free."""
        number = _last(uri)
        content = _read(storage.join(uri, f"{number:09d}.json")) if number else {"beat": -1}
        now = time.monotonic()
        if (number, content) != self._before:
            self._before, self._changed = (number, content), now
        free = content.get("beat") == -1 or now - self._changed > lapse
        return number, str(content.get("holder", "another process")), bool(free)


class Lease:
    """A lease that this process holds, or tries to take."""

    def __init__(self, uri: str, number: int, holder: str, lapse: float) -> None:
        self._folder, self._number, self._lapse = uri, number, lapse
        self._place = storage.join(uri, f"{number:09d}.json")
        self._content = {"holder": holder, "token": secrets.token_hex(8)}
        self._seen = time.monotonic()
        self._ended = threading.Event()

    def take(self) -> bool:
        """Create the object; return whether this process holds the lease now."""
        if not storage.create(self._place, self._encoded(0)) or self._number != _last(self._folder):
            return False
        return bool(_read(self._place).get("token") == self._content["token"])

    def keep(self) -> None:
        """Rewrite the object until `end`, or until another process has taken the lease."""
        beat = 0
        while not self._ended.wait(self._lapse / _RENEWALS_PER_EXPIRY):
            beat, now = beat + 1, time.monotonic()
            try:
                if self._number != _last(self._folder):
                    return
                storage.write_bytes(self._place, self._encoded(beat), sync=False)
                self._seen = now
            except StorageError as error:
                _LOG.warning("cannot renew the lease %s: %s", self._folder, error.message)

    def check(self) -> None:
        """Raise a StorageError if another process may hold the lease by now."""
        silent = time.monotonic() - self._seen
        if silent > self._lapse / 2 or self._number != _last(self._folder):
            message = f"this process lost the lease {self._folder}: it did not renew it for {silent:.0f} s"
            raise StorageError(message, fix="run the same command again", transient=True)

    def end(self) -> None:
        """Release the lease and delete older objects."""
        self._ended.set()
        with suppress(StorageError):
            if self._number != _last(self._folder):
                return
            storage.write_bytes(self._place, self._encoded(-1), sync=False)
            for name in storage.list_files(self._folder):
                if _number(name) < self._number:
                    storage.delete(storage.join(self._folder, name))

    def _encoded(self, beat: int) -> bytes:
        """Return the object's content; a beat of -1 is the last."""
        return json_files.encode({**self._content, "beat": beat})


@contextmanager
def hold(
    uri: str, holder: str, *, patience: float, lapse: float = EXPIRY_SECONDS, watch: Watch | None = None
) -> Iterator[Lease]:
    """Hold a lease while the block runs.

    Waits `patience` seconds for another holder; `holder` names this process to others, and `watch` is what
    earlier calls have seen of the lease. Raises HeldError if another process still holds it.
    """
    watch, begin, logged = watch or Watch(), time.monotonic(), False
    while True:
        number, other, free = watch.look(uri, lapse)
        lease = Lease(uri, number + 1, holder, lapse)
        if free and lease.take():
            break
        if not free and time.monotonic() - begin > patience:
            raise HeldError(f"{uri} is held by {other}", fix="wait until it has ended")
        if not free and not logged:
            _LOG.info("waiting for %s, which is held by %s", uri, other)
            logged = True
        time.sleep(0.0 if free else min(1.0, lapse / 20))
    thread = threading.Thread(target=lease.keep, name="lease", daemon=True)
    thread.start()
    try:
        yield lease
    finally:
        lease.end()
        thread.join(lapse)


def _read(place: str) -> dict[str, Any]:
    """Return a holder's object; {} if it is damaged or was just deleted."""
    with suppress(StorageError):
        tree = storage.read_json(place)
        return tree if isinstance(tree, dict) else {}
    return {}


def _last(uri: str) -> int:
    return max((_number(name) for name in storage.list_files(uri)), default=0)


def _number(name: str) -> int:
    stem = name.removesuffix(".json")
    return int(stem) if stem.isdecimal() and stem.isascii() else 0
