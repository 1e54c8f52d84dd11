"""Bytes behind URIs: local paths, object stores (s3://, minio://, gs://, az://) and, to read, http(s)://.

A file that is written appears whole under its name or not at all. The modules for servers are imported on
first use. Where a function does not say otherwise, its errors are StorageErrors.

    uris.py         names; FileState
    local.py        local files
    objects.py      files on servers, through obstore; location.py: buckets; environment.py: settings
    web.py          files of web servers, by a client that connects only where url_policy.py allows it
    failures.py     refusals of servers as errors with remedies
    cache.py        local copies
    records.py      kubedet's JSON files: hash, version and form
"""

import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from trainer.base.errors import DamagedError, StorageError
from trainer.base.os_errors import missing, translate_oserror
from trainer.base.temporary_folders import temporary_folder
from trainer.storage import local, records
from trainer.storage.records import Form
from trainer.storage.uris import (
    OBJECT_STORES,
    WEB,
    FileState,
    absolute,
    check_place,
    climbs,
    is_local,
    join,
    local_path,
    parent,
    scheme,
)

if TYPE_CHECKING:
    from trainer.storage.url_policy import UrlPolicy

__all__ = [
    "OBJECT_STORES", "WEB", "FileState", "Form", "absolute", "check_place", "check_writable", "climbs",
    "create", "delete", "exists", "forget_copy", "is_local", "join", "list_files", "list_states",
    "local_copy", "local_path", "new_file", "open_reader", "parent", "read_buffer", "read_bytes", "read_json",
    "read_range", "read_within", "remove_stale", "scan", "scheme", "size", "state", "upload", "write_bytes",
    "write_json",
]  # fmt: skip


def state(uri: str) -> FileState | None:
    """Return size, modification time and ETag of a file, or None if there is no file."""
    return _files(uri).state(uri)


def exists(uri: str) -> bool:
    """Return whether there is a file (not a folder)."""
    return state(uri) is not None


def size(uri: str) -> int:
    """Return a file's size in bytes."""
    return _existing(uri).size


def read_bytes(uri: str, *, sha256: str = "") -> bytes:
    """Return a file's content.

    Its hash must be `sha256`, or, without one, the hash that the store has, if any.

    Raises:
        StorageError: it is missing, cannot be reached, or its hash differs.
    """
    return bytes(_files(uri).read_buffer(uri, sha256))


def read_buffer(uri: str, *, sha256: str = "") -> memoryview:
    """Return a file's content as `read_bytes` does, without copying it."""
    return memoryview(_files(uri).read_buffer(uri, sha256))


def read_within(uri: str, policy: "UrlPolicy") -> bytes:
    """Return the content of a file whose address comes from data.

    Raises:
        StorageError: the policy refuses the address; the file is missing, too large or cannot be reached.
    """
    policy.check(uri)
    if scheme(uri) not in WEB:
        return read_bytes(uri)
    from trainer.storage import objects, web

    return objects.retry_on_corruption(partial(web.read_within, uri, policy))


def answers(uri: str, seconds: float) -> bool:
    """Return whether the server of a web address gives any answer within some seconds; it is asked once."""
    from trainer.base.daemon_threads import DaemonThreadPool
    from trainer.storage import web

    with DaemonThreadPool(1) as thread:  # A name lookup has no timeout.
        try:
            problem = thread.submit(web.problem_of, uri, uri, seconds, seconds).result(timeout=seconds)
        except TimeoutError:
            return False
        return problem is None or not problem.passing


def read_range(uri: str, start: int, length: int) -> bytes:
    """Return `length` bytes of a file from `start` on.

    Raises:
        StorageError: it is missing, cannot be reached, or is shorter.
    """
    data: bytes = _files(uri).read_range(uri, start, length) if length else b""
    if len(data) != length:
        fix = "it is truncated: run the command that writes it again"
        raise StorageError(f"{uri} ends before byte {start + length}", fix=fix)
    return data


def open_reader(uri: str, *, ahead: int = 8) -> IO[bytes]:
    """Open a file for reading, with seek; its methods raise StorageErrors too.

    Only pieces of 4 MiB of a file on a server are in memory: `ahead` of them are fetched ahead.
    """
    if is_local(uri):
        with translate_oserror(uri, "read"):
            return local_path(uri).open("rb")
    return _files(uri).open_reader(uri, ahead)


def read_json(uri: str, form: Form | None = None) -> Any:
    """Return the content of a JSON file, checked by its own hash if it has one.

    Raises:
        StorageError: it is missing or cannot be reached; DamagedError: it is not JSON or its hash differs.
        DataError: it does not have the `form`, or a newer version of it.
    """
    for _ in range(0 if is_local(uri) else 3):
        with suppress(DamagedError):  # Damaged during the transfer, perhaps.
            return records.decode(uri, read_bytes(uri), form)
    return records.decode(uri, read_bytes(uri), form)


def write_bytes(uri: str, data: bytes | memoryview, *, sync: bool = True, confirm: bool = False) -> None:
    """Write a file whole or not at all.

    `sync` waits until a local disk has stored it; `confirm` reads back what a store got, and writes it again
    if it differs.
    """
    if is_local(uri):
        local.write_bytes(uri, data, sync=sync)
    else:
        _files(uri).write_bytes(uri, data, confirm=confirm)


def write_json(uri: str, obj: Any, *, indent: int | None = None) -> None:
    """Write an object as JSON with its hash as the last key, whole or not at all, and confirmed."""
    write_bytes(uri, records.encode(obj, indent), confirm=True)


def create(uri: str, data: bytes) -> bool:
    """Write a file only if there is none; return whether it was written.

    Of several writers one succeeds; in stores without conditional writes (`If-None-Match`), the last one.
    """
    return _files(uri).create(uri, data)


@contextmanager
def new_file(
    uri: str, *, sync: bool = True, sha256: Callable[[], str] | None = None, confirm: bool = False
) -> Iterator[Path]:
    """Give a temporary path; its content becomes that of the URI when the block ends without an exception.

    `sha256` returns the content's hash after the block, if the caller knows it; the rest: see `write_bytes`.

    Raises:
        StorageError: it cannot be written; also for an OSError inside the block.
    """
    if is_local(uri):
        with local.new_file(uri, sync=sync) as path:
            yield path
        return
    with temporary_folder() as folder:
        path = folder / "file"
        with translate_oserror(uri, "write"):
            yield path
        _files(uri).upload(path, uri, sha256() if sha256 else "", confirm=confirm)


def upload(source: str | Path, uri: str, *, confirm: bool = False) -> None:
    """Copy a local file to a URI, whole or not at all; `confirm`: see `write_bytes`."""
    with translate_oserror(str(source), "read"):
        Path(source).stat()
    if not is_local(uri):
        _files(uri).upload(Path(source), uri, confirm=confirm)
        return
    with new_file(uri) as path, translate_oserror(str(source), "read"):
        shutil.copyfile(source, path)


def local_copy(uri: str, cache_dir: Path | None = None, *, sha256: str = "") -> Path:
    """Return a local file with the URI's content: itself if local, else a cached download.

    Its hash must be `sha256`, or, without one, the hash that the store has, if any. A file that changed on
    the server is downloaded again. `cache_dir` is used instead of the cache of all processes.

    Raises:
        DamagedError: its hash differs.
        StorageError: the file is missing or cannot be reached, or the copy cannot be written.
    """
    if is_local(uri):
        path = local_path(uri)
        with translate_oserror(uri, "read"):
            path.stat()
        if sha256:
            local.check(path, uri, sha256)
        return path
    from trainer.storage import cache

    return cache.local_copy(uri, _existing(uri), cache_dir, sha256)


def forget_copy(uri: str) -> None:
    """Remove the cached copy of a file, because it is damaged."""
    from trainer.storage import cache

    if remote := state(uri):
        cache.forget(uri, remote)


def scan(uri: str, *, recursive: bool = True) -> Iterator[tuple[str, FileState]]:
    """Yield the files under a folder by relative name, as they are found; none if it is missing."""
    return _files(uri).scan(uri, recursive)


def list_files(uri: str) -> list[str]:
    """Return the sorted relative names of all files under a folder; none if it is missing."""
    return sorted(name for name, _ in scan(uri))


def list_states(uri: str, *, recursive: bool = False) -> dict[str, FileState]:
    """Return the states of the files in a folder by relative name; {} if it is missing."""
    return dict(scan(uri, recursive=recursive))


def delete(uri: str) -> None:
    """Delete a file, if it exists."""
    _files(uri).delete(uri)


def remove_stale(uri: str) -> None:
    """Remove temporary files of killed writers under a local folder; of other machines after an hour."""
    if is_local(uri):
        local.remove_stale(uri)


def check_writable(uri: str) -> None:
    """Write a small file into a folder, which is created if it is local, read it and delete it."""
    probe = join(uri, f".writable-{secrets.token_hex(4)}")
    write_bytes(probe, b"kubedet")
    read_bytes(probe)
    delete(probe)


def _existing(uri: str) -> FileState:
    file = state(uri)
    if file is None:
        raise missing(uri)
    return file


def _files(uri: str) -> Any:
    """Return the module for a URI's files: `local`, or `objects` for files on servers."""
    kind = scheme(uri)
    if kind in ("", "file"):
        return local
    if kind in OBJECT_STORES or kind in WEB:
        return _objects()
    raise StorageError(
        f"unknown scheme {kind!r} in {uri}",
        fix="use a path, file:, s3://bucket/key, minio://, gs:// or az:// likewise or, to read, https://",
    )


@lru_cache
def _objects() -> Any:
    from trainer.storage import objects

    return objects
