"""Local copies of files on servers, in a folder of bounded size that all processes of a machine share.

<folder>/<64 hex><rest>                a complete copy; its modification time is the time of last use
<folder>/<64 hex><rest>-<bytes>.part   a copy that is being written
<folder>/lock                          locked while copies are added or evicted

A copy is locked with flock(2) while it is written or used, and locked copies are not evicted. The kernel
releases the locks of a process that ends.
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

FOLDER_VARIABLE = "KUBEDET_CACHE_DIR"  # the cache folder; by default in the temporary folder

LIMIT_VARIABLE = "KUBEDET_CACHE_GB"
"""Environment variable: maximum gigabytes (10**9 bytes) of copies. The default is half of the free disk
space, at most 100. In a pod a fifth of the disk also stays free (see _FREE_SHARE_IN_PODS); if less is free
already, a tenth of the free space is used."""

_DEFAULT_LIMIT = 100 * 10**9
_MIN_FREE_BYTES = 10**9
_FREE_SHARE_IN_PODS = 0.2
"""The kubelet evicts pods if less than 0.15 of the node's disk for containers is free (the default of
imagefs.available)."""
_COPY = re.compile(r"[0-9a-f]{64}")
_PART = re.compile(r"-(\d+)\.part$")
_WAIT_SECONDS = 0.05
_MAX_LOCKED_COPIES = 32  # most copies that stay locked, because a caller may open their paths later
_locked_copies: dict[Path, int] = {}  # descriptors by path, the most recently used last
_lock = threading.Lock()


class CacheBusy(Exception):
    """Another process or thread is writing the copy."""


def local_copy(uri: str, state: FileState, sha256: str) -> Path:
    """Return the copy of a file; download it if this version is not cached."""
    from trainer.storage import objects

    copies, name = CopyCache(), copy_name(uri, state)
    path = copies.folder / name
    descriptor = copies.open(name, state.size)
    if descriptor is not None and sha256:
        try:  # Disks may corrupt data.
            check_hash(path, uri, sha256)
        except DamagedError:
            os.close(descriptor)
            copies.drop(name)
            descriptor = None
    if descriptor is None:
        with translate_oserror(str(copies.folder), "write"):
            write = lambda path: objects.download(uri, path, sha256)  # noqa: E731
            descriptor = copies.add(name, state.size, write, needed=True)
    with _lock:
        if path in _locked_copies:
            os.close(_locked_copies.pop(path))
        _locked_copies[path] = descriptor
        if len(_locked_copies) > _MAX_LOCKED_COPIES:
            os.close(_locked_copies.pop(next(iter(_locked_copies))))
    return path


def copy_name(uri: str, state: FileState) -> str:
    """Return the name of the cached copy of a version of a file."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", PurePosixPath(urlsplit(uri).path).name)[-80:]
    return f"{hashlib.sha256(f'{uri} {state.version}'.encode()).hexdigest()}-{name}"


class CopyCache:
    """Copies in a folder, of at most `limit` bytes; each name begins with 64 hex digits."""

    def __init__(self, folder: Path | None = None, limit: int | None = None) -> None:
        named, text = os.environ.get(FOLDER_VARIABLE), os.environ.get(LIMIT_VARIABLE, "").strip()
        self.folder = folder or Path(named or f"{tempfile.gettempdir()}/kubedet-cache-{os.getuid()}")
        self.configured_limit = limit  # in bytes; None for the default
        if limit is None and text:
            try:
                self.configured_limit = int(float(text) * 10**9)
            except (ValueError, OverflowError):
                self.configured_limit = -1
            if self.configured_limit < 0:
                fix = f"set it like {LIMIT_VARIABLE}=100"
                raise ConfigError(f"{LIMIT_VARIABLE} is {text!r}, not a number of gigabytes", fix=fix)
        if folder or named:
            return
        with suppress(FileNotFoundError):
            # The content is trusted, and another user could have created the folder first.
            if self.folder.lstat().st_uid != os.getuid():
                message = f"{self.folder} is the folder for cached files, but belongs to another user"
                raise StorageError(message, fix=f"set {FOLDER_VARIABLE} to a folder only you can write to")

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
        with suppress(OSError):  # The copy may belong to another user, or the disk may be read-only.
            os.utime(descriptor)
        return descriptor

    def add(self, name: str, size: int, write: Callable[[Path], object], *, needed: bool = False) -> int:
        """Write a copy unless it exists, and return a descriptor as `open` does.

        If the copy is `needed`, wait for other writers, and exceed the limit if all copies are in use.
        Otherwise raise CacheBusy, or OSError if there is no room.
        """
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = self.folder / f"{name}-{size}.part"
        while True:
            with self._lock_folder():  # No other process creates, renames or evicts a file meanwhile.
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
                        errno.ENOSPC, "the limit is reached: all copies are in use, or a file is too large"
                    )
                os.close(writer)
            if not needed:
                raise CacheBusy
            time.sleep(_WAIT_SECONDS)
        try:
            write(part)
            with self._lock_folder():
                part.replace(self.folder / name)
                fcntl.flock(writer, fcntl.LOCK_SH)
            return writer
        except BaseException:
            with self._lock_folder():
                part.unlink(missing_ok=True)
                os.close(writer)
            raise

    def drop(self, name: str) -> None:
        """Remove a damaged copy; processes that have opened it can still read it."""
        with suppress(OSError):
            (self.folder / name).unlink(missing_ok=True)

    def limit(self) -> int:
        """Return the maximum total size of the copies in bytes, for the current disk."""
        if self.configured_limit is not None:
            return self.configured_limit
        disk = shutil.disk_usage(self.folder)
        room = disk.free + sum(size for _, size, _ in self._copies())
        spared = int(_FREE_SHARE_IN_PODS * disk.total) if "KUBERNETES_SERVICE_HOST" in os.environ else 0
        # If less than the spared space is free, the node may evict pods anyway.
        return min(_DEFAULT_LIMIT, room // 2, max(room - spared, room // 10))

    def _copies(self) -> list[tuple[float, int, Path]]:
        """Return the last use, (final) size and path of all copies, the least recently used first."""
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
        """Evict copies until one of `size` bytes fits; return whether it does."""
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
    def _lock_folder(self) -> Iterator[None]:
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
