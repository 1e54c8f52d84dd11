"""Copies of shards on the local disk, shared by the processes of a machine: see trainer/storage/copies.py.

A copy's name is <sha256>.tar: its hash was right when it came.
"""

import hashlib
import logging
import os
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import IO

from trainer import storage
from trainer.base.errors import StorageError
from trainer.data.shard_folder import REPAIR, note
from trainer.storage.copies import FOLDER, LIMIT, Busy, Copies

_PIECE = 4 * 1024 * 1024
_TIMES = 2
_LOG = logging.getLogger("data")


class Fetched(Enum):
    """The outcome of fetching a shard."""

    THERE = "there"
    BUSY = "busy"
    """Another process or thread is fetching it, or one whose hash begins alike."""
    FULL = "full"
    """No room: all copies are in use, or the folder cannot be written."""
    GIVEN_UP = "given up"


class _GivenUp(Exception):
    """The shard is not needed any more."""


class ShardCache:
    """The copies of one folder. Any number of objects, threads and processes may use it."""

    def __init__(self, folder: Path | None = None, limit: int | None = None) -> None:
        """Set the place; nothing is made before something is fetched.

        Args:
            folder: where copies are kept; by default as the environment says.
            limit: most bytes of all copies, 0 for none; by default as the environment says.

        Raises:
            ConfigError: the environment's limit is no number.
            StorageError: the default folder was made by another user.
        """
        self._copies = Copies(folder, limit)
        self._warned = False

    def open(self, sha256: str, size: int) -> int | None:
        """Return a descriptor of the copy of a shard, which stays as long as that is open; or None."""
        return self._copies.open(_name(sha256), size)

    def fetch(
        self, uri: str, sha256: str, size: int, given_up: Callable[[], bool] = lambda: False
    ) -> Fetched:
        """Copy a shard here, if it is not and there is room.

        Args:
            uri: the shard.
            sha256: its hash.
            size: its bytes.
            given_up: called now and then; tells whether the shard is not needed any more.

        Raises:
            StorageError: it cannot be read, or is damaged however often it is read.
        """
        if self._copies.path(_name(sha256)).exists():
            return Fetched.THERE
        if self._copies.asked == 0:
            return Fetched.FULL
        try:
            os.close(
                self._copies.add(_name(sha256), size, lambda path: _copy(uri, sha256, size, path, given_up))
            )
        except Busy:
            return Fetched.BUSY
        except _GivenUp:
            return Fetched.GIVEN_UP
        except OSError as error:  # Of the folder: what the store refuses is a StorageError.
            self._warn_once(error.strerror or str(error))
            return Fetched.FULL
        return Fetched.THERE

    def drop(self, sha256: str) -> None:
        """Remove a copy that turned out to be damaged; open descriptors stay readable."""
        self._copies.drop(_name(sha256))

    def _warn_once(self, reason: str) -> None:
        """Warn once that shards are not cached: training goes on, but reads more slowly."""
        if self._warned:
            return
        self._warned = True
        _LOG.warning(
            "shards are not kept in %s: %s; images are read from the store one by one instead "
            "(%s says where shards are kept, %s how many gigabytes they may take)",
            self._copies.folder, reason, FOLDER, LIMIT,
        )  # fmt: skip


def _name(sha256: str) -> str:
    return f"{sha256}.tar"


def _copy(uri: str, sha256: str, size: int, path: Path, given_up: Callable[[], bool]) -> None:
    """Read a shard, one piece after the other; shards are read in parallel, not their pieces.

    So a process that ends need not wait for threads of the storage, whose server may be dead.
    """
    for _ in range(_TIMES):
        digest = hashlib.sha256()
        with path.open("wb", buffering=0) as file:
            for start in range(0, size, _PIECE):
                if given_up():
                    raise _GivenUp
                data = storage.read_range(uri, start, min(_PIECE, size - start))
                digest.update(data)
                _write(file, data)
        if digest.hexdigest() == sha256:
            return
    folder, _, name = uri.rpartition("/")
    note(folder, name)
    raise StorageError(
        f"{uri} is damaged: its sha256 is {digest.hexdigest()}, not {sha256}, however often it is read",
        fix=REPAIR.format(folder),
    )


def _write(file: IO[bytes], data: bytes) -> None:
    """Write all of it: a disk that is nearly full takes a part, and refuses the next."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
