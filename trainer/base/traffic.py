"""Counts the bytes that a process, and the processes that it starts, read from servers and write to them.

Every process maps a file of the folder FOLDER into memory, so the counts of killed workers remain.
"""

import mmap
import os
import secrets
import struct
import threading
from contextlib import suppress
from pathlib import Path

FOLDER = "KUBEDET_TRAFFIC"  # environment variable: the folder
_PAIR = struct.Struct("=QQ")
_lock = threading.Lock()
_counters: list[mmap.mmap | None] = []
"""This process's counter, once it has moved a byte; None if nothing is counted."""

if hasattr(os, "register_at_fork"):  # Parent and child must not share a counter.
    os.register_at_fork(after_in_child=_counters.clear)


def read(count: int) -> None:
    """Count bytes that this process has read from a server."""
    _add(count, 0)


def written(count: int) -> None:
    """Count bytes that this process has sent to a server."""
    _add(0, count)


def count_in(folder: Path | None) -> None:
    """Count in a folder from now on, also in processes that start later; with None, stop counting."""
    if folder is None:
        os.environ.pop(FOLDER, None)
    else:
        os.environ[FOLDER] = str(folder)
    _counters.clear()


def total(folder: Path) -> tuple[int, int]:
    """Return the bytes read and written that all processes have counted in a folder."""
    contents = [path.read_bytes() for path in folder.iterdir()]
    # A file that is just being created is still empty.
    pairs = [_PAIR.unpack(data) for data in contents if len(data) == _PAIR.size]
    return sum(read for read, _ in pairs), sum(written for _, written in pairs)


def _add(read: int, written: int) -> None:
    try:
        counter = _counters[0]
    except IndexError:
        with _lock:
            if not _counters:
                folder, mapped = os.environ.get(FOLDER), None
                if folder:
                    name = f"{folder}/{os.getpid()}-{secrets.token_hex(4)}"
                    with suppress(OSError), open(name, "x+b") as file:
                        file.write(_PAIR.pack(0, 0))
                        file.flush()
                        mapped = mmap.mmap(file.fileno(), _PAIR.size)
                _counters.append(mapped)
            counter = _counters[0]
    if counter is not None:
        with _lock:
            before = _PAIR.unpack_from(counter)
            _PAIR.pack_into(counter, 0, before[0] + read, before[1] + written)
