"""The local half of `trainer.storage`: files that appear whole under their name or not at all."""

import errno
import hashlib
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from io import BufferedReader
from pathlib import Path

from trainer.base.errors import DamagedError, StorageError
from trainer.base.os_errors import translate_oserror
from trainer.storage.uris import FileState, local_path

_STALE_SECONDS = 3600
_OWNER = re.compile(r"\.(\d+)-([0-9a-f]{8})-[0-9a-f]{8}\.tmp$")
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK)


def state(uri: str) -> FileState | None:
    """Return a file's size and time of change, or None if no file is there."""
    path = local_path(uri)
    with translate_oserror(uri, "read"):
        try:
            status = path.stat()
        except OSError as error:
            if error.errno in _ABSENT:
                return None
            raise
    return _state(status) if stat.S_ISREG(status.st_mode) else None


def open_file(path: Path) -> BufferedReader:
    """Open a regular file to read it: a FIFO would be waited for, and a device has no end.

    Raises:
        StorageError: it is none.
        OSError: it cannot be opened.
    """
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115 (the caller closes it)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise StorageError(f"{path} is not a regular file", fix="put the file there that belongs there")
    return file


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def read_buffer(uri: str, sha256: str) -> bytes:
    """Return a file's content, whose hash must be `sha256` where it is not ""."""
    with translate_oserror(uri, "read"), open_file(local_path(uri)) as file:
        data = file.read()
    digest = sha256 and hashlib.sha256(data).hexdigest()
    if digest != sha256:
        raise damaged(uri, digest, sha256)
    return data


def damaged(uri: str, digest: str, sha256: str) -> DamagedError:
    """Return the error for a file with another hash than it must have."""
    return DamagedError(
        f"{uri} is damaged: its sha256 is {digest}, not {sha256}",
        fix="run the command that writes it again: it is written anew",
    )


_HASHED: dict[tuple[str, int, int, int], str] = {}
"""Of files that this process has hashed: path, inode, size and time of change."""


def check(path: Path, uri: str, sha256: str) -> None:
    """Compare a file with its hash, once for as long as it does not change.

    Raises:
        DamagedError: it is another one.
        StorageError: it cannot be read.
    """
    with translate_oserror(uri, "read"), open_file(path) as file:
        status = os.fstat(file.fileno())
        key = (str(path), status.st_ino, status.st_size, status.st_mtime_ns)
        if key not in _HASHED:
            _HASHED[key] = hashlib.file_digest(file, "sha256").hexdigest()
    if _HASHED[key] != sha256:
        raise damaged(uri, _HASHED[key], sha256)


def read_range(uri: str, start: int, length: int) -> bytes:
    """Return `length` bytes from `start` on, or as many as there are."""
    with translate_oserror(uri, "read"), open_file(local_path(uri)) as file:
        file.seek(start)
        return file.read(length)


@contextmanager
def new_file(uri: str, *, sync: bool = True) -> Iterator[Path]:
    """Give a path beside the final name; what was written there takes the name when the block ends."""
    with _beside(uri) as (temporary, target):
        yield temporary
        if sync:
            _flush_to_disk(temporary)
        temporary.replace(target)


def write_bytes(uri: str, data: bytes | memoryview, *, sync: bool) -> None:
    """Write a file; `new_file` with little around it, for there may be millions."""
    with _beside(uri) as (temporary, target):
        with open(temporary, "wb", buffering=0) as file:
            left = memoryview(data)
            while left:
                left = left[file.write(left) :]
            if sync:
                os.fsync(file.fileno())
        # Only when it is closed does a disk over a network say that it is full.
        os.replace(temporary, target)


def create(uri: str, data: bytes) -> bool:
    """Write a file unless there is one; tell whether it was written."""
    with _beside(uri) as (temporary, target):
        temporary.write_bytes(data)
        _flush_to_disk(temporary)
        try:
            _name(temporary, target)
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
    return True


def scan(uri: str, recursive: bool) -> Iterator[tuple[str, FileState]]:
    """Yield the files in a folder by name relative to it, in no order; none if it is missing."""
    with translate_oserror(uri, "list"):
        folder = local_path(uri)
        if folder.is_dir():
            yield from _walk(folder, "", recursive)


def delete(uri: str) -> None:
    """Delete a file; one that is not there is no error."""
    with translate_oserror(uri, "delete"):
        local_path(uri).unlink(missing_ok=True)


def remove_empty(uri: str) -> None:
    """Remove a folder and those in it, as far as they are empty."""
    folder = local_path(uri)
    for path in [*sorted(folder.rglob("*"), reverse=True), folder]:
        with suppress(OSError):
            path.rmdir()


def remove_stale(uri: str) -> None:
    """Remove what killed writers left under a folder: those of this machine at once, others after an hour."""
    for path in local_path(uri).rglob(".*.tmp"):
        with suppress(OSError):
            if _is_dead(path.name) or time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink()


def _is_dead(name: str) -> bool:
    """Tell whether the name of a temporary file is of a process that ran here, and is gone."""
    owner = _OWNER.search(name)
    if owner is None or owner[2] != _here():
        return False
    try:
        os.kill(int(owner[1]), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False  # It is another user's, and alive.
    return False


@cache
def _here() -> str:
    """Return what stands for where numbers of processes mean what they mean here: start and container."""
    try:
        parts = Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")
    except OSError:
        return "unknown"  # No name has it: all is then left for an hour.
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:8]


@contextmanager
def _beside(uri: str) -> Iterator[tuple[Path, Path]]:
    """Give a temporary name and the final one; after an error nothing is left of the first."""
    target = local_path(uri)
    owner = f"{os.getpid()}-{_here()}-{secrets.token_hex(4)}"
    # Names have 255 bytes at most, and a letter up to four.
    temporary = target.with_name(f".{os.fsdecode(os.fsencode(target.name)[:100])}.{owner}.tmp")
    try:
        with translate_oserror(uri, "write"):
            if not target.parent.is_dir():
                target.parent.mkdir(parents=True, exist_ok=True)
            yield temporary, target
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _name(temporary: Path, target: Path) -> None:
    """Give a file its name unless it is taken, which a rename would not notice."""
    try:
        os.link(temporary, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # The name is taken first, and for a moment it is an empty file's.
        os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        temporary.replace(target)


def _walk(folder: Path, prefix: str, recursive: bool) -> Iterator[tuple[str, FileState]]:
    """Yield the files in a folder, except those that others delete meanwhile."""
    try:
        entries = os.scandir(folder)
    except FileNotFoundError:
        return
    with entries:
        for entry in entries:
            try:
                if entry.is_dir():
                    if recursive and not entry.is_symlink():
                        yield from _walk(folder / entry.name, f"{prefix}{entry.name}/", recursive)
                elif not (entry.name.startswith(".") and entry.name.endswith(".tmp")) and entry.is_file():
                    yield prefix + entry.name, _state(entry.stat())
            except FileNotFoundError:
                continue
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise
                # A link to itself is listed, so that the one who reads it names it.
                yield prefix + entry.name, FileState(0, 0.0, "loop")


def _state(digest: os.stat_result) -> FileState:
    return FileState(digest.st_size, digest.st_mtime, str(digest.st_mtime_ns))


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
