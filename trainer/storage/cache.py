"""Local copies of files on servers, in a folder of bounded size that all processes of a machine share.

<folder>/<64 hex><rest>                a complete copy; its modification time is that of its last use
<folder>/<64 hex><rest>-<bytes>.part   a copy that is being written
<folder>/lock                          locked while space is freed

A copy is locked with flock(2) while it is written or used, and only copies without a lock are evicted. Locks
end with their process.
"""

import errno
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from trainer.base.errors import ConfigError, DamagedError, StorageError
from trainer.base.os_errors import translate_oserror
from trainer.storage.uris import FileState, check_hash

FOLDER = "KUBEDET_CACHE_DIR"  # environment variable: the folder; by default one in the temporary folder

LIMIT = "KUBEDET_CACHE_GB"
"""Environment variable: maximum gigabytes (10**9 bytes) of copies. By default half of the free disk space, at
most 100. In a pod a fifth of the disk also stays free, see _FREE_SHARE_IN_PODS; on a fuller disk, a tenth of
the rest is used."""

_DEFAULT_LIMIT = 100 * 10**9
_MIN_FREE_BYTES = 10**9
_FREE_SHARE_IN_PODS = 0.2
"""Of the disk that a pod shares with its node: the kubelet evicts pods if less than 0.15 is free of the file
system that holds containers (its default for imagefs.available)."""
_COPY = re.compile(r"[0-9a-f]{64}")
_PART = re.compile(r"-(\d+)\.part$")
_WAIT_SECONDS = 0.05
_MAX_LOCKED_COPIES = 32  # copies that stay locked: a caller opens the path later, maybe more than once
_held: dict[Path, int] = {}  # their descriptors, the most recent last
_lock = threading.Lock()


class CacheBusy(Exception):
    """Another process or thread is writing this copy."""


def local_copy(uri: str, state: FileState, sha256: str) -> Path:
    """Return the copy of a file; download it if this version is not cached."""
    from trainer.storage import objects

    copies, name = CopyCache(), copy_name(uri, state)
    path = copies.folder / name
    descriptor = copies.open(name, state.size)
    if descriptor is not None and sha256:
        try:  # Disks may corrupt data, too.
            check_hash(path, uri, sha256)
        except DamagedError:
            os.close(descriptor)
            copies.drop(name)
            descriptor = None
    if descriptor is None:
        with translate_oserror(str(copies.folder), "write"):
            write = lambda path: objects.copy(uri, path, sha256)  # noqa: E731
            descriptor = copies.add(name, state.size, write, needed=True)
    with _lock:
        if path in _held:
            os.close(_held.pop(path))
        _held[path] = descriptor
        if len(_held) > _MAX_LOCKED_COPIES:
            os.close(_held.pop(next(iter(_held))))
    return path


def copy_name(uri: str, state: FileState) -> str:
    """Return the name of the copy of this version."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", PurePosixPath(urlsplit(uri).path).name)[-80:]
    return f"{hashlib.sha256(f'{uri} {state.version}'.encode()).hexdigest()}-{name}"


class CopyCache:
    """Copies, by default in FOLDER, of at most `limit` (LIMIT) bytes; each name begins with 64 hex digits."""

    def __init__(self, folder: Path | None = None, limit: int | None = None) -> None:
        named, text = os.environ.get(FOLDER), os.environ.get(LIMIT, "").strip()
        self.folder = folder or Path(named or f"{tempfile.gettempdir()}/kubedet-cache-{os.getuid()}")
        self.configured_limit = limit  # in bytes, if one is set
        if limit is None and text:
            try:
                self.configured_limit = int(float(text) * 10**9)
            except (ValueError, OverflowError):
                self.configured_limit = -1
            if self.configured_limit < 0:
                fix = f"set it like {LIMIT}=100"
                raise ConfigError(f"{LIMIT} is {text!r}, not a number of gigabytes", fix=fix)
        if folder or named:
            return
        with suppress(FileNotFoundError):
            # Another user can guess the name and create the folder first, and its content is trusted.
            if self.folder.lstat().st_uid != os.getuid():
                message = f"{self.folder} is the folder for cached files, but belongs to another user"
                raise StorageError(message, fix=f"set {FOLDER} to a folder that only you can write to")

    def open(self, name: str, size: int) -> int | None:
        """Return a descriptor that protects a copy from eviction; None if no copy of this size exists."""
        try:
            descriptor = os.open(self.folder / name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        status = os.fstat(descriptor)
        if status.st_size != size or not status.st_nlink:  # It was evicted before it was locked.
            os.close(descriptor)
            if status.st_nlink:
                self.drop(name)
            return None
        with suppress(OSError):  # Of another user, or on a read-only disk.
            os.utime(descriptor)
        return descriptor

    def add(self, name: str, size: int, write: Callable[[Path], object], *, needed: bool = False) -> int:
        """Write a copy unless it exists, and return a descriptor as `open` does.

        A needed copy waits for another writer, and exceeds the limit if all copies are in use; others raise
        CacheBusy, or OSError for lack of room.
        """
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = self.folder / f"{name}-{size}.part"
        while True:
            with self._lock_room():  # No other process creates, renames or evicts a file meanwhile.
                descriptor = self.open(name, size)
                if descriptor is not None:
                    return descriptor
                writer = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                if _try_lock(writer):
                    if self._make_room(size) or needed:
                        break
                    part.unlink()
                    os.close(writer)
                    raise OSError(
                        errno.ENOSPC, "its limit leaves no room: all is in use, or a file is too large"
                    )
                os.close(writer)
            if not needed:
                raise CacheBusy
            time.sleep(_WAIT_SECONDS)
        try:
            write(part)
            with self._lock_room():
                part.replace(self.folder / name)
                fcntl.flock(writer, fcntl.LOCK_SH)
            return writer
        except BaseException:
            with self._lock_room():
                part.unlink(missing_ok=True)
                os.close(writer)
            raise

    def drop(self, name: str) -> None:
        """Remove a damaged copy; processes that have it open can still read it."""
        with suppress(OSError):
            (self.folder / name).unlink(missing_ok=True)

    def limit(self) -> int:
        """Return the maximum total size of the copies in bytes, for the current disk."""
        if self.configured_limit is not None:
            return self.configured_limit
        disk = shutil.disk_usage(self.folder)
        room = disk.free + sum(size for _, size, _ in self._copies())
        spared = int(_FREE_SHARE_IN_PODS * disk.total) if "KUBERNETES_SERVICE_HOST" in os.environ else 0
        # A node whose disk is that full may evict pods anyway.
        return min(_DEFAULT_LIMIT, room // 2, max(room - spared, room // 10))

    def _copies(self) -> list[tuple[float, int, Path]]:
        """Return last use, size (the final one, if it is being written) and path of all copies, in order."""
        copies = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    if _COPY.match(entry.name) and entry.is_file(follow_symlinks=False):
                        part, state = _PART.search(entry.name), entry.stat()
                        size = int(part[1]) if part else state.st_size
                        copies.append((state.st_mtime, size, Path(entry.path)))
        return sorted(copies)

    def _make_room(self, size: int) -> bool:
        """Evict copies until the new one, which exists and is locked, fits; return whether it does."""
        copies = self._copies()
        disk = shutil.disk_usage(self.folder)
        excess = sum(length for _, length, _ in copies) - self.limit()
        excess = max(excess, size + min(_MIN_FREE_BYTES, disk.total // 20) - disk.free)
        for _, length, path in copies:
            if excess <= 0:
                break
            with suppress(FileNotFoundError):
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                if _try_lock(descriptor):
                    path.unlink(missing_ok=True)
                    excess -= length
                os.close(descriptor)
        return excess <= 0

    @contextmanager
    def _lock_room(self) -> Iterator[None]:
        descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    """Try to lock a file exclusively; return whether it is locked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
