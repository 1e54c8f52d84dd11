"""How many bytes a process, and those that it starts, move from and to servers.

Each process counts in a small file of its own, which it maps into memory, in a folder that the environment
names: whoever made the folder knows what workers of a pool and those of torchrun have moved, also where they
were killed. Counted is what is read and written of objects and the web, each try of it; not headers,
listings, and what lies on a disk.
"""

import mmap
import os
import secrets
import struct
import threading
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

FOLDER = "KUBEDET_TRAFFIC"
"""Environment variable: the folder."""

_PAIR = struct.Struct("=QQ")


class Moved(NamedTuple):
    """Bytes."""

    read: int
    written: int


class _Counter:
    """The counts of this process. One that has no folder counts for nobody."""

    def __init__(self, folder: str) -> None:
        self._lock = threading.Lock()
        self._read = self._written = 0
        self._file: mmap.mmap | None = None
        if folder:
            with suppress(OSError):  # It may be gone, with who wanted to know.
                self._file = _mapped(Path(folder) / f"{os.getpid()}-{secrets.token_hex(4)}")

    def add(self, read: int, written: int) -> None:
        if self._file is None:
            return
        with self._lock:
            self._read += read
            self._written += written
            _PAIR.pack_into(self._file, 0, self._read, self._written)


def _mapped(path: Path) -> mmap.mmap:
    with path.open("x+b") as file:
        file.write(_PAIR.pack(0, 0))
        file.flush()
        return mmap.mmap(file.fileno(), _PAIR.size)


_counters: list[_Counter] = []
"""That of this process, once it has moved a byte."""

os.register_at_fork(after_in_child=_counters.clear)  # Else both would write over each other's counts.


def _here() -> _Counter:
    if not _counters:
        _counters.append(_Counter(os.environ.get(FOLDER, "")))
    return _counters[0]


def read(count: int) -> None:
    """Note that this process has read so many bytes from a server."""
    _here().add(count, 0)


def written(count: int) -> None:
    """Note that this process has sent so many bytes to a server."""
    _here().add(0, count)


def count_in(folder: Path | None) -> None:
    """Let this process, and those that it starts from now on, count in a folder; None in none."""
    if folder is None:
        os.environ.pop(FOLDER, None)
    else:
        os.environ[FOLDER] = str(folder)
    _counters.clear()


def total(folder: Path) -> Moved:
    """Return what all processes have counted in a folder."""
    pairs = []
    for path in folder.iterdir():
        data = path.read_bytes()
        if len(data) == _PAIR.size:  # not one that is just being made
            pairs.append(_PAIR.unpack(data))
    return Moved(sum(read for read, _ in pairs), sum(written for _, written in pairs))
