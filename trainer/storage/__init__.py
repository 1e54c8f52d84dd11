"""Bytes behind URIs: local paths, object stores (s3://, minio://, gs://, az://) and, to read, http(s)://.

Whoever writes goes through `write_bytes`, `write_json`, `new_file`, `upload` or `create`: the file
appears whole under its name or not at all. Whoever makes a folder of files writes the one that
says what is in it last. What concerns servers is imported when first used.

    uris.py          names; FileState
    local.py         local files
    objects.py       files on servers: read, written, listed and deleted
    location.py      buckets: where they are and how obstore reaches them; retry_policy.py: for how long
    environment.py   endpoints and keys; clouds.py: those of Google and Azure; hub.py: the Hugging Face hub
    failures.py      what servers refuse, as errors with remedies
    web.py           files of web servers, by a client that connects only where url_policy.py allows it
    cache.py         local copies, in the folder of copies.py
    records.py       our JSON: its hash, version and form
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
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
    "OBJECT_STORES", "WEB", "FileState", "Form", "absolute", "check_place", "climbs", "create", "delete",
    "exists", "forget_copy", "is_local", "join", "list_files", "list_states", "local_copy", "local_path",
    "new_file", "open_reader", "parent", "read_buffer", "read_bytes", "read_json", "read_range",
    "read_within", "remove_stale", "scan", "scheme", "size", "state", "upload", "write_bytes", "write_json",
]  # fmt: skip


def state(uri: str) -> FileState | None:
    """Return size, time of change and ETag of a file, or None if no file is there.

    Raises:
        StorageError: it cannot be reached, or one may not look.
    """
    return _files(uri).state(uri)


def exists(uri: str) -> bool:
    """Tell whether a file (not a folder) is there."""
    return state(uri) is not None


def size(uri: str) -> int:
    """Return a file's size in bytes.

    Raises:
        StorageError: it is missing or cannot be reached.
    """
    file = state(uri)
    if file is None:
        raise missing(uri)
    return file.size


def read_bytes(uri: str, *, sha256: str = "") -> bytes:
    """Return a file's content.

    Args:
        uri: the file; a large one on a server is read in pieces side by side.
        sha256: what its hash must be; "" for what a store tells of it, if anything.

    Raises:
        StorageError: it is missing, cannot be reached, or is another one.
    """
    return bytes(_files(uri).read_buffer(uri, sha256))


def read_buffer(uri: str, *, sha256: str = "") -> memoryview:
    """Return a file's content as `read_bytes` does, but without a copy of it."""
    return memoryview(_files(uri).read_buffer(uri, sha256))


def read_within(uri: str, policy: "UrlPolicy") -> bytes:
    """Return a file's content, by an address from data: it leads only where the policy allows.

    Args:
        uri: the address, or a local path.
        policy: see `trainer.storage.url_policy.UrlPolicy`.

    Raises:
        StorageError: it may not be read, is missing, too large, or cannot be reached.
    """
    policy.check(uri)
    if scheme(uri) not in WEB:
        return read_bytes(uri)
    from trainer.storage import objects, web

    return objects.retry_on_corruption(partial(web.read_within, uri, policy))


def answers(uri: str, seconds: float) -> bool:
    """Tell whether the server of a web address gives any answer; it is asked once.

    Args:
        uri: the address.
        seconds: how long to wait, looking up its name included.
    """
    from trainer.base.daemon_threads import DaemonThreadPool
    from trainer.storage import web

    with DaemonThreadPool(1) as thread:  # Nothing limits the time of looking a name up.
        asked = thread.submit(web.problem_of, uri, uri, seconds, seconds)
        try:
            problem = asked.result(timeout=seconds)
        except TimeoutError:
            return False
        return problem is None or not problem.passing


def read_range(uri: str, start: int, length: int) -> bytes:
    """Return `length` bytes of a file from place `start` on.

    Raises:
        StorageError: it is missing, cannot be reached, or ends before.
    """
    if not length:
        return b""
    data: bytes = _files(uri).read_range(uri, start, length)
    if len(data) != length:
        raise StorageError(
            f"{uri} ends before byte {start + length}",
            fix="it is cut off: run the command that writes it again",
        )
    return data


def open_reader(uri: str, *, ahead: int = 8) -> IO[bytes]:
    """Open a file to read, anywhere in it; of one on a server only a window is in memory.

    Args:
        uri: the file.
        ahead: how many pieces of 4 MiB are fetched ahead while it is read in order.

    Raises:
        StorageError: it is missing or cannot be reached; later too, from the file's methods.
    """
    if is_local(uri):
        with translate_oserror(uri, "read"):
            return local_path(uri).open("rb")
    return _files(uri).open_reader(uri, ahead)


def read_json(uri: str, form: Form | None = None) -> Any:
    """Return the content of a JSON file, checked by the hash that is in it where `write_json` wrote it.

    Raises:
        StorageError: it is missing or cannot be reached; DamagedError: it is not JSON or has changed.
        DataError: it is of another kind, newer version or shape than `form` tells (None takes any JSON).
    """
    for _ in range(0 if is_local(uri) else 3):
        with suppress(DamagedError):  # On its way, perhaps; other programs' copies carry no hash.
            return records.decode(uri, read_bytes(uri), form)
    return records.decode(uri, read_bytes(uri), form)


def write_bytes(uri: str, data: bytes | memoryview, *, sync: bool = True, confirm: bool = False) -> None:
    """Write a file whole or not at all.

    Args:
        uri: the file.
        data: its content.
        sync: whether to wait until a local disk has it.
        confirm: whether to read back what went to a store, and to write it again where it is lost or altered.

    Raises:
        StorageError: it cannot be written (disk full, refused).
    """
    if is_local(uri):
        local.write_bytes(uri, data, sync=sync)
    else:
        _files(uri).write_bytes(uri, data, confirm=confirm)


def write_json(uri: str, obj: Any, *, indent: int | None = None) -> None:
    """Write an object as JSON with its hash as the last key, whole or not at all, and confirmed."""
    write_bytes(uri, records.encode(obj, indent), confirm=True)


def create(uri: str, data: bytes) -> bool:
    """Write a file only if none is there, and tell whether it was written.

    Of several writers one succeeds, on local disks and in stores that know conditional writes
    (`If-None-Match`); in others the last of those that write in the same moment.

    Raises:
        StorageError: it cannot be written.
    """
    return _files(uri).create(uri, data)


@contextmanager
def new_file(
    uri: str, *, sync: bool = True, sha256: Callable[[], str] | None = None, confirm: bool = False
) -> Iterator[Path]:
    """Give a path to write to; what was written becomes the URI's content when the block ends.

    Local files are written beside their final name and renamed; remote ones are written to a
    temporary folder and uploaded. After an exception nothing is left.

    Args:
        uri: the file.
        sync: whether to wait until a local disk has it.
        sha256: tells, when the block has ended, the content's hash, where the writer knows it: what
            goes to a store need not be read for it.
        confirm: see `write_bytes`.

    Raises:
        StorageError: it cannot be written; an OSError inside the block is turned into one.
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
    """Copy a local file to a URI, whole or not at all; the file stays where it is.

    Raises:
        StorageError: the file is missing or the URI cannot be written; `confirm`: see `write_bytes`.
    """
    with translate_oserror(str(source), "read"):
        Path(source).stat()
    if not is_local(uri):
        _files(uri).upload(Path(source), uri, confirm=confirm)
        return
    with new_file(uri) as path, translate_oserror(str(source), "read"):
        shutil.copyfile(source, path)


def local_copy(uri: str, cache_dir: Path | None = None, *, sha256: str = "") -> Path:
    """Return a local file with the URI's content: itself if local, else a cached download.

    Args:
        uri: the file.
        cache_dir: where downloads are kept; a folder of this user under the system's temporary
            folder if None. A changed remote file is downloaded again.
        sha256: what its hash must be; "" for what a store tells of it.

    Raises:
        DamagedError: it is another one.
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

    remote = state(uri)
    if remote is None:
        raise missing(uri)
    return cache.copy(uri, remote, cache_dir, sha256)


def forget_copy(uri: str) -> None:
    """Drop the cached copy of a file on a server that turned out to be damaged: it is fetched again."""
    from trainer.storage import cache

    cache.forget(uri)


def scan(uri: str, *, recursive: bool = True) -> Iterator[tuple[str, FileState]]:
    """Yield the files under a folder by relative name, as they are found; none if it is missing.

    Raises:
        StorageError: it cannot be read, or the scheme cannot list.
    """
    return _files(uri).scan(uri, recursive)


def list_files(uri: str) -> list[str]:
    """Return the names of all files under a folder, relative to it, sorted; none if it is missing."""
    return sorted(name for name, _ in scan(uri))


def list_states(uri: str, *, recursive: bool = False) -> dict[str, FileState]:
    """Return what is known of the files in a folder by relative name; {} if it is missing.

    Raises:
        StorageError: it cannot be read, or the scheme cannot list.
    """
    return dict(scan(uri, recursive=recursive))


def delete(uri: str) -> None:
    """Delete a file; one that is not there is no error.

    Raises:
        StorageError: it cannot be deleted.
    """
    _files(uri).delete(uri)


def remove_stale(uri: str) -> None:
    """Remove what killed writers left under a local folder: those of this machine, others after an hour."""
    if is_local(uri):
        local.remove_stale(uri)


def _files(uri: str) -> Any:
    """Return the module for a URI's files: `local`, or `objects` for those of servers."""
    if is_local(uri):
        return local
    if scheme(uri) in (*OBJECT_STORES, *WEB):
        from trainer.storage import objects

        return objects
    raise StorageError(
        f"unknown scheme {scheme(uri)!r} in {uri}",
        fix="use a path, file:, s3://bucket/key, minio://, gs:// or az:// likewise or, to read, https://",
    )
