"""Local copies of files on servers, in a folder of bounded size that all processes of a machine share.

<folder>/<64 hex><rest>                a complete copy; its time is its last use
<folder>/<64 hex><rest>-<bytes>.part/  a copy that is being written
<folder>/locks/<2 hex>                 locked while a copy whose name starts so is written
<folder>/locks/room                    locked while space is freed

Users of a copy hold a shared flock(2) on it, and locked copies are not evicted. These locks end with the
process.
"""

import errno
import fcntl
import hashlib
import os
import re
import shutil
import sys
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from trainer.base.errors import ConfigError, DamagedError, StorageError
from trainer.base.os_errors import translate_oserror
from trainer.storage import local
from trainer.storage.uris import FileState

FOLDER = "KUBEDET_CACHE_DIR"
"""Environment variable: the folder; by default one under the system's temporary folder."""

LIMIT = "KUBEDET_CACHE_GB"
"""Environment variable: most gigabytes (10**9 bytes) of copies. By default half of the free disk and at most
100. In a pod a fifth of the disk also stays free, see _NODES_SHARE; on a fuller disk, a tenth of the rest is
used."""

_DEFAULT_LIMIT = 100 * 10**9
_LEFT_FREE = 10**9
_NODES_SHARE = 0.2
"""Of the disk that a pod shares with its node: the kubelet evicts pods if less than 0.15 is free of the file
system that holds containers (its default for imagefs.available)."""
_COPY = re.compile(r"[0-9a-f]{64}")
_PART = ".part"

_IN_USE = 32
"""Copies that stay locked by this process: a caller opens the path later, maybe more than once."""
_lock = threading.Lock()
_held: OrderedDict[Path, int] = OrderedDict()
"""Their descriptors, the most recent last."""


class Busy(Exception):
    """Another process or thread writes this copy, or one whose name starts alike."""


class Full(OSError):
    """There is no room: all copies are in use, or the copy is larger than the limit."""

    def __init__(self) -> None:
        super().__init__(errno.ENOSPC, "its limit leaves no room: all is in use, or a file takes more")


def local_copy(uri: str, state: FileState, folder: Path | None, sha256: str) -> Path:
    """Return the copy of a file; download it if there is none of this version.

    Args:
        uri: the file.
        state: its current state.
        folder: the caller's folder, which has no limit; None for the shared one, where the least recently
            used copies make room, but none that this process got lately.
        sha256: what the hash must be; "" for the hash that the store has, if any.

    Raises:
        StorageError: the file cannot be read, or the copy cannot be written.
    """
    from trainer.storage import objects

    copies = Copies(folder, None if folder is None else sys.maxsize)
    name = _name(uri, state)
    path = copies.path(name)
    descriptor = copies.open(name, state.size)
    if descriptor is not None and sha256:
        try:  # Disks alter bytes, too.
            local.check(path, uri, sha256)
        except DamagedError:
            os.close(descriptor)
            copies.drop(name)
            descriptor = None
    if descriptor is None:
        with translate_oserror(str(copies.folder), "write"):
            write = lambda path: objects.copy(uri, path, sha256)  # noqa: E731
            descriptor = copies.add(name, state.size, write, needed=True)
    if folder is not None:
        os.close(descriptor)
        return path
    with _lock:
        before = _held.pop(path, None)
        if before is not None:
            os.close(before)
        _held[path] = descriptor
        if len(_held) > _IN_USE:
            os.close(_held.popitem(last=False)[1])
    return path


def forget(uri: str, state: FileState) -> None:
    """Remove the shared copy of a file, because it is damaged."""
    Copies().drop(_name(uri, state))


def _name(uri: str, state: FileState) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]", "_", PurePosixPath(urlsplit(uri).path).name)[-80:]
    return f"{hashlib.sha256(f'{uri} {state.version}'.encode()).hexdigest()}-{name}"


class Copies:
    """The copies in one folder, which any number of threads and processes may use.

    Args:
        folder: where copies are kept; by default see FOLDER. It is created when a copy is added.
        limit: most bytes of all copies; by default see LIMIT.

    Raises:
        ConfigError: the environment's limit is not a number.
        StorageError: the default folder belongs to another user.
    """

    def __init__(self, folder: Path | None = None, limit: int | None = None) -> None:
        self.folder = folder or _default_folder()
        self.asked = _asked_limit() if limit is None else limit
        """The limit in bytes, if one is set."""

    def path(self, name: str) -> Path:
        """Return the path of a copy, which need not exist."""
        return self.folder / name

    def open(self, name: str, size: int) -> int | None:
        """Return a descriptor that keeps a copy from being evicted; None if there is no copy.

        Args:
            name: 64 hexadecimal digits that identify the content, and any suffix.
            size: its bytes; a copy of another size is removed.
        """
        try:
            descriptor = os.open(self.path(name), os.O_RDONLY | os.O_CLOEXEC)
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
        """Write a copy, unless there is one, and return a descriptor as `open` does.

        Args:
            name: as for `open`.
            size: its bytes.
            write: writes the whole content to a path, or raises.
            needed: wait for another writer of the copy, and exceed the limit if all copies are in use.

        Raises:
            Busy: another process writes it, and it is not needed.
            OSError: the folder cannot be written; Full if there is no room, and it is not needed.
        """
        for folder in (self.folder, self.folder / "locks"):  # `parents` would ignore the mode.
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._locked(name[:2], wait=needed) as is_locked:
            if not is_locked:
                raise Busy
            descriptor = self.open(name, size)
            if descriptor is not None:
                return descriptor
            part = self.folder / f"{name}-{size}{_PART}"
            shutil.rmtree(part, ignore_errors=True)  # From a killed process.
            with self._locked("room"):
                if not self._make_room(size) and not needed:
                    raise Full
                part.mkdir()
            try:
                write(part / "file")
                # Locked before it has its name, so that it cannot be evicted in between.
                descriptor = os.open(part / "file", os.O_RDONLY | os.O_CLOEXEC)
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                (part / "file").replace(self.path(name))
                return descriptor
            finally:
                shutil.rmtree(part, ignore_errors=True)

    def drop(self, name: str) -> None:
        """Remove a damaged copy; processes that have it open can read on."""
        with suppress(OSError):
            self.path(name).unlink(missing_ok=True)

    def limit(self) -> int:
        """Return the most bytes of all copies, for the current disk."""
        if self.asked is not None:
            return self.asked
        disk = shutil.disk_usage(self.folder)
        room = disk.free + sum(size for _, size, _ in self._copies())
        spared = int(_NODES_SHARE * disk.total) if "KUBERNETES_SERVICE_HOST" in os.environ else 0
        # A node whose disk is that full may evict pods anyway.
        return min(_DEFAULT_LIMIT, room // 2, max(room - spared, room // 10))

    def _copies(self) -> list[tuple[float, int, Path]]:
        """Return time of last use, size and path of all copies, the least recently used first."""
        copies = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    if _COPY.match(entry.name) and entry.is_file(follow_symlinks=False):
                        state = entry.stat()
                        copies.append((state.st_mtime, state.st_size, Path(entry.path)))
        return sorted(copies)

    def _make_room(self, size: int) -> bool:
        """Evict the least recently used copies until another one fits; return whether it does."""
        # In this order, a copy that is finished meanwhile is counted twice rather than not at all.
        coming = sum(self._coming(path) for path in self.folder.glob(f"*{_PART}") if path.is_dir())
        copies = self._copies()
        excess = sum(length for _, length, _ in copies) + coming + size - self.limit()
        disk = shutil.disk_usage(self.folder)
        excess = max(excess, size + min(_LEFT_FREE, disk.total // 20) - disk.free)
        for _, length, path in copies:
            if excess <= 0:
                break
            with suppress(FileNotFoundError, BlockingIOError):
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # Fails if it is in use.
                    path.unlink(missing_ok=True)
                    excess -= length
                finally:
                    os.close(descriptor)
        return excess <= 0

    def _coming(self, part: Path) -> int:
        """Return the size of a copy that is being written; remove it if its writer was killed."""
        name, _, size = part.name.removesuffix(_PART).rpartition("-")
        if not _COPY.match(name):
            return 0
        with self._locked(name[:2], wait=False) as has_no_writer:
            if has_no_writer:
                shutil.rmtree(part, ignore_errors=True)
                return 0
        return int(size)

    @contextmanager
    def _locked(self, name: str, *, wait: bool = True) -> Iterator[bool]:
        """Hold a lock of the folder; without `wait`, give False if it is taken."""
        descriptor = os.open(self.folder / "locks" / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            is_locked = True
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                is_locked = False
            yield is_locked
        finally:
            os.close(descriptor)


def _default_folder() -> Path:
    named = os.environ.get(FOLDER)
    if named:
        return Path(named)
    folder = Path(tempfile.gettempdir()) / f"kubedet-cache-{os.getuid()}"
    with suppress(FileNotFoundError):
        # Another user can guess the name and create the folder first, and its content is trusted.
        if folder.lstat().st_uid != os.getuid():
            fix = f"set {FOLDER} to a folder that only you can write"
            raise StorageError(f"{folder} is for copies of files, but belongs to another user", fix=fix)
    return folder


def _asked_limit() -> int | None:
    text = os.environ.get(LIMIT, "").strip()
    if not text:
        return None
    try:
        limit = float(text)
    except ValueError:
        limit = -1.0
    if not 0 <= limit < float("inf"):
        raise ConfigError(f"{LIMIT} is {text!r}, not a number of gigabytes", fix=f"set it like {LIMIT}=100")
    return int(limit * 10**9)
