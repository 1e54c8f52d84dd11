"""Files behind URIs: local paths, object stores (s3://, minio://, gs://) and, read-only, http(s)://.

Writes are atomic. Local files are handled here; the modules for servers are imported on first use and do not
import this module. All functions may raise StorageError.
"""

import errno
import hashlib
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import IO, Any, TypeVar

from trainer.base import json_files
from trainer.base.errors import DamagedError, StorageError
from trainer.base.json_files import Model
from trainer.base.os_errors import missing_error, translate_oserror
from trainer.base.temporary_folders import is_left_over, temporary_folder, temporary_suffix
from trainer.storage.uris import (
    OBJECT_STORES,
    WEB,
    FileState,
    absolute,
    check_digest,
    check_hash,
    check_uri,
    escapes_folder,
    is_local,
    join,
    local_path,
    open_file,
    parent,
    scheme,
)

__all__ = [
    "OBJECT_STORES", "WEB", "FileState", "absolute", "check_hash", "check_uri", "escapes_folder",
    "is_local", "join", "local_path", "open_file", "parent", "scheme",
]  # fmt: skip
"""Imported from `uris`; the other functions are defined here."""

Content = TypeVar("Content")

_STALE_SECONDS = 3600
_NOT_FOUND_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_NO_HARD_LINK_ERRNOS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK)


def state(uri: str) -> FileState | None:
    """Return size, modification time and ETag of a file, or None if it does not exist."""
    if not is_local(uri):
        found: FileState | None = _remote_module(uri).state(uri)
        return found
    with translate_oserror(uri, "read"):
        try:
            status = local_path(uri).stat()
        except OSError as error:
            if error.errno in _NOT_FOUND_ERRNOS:
                return None
            raise
    return _to_file_state(status) if stat.S_ISREG(status.st_mode) else None


def exists(uri: str) -> bool:
    """Return whether there is a file (not a folder)."""
    return state(uri) is not None


def size(uri: str) -> int:
    """Return a file's size in bytes."""
    if file := state(uri):
        return file.size
    raise missing_error(uri)


def read_bytes(uri: str, *, sha256: str = "") -> bytes:
    """Return a file's content after comparing its hash with `sha256`, by default the store's hash, if any."""
    return bytes(_read_buffer(uri, sha256))


def read_allowed(uri: str) -> bytes:
    """Return the content of a file whose address comes from data; see `trainer.storage.web`."""
    if not is_local(uri):
        from trainer.storage import web

        if scheme(uri) in WEB:
            return web.read_allowed(uri)
        web.check_allowed(uri)
    return read_bytes(uri)


def read_range(uri: str, start: int, length: int) -> bytes:
    """Return `length` bytes of a file from `start` on."""
    if not length:
        return b""
    if is_local(uri):
        with translate_oserror(uri, "read"), open_file(local_path(uri)) as file:
            file.seek(start)
            data = file.read(length)
    else:
        data = _remote_module(uri).read_range(uri, start, length)
    if len(data) != length:
        fix = "run the command that writes this file again"
        raise StorageError(f"{uri} ends before byte {start + length}", fix=fix)
    return data


def open_reader(uri: str) -> IO[bytes]:
    """Open a file for reading and seeking; only a few pieces of a remote file are held in memory."""
    if not is_local(uri):
        reader: IO[bytes] = _remote_module(uri).open_reader(uri)
        return reader
    with translate_oserror(uri, "read"):
        return local_path(uri).open("rb")


def read_json(uri: str) -> Any:
    """Read a JSON file; see `json_files.decode`."""
    return _read_parsed(uri, json_files.decode)


def read_model(uri: str, kind: type[Model], remedy: str) -> Model:
    """Read a JSON file as a pydantic type; see `json_files.parse`."""
    return _read_parsed(uri, lambda uri, data: json_files.parse(kind, uri, data, remedy))


def _read_parsed(uri: str, parse: Callable[[str, bytes], Content]) -> Content:
    """Read and parse a file; read it again if it was damaged during the transfer."""
    for _ in range(0 if is_local(uri) else 3):
        with suppress(DamagedError):
            return parse(uri, read_bytes(uri))
    return parse(uri, read_bytes(uri))


def write_bytes(uri: str, data: bytes | memoryview, *, sync: bool = True, confirm: bool = False) -> None:
    """Write a file atomically.

    `sync` flushes a local file to the disk; `confirm` reads a remote one back, and rewrites it if it differs.
    """
    if not is_local(uri):
        _remote_module(uri).write(uri, BytesIO(data), confirm=confirm)
        return
    with new_file(uri, sync=sync) as path:
        path.write_bytes(data)


def touch(uri: str) -> None:
    """Set a file's modification time to now, so that `kubedet data prune` keeps it as recently used."""
    if is_local(uri):
        with translate_oserror(uri, "write"):
            os.utime(local_path(uri))
    else:
        write_bytes(uri, read_bytes(uri), confirm=True)


def write_json(uri: str, obj: Any, *, indent: int | None = None) -> None:
    """Write an object as JSON with its hash as the last key, and confirm it; see `write_bytes`."""
    write_bytes(uri, json_files.encode(obj, indent), confirm=True)


def create(uri: str, data: bytes) -> bool:
    """Write a file only if it does not exist; return whether it was written.

    Of several concurrent writers, one succeeds. In stores without `If-None-Match`, the last one wins.
    """
    if not is_local(uri):
        return bool(_remote_module(uri).write(uri, BytesIO(data), create=True))
    with _temporary_file(uri) as (temporary, target):
        temporary.write_bytes(data)
        _flush_to_disk(temporary)
        try:
            os.link(temporary, target)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_HARD_LINK_ERRNOS:
                raise
            try:  # Reserve the name first; the file is empty for a moment.
                os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
            except FileExistsError:
                return False
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    return True


@contextmanager
def new_file(
    uri: str, *, sync: bool = True, sha256: Callable[[], str] | None = None, confirm: bool = False
) -> Iterator[Path]:
    """Yield a temporary path; the file is moved to the URI when the block ends without an exception.

    `sha256` is called after the block and returns the content's hash, if the caller knows it. For `sync` and
    `confirm`, see `write_bytes`.
    """
    if is_local(uri):
        with _temporary_file(uri) as (temporary, target):
            yield temporary
            if sync:
                _flush_to_disk(temporary)
            temporary.replace(target)
        return
    with temporary_folder() as folder:
        path = folder / "file"
        with translate_oserror(uri, "write"):
            yield path
        with path.open("rb") as file:
            _remote_module(uri).write(uri, file, sha256=sha256() if sha256 else "", confirm=confirm)


def upload(source: str | Path, uri: str, *, confirm: bool = False) -> None:
    """Copy a local file to a URI atomically; for `confirm`, see `write_bytes`."""
    if not is_local(uri):
        with translate_oserror(str(source), "read"), Path(source).open("rb") as file:
            _remote_module(uri).write(uri, file, confirm=confirm)
        return
    with new_file(uri) as path, translate_oserror(str(source), "read"):
        shutil.copyfile(source, path)


def local_copy(uri: str, *, sha256: str = "") -> Path:
    """Return the path of a local file, or of the cached download of a remote one.

    The content's hash must equal `sha256` or, by default, the store's hash, if any.
    """
    if is_local(uri):
        path = local_path(uri)
        with translate_oserror(uri, "read"):
            path.stat()
        if sha256:
            check_hash(path, uri, sha256)
        return path
    from trainer.storage import cache

    if file := state(uri):
        return cache.local_copy(uri, file, sha256)
    raise missing_error(uri)


def drop_copy(uri: str) -> None:
    """Remove the damaged cached copy of a file."""
    from trainer.storage import cache

    if remote := state(uri):
        cache.CopyCache().drop(cache.copy_name(uri, remote))


def scan(uri: str, *, recursive: bool = True) -> Iterator[tuple[str, FileState]]:
    """Yield the relative names and states of the files under a folder; none if it is missing."""
    if not is_local(uri):
        yield from _remote_module(uri).scan(uri, recursive)
        return
    with translate_oserror(uri, "list"):
        folder = local_path(uri)
        if folder.is_dir():
            yield from _walk(folder, "", recursive)


def list_files(uri: str) -> list[str]:
    """Return the sorted relative names of all files under a folder; [] if it is missing."""
    return sorted(name for name, _ in scan(uri))


def list_states(uri: str, *, recursive: bool = False) -> dict[str, FileState]:
    """Return the states of the files in a folder by relative name; {} if it is missing."""
    return dict(scan(uri, recursive=recursive))


def delete(uri: str) -> None:
    """Delete a file, if it exists."""
    if not is_local(uri):
        _remote_module(uri).delete(uri)
        return
    with translate_oserror(uri, "delete"):
        local_path(uri).unlink(missing_ok=True)


def remove_stale(uri: str) -> None:
    """Remove temporary files of killed writers under a folder; those of other machines after an hour."""
    if not is_local(uri):
        return
    for path in local_path(uri).rglob(".*.tmp"):
        with suppress(OSError):
            if is_left_over(path.name) or time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink()


def check_writable(uri: str) -> None:
    """Write, read and delete a small file in a folder; a local folder is created."""
    probe = join(uri, f".writable-{secrets.token_hex(4)}")
    write_bytes(probe, b"kubedet")
    read_bytes(probe)
    delete(probe)


def _remote_module(uri: str) -> Any:
    """Return the module that handles files on servers."""
    if scheme(uri) not in (*OBJECT_STORES, *WEB):
        raise StorageError(
            f"unknown scheme {scheme(uri)!r} in {uri}",
            fix="use a path, file:, s3://bucket/key, minio:// or gs://; https:// to read",
        )
    from trainer.storage import objects

    return objects


def _read_buffer(uri: str, sha256: str) -> Any:
    """Return a file's content as a buffer."""
    if not is_local(uri):
        return _remote_module(uri).read_buffer(uri, sha256)
    with translate_oserror(uri, "read"), open_file(local_path(uri)) as file:
        data = file.read()
    if sha256:
        check_digest(uri, hashlib.sha256(data).hexdigest(), sha256)
    return data


def _to_file_state(status: os.stat_result) -> FileState:
    return FileState(status.st_size, status.st_mtime, str(status.st_mtime_ns))


@contextmanager
def _temporary_file(uri: str) -> Iterator[tuple[Path, Path]]:
    """Yield a temporary path and the final one; remove the temporary file after an error."""
    target = local_path(uri)
    # A name has at most 255 bytes.
    name = os.fsdecode(os.fsencode(target.name)[:100])
    temporary = target.with_name(f".{name}{temporary_suffix()}")
    try:
        with translate_oserror(uri, "write"):
            target.parent.mkdir(parents=True, exist_ok=True)
            yield temporary, target
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _flush_to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _walk(folder: Path, prefix: str, recursive: bool) -> Iterator[tuple[str, FileState]]:
    """Yield the files in a folder; skip those that are deleted during the scan."""
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            try:
                if entry.is_dir():
                    if recursive and not entry.is_symlink():
                        yield from _walk(folder / entry.name, f"{prefix}{entry.name}/", recursive)
                elif not (entry.name.startswith(".") and entry.name.endswith(".tmp")) and entry.is_file():
                    yield prefix + entry.name, _to_file_state(entry.stat())
            except OSError as error:
                if error.errno not in _NOT_FOUND_ERRNOS:
                    raise
