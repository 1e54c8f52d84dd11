"""A folder of copies on the local disk, shared by the processes of a machine, of a bounded size in all.

<folder>/<64 hex><rest>                a whole copy; its time is that of its last use
<folder>/<64 hex><rest>-<bytes>.part/  one that is being written
<folder>/locks/<2 hex>                 held by whoever writes a copy whose name begins so
<folder>/locks/room                    held by whoever makes room

Whoever uses a copy holds a shared lock on it, and what is locked is not evicted. The locks are
those of flock(2): they end with the process, however it ends.
"""

import errno
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainer.base.errors import ConfigError, StorageError

FOLDER = "KUBEDET_CACHE_DIR"
"""Environment variable: where copies are kept; a folder under the system's temporary one if unset."""

LIMIT = "KUBEDET_CACHE_GB"
"""Environment variable: most gigabytes (10**9 bytes) of copies. If unset, half of the free disk, and 100
at most; in a pod a fifth of the disk is left free besides, see _NODES_SHARE, or a tenth of what is free taken
where less than that is left."""

_DEFAULT_LIMIT = 100 * 10**9
_LEFT_FREE = 10**9
_NODES_SHARE = 0.2
"""Of the disk, which a pod has in common with its node: the kubelet evicts pods where less than 0.15 is
free of the file system that holds containers (its default for imagefs.available)."""
_COPY = re.compile(r"[0-9a-f]{64}")
_PART = ".part"


class Busy(Exception):
    """Another process or thread is writing this copy, or one whose name begins alike."""


class Full(OSError):
    """No room: all copies are in use, or the copy is larger than the limit."""

    def __init__(self) -> None:
        super().__init__(errno.ENOSPC, "its limit leaves no room: all is in use, or a file takes more")


class Copies:
    """The copies in one folder. Any number of objects, threads and processes may use it."""

    def __init__(self, folder: Path | None = None, limit: int | None = None) -> None:
        """Set the place; nothing is made before something is added.

        Args:
            folder: where copies are kept; by default as the environment says, see FOLDER.
            limit: most bytes of all copies; by default as the environment says, see LIMIT.

        Raises:
            ConfigError: the environment's limit is no number.
            StorageError: the default folder was made by another user.
        """
        self.folder = folder or _default_folder()
        self.asked = _asked_limit() if limit is None else limit
        """The limit in bytes, where somebody set one."""

    def path(self, name: str) -> Path:
        """Return where a copy is, or would be."""
        return self.folder / name

    def open(self, name: str, size: int) -> int | None:
        """Return a descriptor of a copy, which stays as long as that is open; or None.

        Args:
            name: 64 hexadecimal digits that stand for the content, and what may follow.
            size: its bytes; a copy of another size is removed.
        """
        try:
            descriptor = os.open(self.path(name), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        status = os.fstat(descriptor)
        if status.st_size != size or not status.st_nlink:  # evicted before it was locked
            os.close(descriptor)
            if status.st_nlink:
                self.drop(name)
            return None
        with suppress(OSError):  # of another user, or a disk that is read-only
            os.utime(descriptor)
        return descriptor

    def add(self, name: str, size: int, write: Callable[[Path], object], *, needed: bool = False) -> int:
        """Make a copy, if there is none, and return a descriptor of it as `open` does.

        Args:
            name: as for `open`.
            size: its bytes.
            write: writes the content to a path, whole, or raises.
            needed: whether the caller cannot do without. It then waits for whoever else is writing
                the copy, and goes above the limit where everything else is in use.

        Raises:
            Busy: another is writing it, and it is not needed.
            OSError: the folder refuses; Full where there is no room, and it is not needed.
        """
        for folder in (self.folder, self.folder / "locks"):  # `parents` would not take the mode
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._lock(name[:2], wait=needed) as held:
            if not held:
                raise Busy
            descriptor = self.open(name, size)
            if descriptor is not None:
                return descriptor
            part = self.folder / f"{name}-{size}{_PART}"
            shutil.rmtree(part, ignore_errors=True)  # what was killed has left
            with self._lock("room"):
                if not self._make_room(size) and not needed:
                    raise Full
                part.mkdir()
            try:
                write(part / "file")
                # Locked before it has its name: nobody evicts it between.
                descriptor = os.open(part / "file", os.O_RDONLY | os.O_CLOEXEC)
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                (part / "file").replace(self.path(name))
                return descriptor
            finally:
                shutil.rmtree(part, ignore_errors=True)

    def drop(self, name: str) -> None:
        """Remove a copy that turned out to be damaged; whoever has it open may read on."""
        with suppress(OSError):
            self.path(name).unlink(missing_ok=True)

    def limit(self) -> int:
        """Most bytes of all copies, as things are now."""
        if self.asked is not None:
            return self.asked
        disk = shutil.disk_usage(self.folder)
        room = disk.free + sum(size for _, size, _ in self._copies())
        spared = int(_NODES_SHARE * disk.total) if "KUBERNETES_SERVICE_HOST" in os.environ else 0
        # A node that is that full may evict pods whatever we do; a little of what is left changes nothing.
        return min(_DEFAULT_LIMIT, room // 2, max(room - spared, room // 10))

    def _copies(self) -> list[tuple[float, int, Path]]:
        """Time of last use, size and path of all copies, the least recently used first."""
        copies = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    if _COPY.match(entry.name) and entry.is_file(follow_symlinks=False):
                        state = entry.stat()
                        copies.append((state.st_mtime, state.st_size, Path(entry.path)))
        return sorted(copies)

    def _make_room(self, size: int) -> bool:
        """Evict what was not used for longest until another copy fits; False if all is in use."""
        # In this order: what arrives meanwhile is counted twice rather than not at all.
        coming = sum(self._coming(path) for path in self.folder.glob(f"*{_PART}") if path.is_dir())
        copies = self._copies()
        excess = sum(length for _, length, _ in copies) + coming + size - self.limit()
        disk = shutil.disk_usage(self.folder)
        excess = max(excess, size + min(_LEFT_FREE, disk.total // 20) - disk.free)
        for _, length, path in copies:
            if excess <= 0:
                break
            if _evict(path):
                excess -= length
        return excess <= 0

    def _coming(self, part: Path) -> int:
        """Bytes that a copy which is being written will take; what was killed is removed."""
        name, _, size = part.name.removesuffix(_PART).rpartition("-")
        if not _COPY.match(name):
            return 0
        with self._lock(name[:2], wait=False) as idle:
            if idle:
                shutil.rmtree(part, ignore_errors=True)
                return 0
        return int(size)

    @contextmanager
    def _lock(self, name: str, *, wait: bool = True) -> Iterator[bool]:
        """Hold a lock of the folder; without `wait`, False where another holds it."""
        descriptor = os.open(self.folder / "locks" / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            yield _locked(descriptor, wait=wait)
        finally:
            os.close(descriptor)


def _locked(descriptor: int, *, wait: bool) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def _evict(path: Path) -> bool:
    """Remove a copy that nobody uses; tell whether it is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        if not _locked(descriptor, wait=False):
            return False
        path.unlink(missing_ok=True)
        return True
    finally:
        os.close(descriptor)


def _default_folder() -> Path:
    named = os.environ.get(FOLDER)
    if named:
        return Path(named)
    folder = Path(tempfile.gettempdir()) / f"kubedet-cache-{os.getuid()}"
    with suppress(FileNotFoundError):
        # Everybody can guess the name and make the folder first, and what is in it is trusted.
        if folder.lstat().st_uid != os.getuid():
            raise StorageError(
                f"{folder} is for copies of files, but belongs to another user",
                fix=f"set {FOLDER} to a folder that only you can write",
            )
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
        raise ConfigError(f"{LIMIT} is {text!r}, not a number of gigabytes", fix=f"set {LIMIT}=100, say")
    return int(limit * 10**9)
