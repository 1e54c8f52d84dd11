"""Local files of `trainer.storage`: they appear whole under their name or not at all."""

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
    """Return a file's size and modification time, or None if there is no file."""
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
    """Open a regular file for reading; a FIFO or device would never end."""
    opener = lambda name, flags: os.open(name, flags | os.O_NONBLOCK)  # noqa: E731
    file = open(path, "rb", opener=opener)  # noqa: SIM115 (the caller closes it)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise StorageError(f"{path} is not a regular file", fix="replace it by the file that belongs there")
    return file


def read_buffer(uri: str, sha256: str) -> bytes:
    """Return a file's content; its hash must be `sha256` unless that is ""."""
    with translate_oserror(uri, "read"), open_file(local_path(uri)) as file:
        data = file.read()
    if sha256:
        _compare(uri, hashlib.sha256(data).hexdigest(), sha256)
    return data


_hashes: dict[tuple[str, int, int, int], str] = {}
"""Of files that this process has hashed, by path, inode, size and modification time."""


def check(path: Path, uri: str, sha256: str) -> None:
    """Compare a file with its hash; it is hashed again only if it changes."""
    with translate_oserror(uri, "read"), open_file(path) as file:
        status = os.fstat(file.fileno())
        key = (str(path), status.st_ino, status.st_size, status.st_mtime_ns)
        if key not in _hashes:
            _hashes[key] = hashlib.file_digest(file, "sha256").hexdigest()
    _compare(uri, _hashes[key], sha256)


def _compare(uri: str, digest: str, expected: str) -> None:
    if digest != expected:
        raise DamagedError(
            f"{uri} is damaged: its sha256 is {digest}, not {expected}",
            fix="run the command that writes it again",
        )


def read_range(uri: str, start: int, length: int) -> bytes:
    """Return `length` bytes from `start` on, or as many as there are."""
    with translate_oserror(uri, "read"), open_file(local_path(uri)) as file:
        file.seek(start)
        return file.read(length)


@contextmanager
def new_file(uri: str, *, sync: bool = True) -> Iterator[Path]:
    """Give a temporary path; the file there gets its final name when the block ends."""
    with _temporary(uri) as (temporary, target):
        yield temporary
        if sync:
            _flush_to_disk(temporary)
        temporary.replace(target)


def write_bytes(uri: str, data: bytes | memoryview, *, sync: bool) -> None:
    """Write a file."""
    with new_file(uri, sync=sync) as path:
        path.write_bytes(data)


def create(uri: str, data: bytes) -> bool:
    """Write a file unless it exists; return whether it was written."""
    with _temporary(uri) as (temporary, target):
        temporary.write_bytes(data)
        _flush_to_disk(temporary)
        try:
            os.link(temporary, target)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            try:  # Take the name first; for a moment the file is empty.
                os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
            except FileExistsError:
                return False
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    return True


def scan(uri: str, recursive: bool) -> Iterator[tuple[str, FileState]]:
    """Yield the files in a folder by relative name, unordered; none if it is missing."""
    with translate_oserror(uri, "list"):
        folder = local_path(uri)
        if folder.is_dir():
            yield from _walk(folder, "", recursive)


def delete(uri: str) -> None:
    """Delete a file, if it exists."""
    with translate_oserror(uri, "delete"):
        local_path(uri).unlink(missing_ok=True)


def remove_empty(uri: str) -> None:
    """Remove a folder and its subfolders, if they are empty."""
    folder = local_path(uri)
    for path in [*sorted(folder.rglob("*"), reverse=True), folder]:
        with suppress(OSError):
            path.rmdir()


def remove_stale(uri: str) -> None:
    """Remove temporary files of dead processes under a folder; those of other machines after an hour."""
    for path in local_path(uri).rglob(".*.tmp"):
        with suppress(OSError):
            if _is_dead(path.name) or time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink()


def _is_dead(name: str) -> bool:
    """Return whether a temporary file belongs to a process that ran here and has ended."""
    owner = _OWNER.search(name)
    if owner is None or owner[2] != _host():
        return False
    try:
        os.kill(int(owner[1]), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass  # It runs as another user.
    return False


@cache
def _host() -> str:
    """Return a name of the boot and the container, within which process ids are unique."""
    try:
        parts = Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")
    except OSError:
        return "unknown"  # Matches no name: temporary files stay for an hour.
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:8]


@contextmanager
def _temporary(uri: str) -> Iterator[tuple[Path, Path]]:
    """Give a temporary path and the final one; after an error the temporary file is removed."""
    target = local_path(uri)
    owner = f"{os.getpid()}-{_host()}-{secrets.token_hex(4)}"
    # A name has at most 255 bytes.
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


def _walk(folder: Path, prefix: str, recursive: bool) -> Iterator[tuple[str, FileState]]:
    """Yield the files in a folder, except those that are deleted meanwhile."""
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            try:
                if entry.is_dir():
                    if recursive and not entry.is_symlink():
                        yield from _walk(folder / entry.name, f"{prefix}{entry.name}/", recursive)
                elif not (entry.name.startswith(".") and entry.name.endswith(".tmp")) and entry.is_file():
                    yield prefix + entry.name, _state(entry.stat())
            except OSError as error:
                if error.errno not in _ABSENT:
                    raise


def _state(status: os.stat_result) -> FileState:
    return FileState(status.st_size, status.st_mtime, str(status.st_mtime_ns))


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
