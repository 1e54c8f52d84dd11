"""Local copies of files on servers, kept under a name that changes with their content."""

import hashlib
import os
import re
import sys
import threading
from collections import OrderedDict
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from trainer.base.errors import DamagedError
from trainer.base.os_errors import translate_oserror
from trainer.storage import local, objects
from trainer.storage.copies import Copies
from trainer.storage.uris import FileState

_IN_USE = 32
"""Copies that this process counts as in use: whoever got a path opens it later, perhaps more than once."""

_LOCK = threading.Lock()
_HELD: OrderedDict[Path, int] = OrderedDict()
"""Their descriptors, the last used last. Nobody evicts a copy that is open here."""


def copy(uri: str, state: FileState, folder: Path | None, sha256: str) -> Path:
    """Return the copy of a file, downloaded if there is none of this version.

    Args:
        uri: the file.
        state: what is known of it.
        folder: the caller's own; None for the one of all processes, where copies that were not used
            for longest make room for others, but none that this process was given lately.
        sha256: what the hash must be; "" for what the store tells of it.

    Raises:
        StorageError: the file cannot be read, or the copy cannot be written.
    """
    copies = Copies(folder, None if folder is None else sys.maxsize)
    name = _name(uri, state)
    descriptor = copies.open(name, state.size)
    if descriptor is not None and sha256 and not _is_sound(copies.path(name), uri, sha256):
        os.close(descriptor)
        copies.drop(name)
        descriptor = None
    if descriptor is None:
        with translate_oserror(str(copies.folder), "write"):
            descriptor = copies.add(
                name, state.size, lambda path: objects.copy(uri, path, sha256), needed=True
            )
    if folder is None:
        _hold(copies.path(name), descriptor)
    else:
        os.close(descriptor)
    return copies.path(name)


def forget(uri: str) -> None:
    """Drop the copy of a file that turned out to be damaged, from the folder of all processes."""
    remote = objects.state(uri)
    if remote is not None:
        copies = Copies(None, None)
        copies.drop(_name(uri, remote))


def _name(uri: str, state: FileState) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]", "_", PurePosixPath(urlsplit(uri).path).name)[-80:]
    return f"{hashlib.sha256(f'{uri} {state.version}'.encode()).hexdigest()}-{name}"


def _is_sound(path: Path, uri: str, sha256: str) -> bool:
    """Tell whether a copy has the hash that it must have: disks change bytes, too."""
    try:
        local.check(path, uri, sha256)
    except DamagedError:
        return False
    return True


def _hold(path: Path, descriptor: int) -> None:
    """Keep a copy from being evicted until it is one of the last in use no more."""
    with _LOCK:
        before = _HELD.pop(path, None)
        if before is not None:
            os.close(before)
        _HELD[path] = descriptor
        if len(_HELD) > _IN_USE:
            os.close(_HELD.popitem(last=False)[1])
