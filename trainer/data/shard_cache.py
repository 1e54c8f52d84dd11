"""Copies of shards on the local disk, shared by the processes of a machine, of a bounded size in all.

<folder>/<sha256>.tar            a whole copy whose hash was right; its time is that of its last use
<folder>/<sha256>-<bytes>.part/  one that is being fetched
<folder>/locks/<2 hex>           held by whoever fetches a shard whose hash begins so
<folder>/locks/room              held by whoever makes room

Whoever reads a copy holds a shared lock on it, and what is locked is not evicted. The locks are
those of flock(2): they end with the process, however it ends.
"""

import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import IO

from trainer import storage
from trainer.errors import ConfigError, StorageError

FOLDER = "KUBEDET_CACHE_DIR"
"""Environment variable: where copies are kept; a folder under the system's temporary one if unset."""

LIMIT = "KUBEDET_CACHE_GB"
"""Environment variable: most gigabytes (10**9 bytes) of copies. 0 keeps none. If unset, half of the free
disk, and 100 at most; in a pod a fifth of the disk is left free besides, see _NODES_SHARE."""

_DEFAULT_LIMIT = 100 * 10**9
_LEFT_FREE = 10**9
_NODES_SHARE = 0.2
"""Of the disk, which a pod has in common with its node: the kubelet evicts pods where less than 0.15 is
free of the file system that holds containers (its default for imagefs.available)."""
_PIECE = 4 * 1024 * 1024
_TIMES = 2
_LOG = logging.getLogger("data")


class Fetched(Enum):
    """What became of a shard that was to be fetched."""

    THERE = "there"
    BUSY = "busy"
    """Another process or thread is fetching it, or one whose hash begins alike."""
    FULL = "full"
    """No room: all copies are in use, or the folder cannot be written."""
    GIVEN_UP = "given up"


class ShardCache:
    """The copies of one folder. Any number of objects, threads and processes may use it."""

    def __init__(self, folder: Path | None = None, limit: int | None = None) -> None:
        """Set the place; nothing is made before something is fetched.

        Args:
            folder: where copies are kept; by default as the environment says, see FOLDER.
            limit: most bytes of all copies; by default as the environment says, see LIMIT.

        Raises:
            ConfigError: the environment's limit is no number.
        """
        self.folder = folder or _default_folder()
        self._asked = _asked_limit() if limit is None else limit
        self._told = False

    def open(self, sha256: str, size: int) -> int | None:
        """Return a descriptor of the copy of a shard, which stays as long as that is open; or None."""
        path = self._path(sha256)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if os.fstat(descriptor).st_size != size:
            os.close(descriptor)
            self.drop(sha256)
            return None
        with suppress(OSError):  # of another user, or a disk that is read-only
            os.utime(descriptor)
        return descriptor

    def fetch(
        self, uri: str, sha256: str, size: int, given_up: Callable[[], bool] = lambda: False
    ) -> Fetched:
        """Copy a shard here, if it is not and there is room.

        Args:
            uri: the shard.
            sha256: its hash.
            size: its bytes.
            given_up: asked now and then whether it is wanted no more.

        Raises:
            StorageError: it cannot be read, or is damaged however often it is read.
        """
        if self._path(sha256).exists():
            return Fetched.THERE
        if self._asked == 0:
            return Fetched.FULL
        try:
            return self._fetch(uri, sha256, size, given_up)
        except OSError as error:  # Of the folder: what the store refuses is a StorageError.
            self._tell(f"cannot be written: {error.strerror}")
            return Fetched.FULL

    def _fetch(self, uri: str, sha256: str, size: int, given_up: Callable[[], bool]) -> Fetched:
        (self.folder / "locks").mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._lock(sha256[:2], wait=False) as held:
            if not held:
                return Fetched.BUSY
            if self._path(sha256).exists():
                return Fetched.THERE
            part = self.folder / f"{sha256}-{size}.part"
            shutil.rmtree(part, ignore_errors=True)  # what was killed has left
            with self._lock("room"):
                if not self._make_room(size):
                    return Fetched.FULL
                part.mkdir()
            try:
                return self._copy(uri, sha256, size, part / "file", given_up)
            finally:
                shutil.rmtree(part, ignore_errors=True)

    def _copy(self, uri: str, sha256: str, size: int, path: Path, given_up: Callable[[], bool]) -> Fetched:
        """Read a shard, a piece after the other: several at a time are for several threads to read.

        Whoever ends need not wait for threads of the storage's own then, whose server may be dead.
        """
        for _ in range(_TIMES):
            digest = hashlib.sha256()
            with path.open("wb", buffering=0) as file:
                for start in range(0, size, _PIECE):
                    if given_up():
                        return Fetched.GIVEN_UP
                    data = storage.read_range(uri, start, min(_PIECE, size - start))
                    digest.update(data)
                    _write(file, data)
            if digest.hexdigest() == sha256:
                path.replace(self._path(sha256))
                return Fetched.THERE
        raise StorageError(
            f"{uri} is damaged: its sha256 is {digest.hexdigest()}, not {sha256}, however often it is read",
            fix="delete it and index.json beside it, and run the shard step again",
        )

    def drop(self, sha256: str) -> None:
        """Remove a copy that turned out to be damaged; whoever has it open may read on."""
        with suppress(OSError):
            self._path(sha256).unlink(missing_ok=True)

    def limit(self) -> int:
        """Most bytes of all copies, as things are now."""
        if self._asked is not None:
            return self._asked
        disk = shutil.disk_usage(self.folder)
        room = disk.free + sum(size for _, size, _ in self._copies())
        spared = int(_NODES_SHARE * disk.total) if "KUBERNETES_SERVICE_HOST" in os.environ else 0
        return max(0, min(_DEFAULT_LIMIT, room // 2, room - spared))

    def _path(self, sha256: str) -> Path:
        return self.folder / f"{sha256}.tar"

    def _copies(self) -> list[tuple[float, int, Path]]:
        """Time of last use, size and path of all copies, the least recently used first."""
        found = []
        for path in self.folder.glob("*.tar"):
            with suppress(FileNotFoundError):
                state = path.stat()
                found.append((state.st_mtime, state.st_size, path))
        return sorted(found)

    def _make_room(self, size: int) -> bool:
        """Evict what was not used for longest until another shard fits; False if all is in use."""
        # In this order: what arrives meanwhile is counted twice rather than not at all.
        coming = sum(map(self._coming, self.folder.glob("*.part")))
        copies = self._copies()
        excess = sum(found for _, found, _ in copies) + coming + size - self.limit()
        disk = shutil.disk_usage(self.folder)
        excess = max(excess, size + min(_LEFT_FREE, disk.total // 20) - disk.free)
        for _, found, path in copies:
            if excess <= 0:
                break
            if _evict(path):
                excess -= found
        if excess > 0:
            self._tell("has no room for more")
        return excess <= 0

    def _tell(self, reason: str) -> None:
        """Say once that this object's shards are not kept: training goes on, but reads more slowly."""
        if self._told:
            return
        self._told = True
        _LOG.warning(
            "the cache of shards in %s %s: images are read from the store one by one instead; %s says where "
            "it is, %s how many gigabytes it may take",
            self.folder, reason, FOLDER, LIMIT,
        )  # fmt: skip

    def _coming(self, part: Path) -> int:
        """Bytes that a shard which is being fetched will take; what was killed is removed."""
        sha256, _, size = part.name.removesuffix(".part").rpartition("-")
        with self._lock(sha256[:2], wait=False) as idle:
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


def _write(file: IO[bytes], data: bytes) -> None:
    """Write all of it: a disk that is nearly full takes a part, and refuses the next."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _locked(descriptor: int, *, wait: bool) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def _evict(path: Path) -> bool:
    """Remove a copy that nobody reads; tell whether it is gone."""
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
    return Path(named) if named else Path(tempfile.gettempdir()) / f"kubedet-cache-{os.getuid()}" / "shards"


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
