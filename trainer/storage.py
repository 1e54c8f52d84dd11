"""Bytes behind URIs: local paths, object stores (s3://, minio://) and, to read, http(s)://.

Whoever writes goes through `write_bytes`, `write_json`, `new_file` or `upload`: the file
appears whole under its name or not at all. The remote backends are imported when first used.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from trainer.errors import StorageError
from trainer.os_errors import explained, missing

OBJECT_STORES = ("s3", "minio")
WEB = ("http", "https")

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*):")
_STALE_SECONDS = 3600


class FileState(NamedTuple):
    """What is known of a file without reading it."""

    size: int
    """Bytes."""
    version: str
    """Changes when the content does: the time of change, or the store's ETag."""


def scheme(uri: str) -> str:
    """Return the URI's scheme in lower case; "" for a plain path, "file" for file: URIs."""
    match = _SCHEME.match(uri)
    return match.group(1).lower() if match else ""


def is_local(uri: str) -> bool:
    """Tell whether the URI is a path on this machine (plain or file:)."""
    return scheme(uri) in ("", "file")


def local_path(uri: str) -> Path:
    """Return the absolute path of a local URI, without following links."""
    text = unquote(urlsplit(uri).path) if scheme(uri) == "file" else uri
    return Path(os.path.abspath(text))


def absolute(uri: str) -> str:
    """Return one spelling of the URI: a local one as an absolute path, others without a last slash."""
    return str(local_path(uri)) if is_local(uri) else uri.rstrip("/")


def join(uri: str, *parts: str) -> str:
    """Append names to a URI.

    Raises:
        StorageError: a part is absolute or contains `..`: names must not climb out of a folder.
    """
    for part in parts:
        pieces = PurePosixPath(part.replace("\\", "/")).parts
        if not pieces or part.startswith(("/", "\\")) or ".." in pieces or "\0" in part:
            raise StorageError(f"refused name {part!r} under {uri}", fix="use a relative name without '..'")
    return "/".join([uri.rstrip("/"), *parts])


def parent(uri: str) -> str:
    """Return the folder that holds the URI's file."""
    return os.path.dirname(absolute(uri)) if is_local(uri) else uri.rstrip("/").rpartition("/")[0]


def exists(uri: str) -> bool:
    """Tell whether a file (not a folder) is there."""
    return local_path(uri).is_file() if is_local(uri) else _remote(uri).find(uri) is not None


def size(uri: str) -> int:
    """Return a file's size in bytes.

    Raises:
        StorageError: it is missing or cannot be reached.
    """
    if is_local(uri):
        with explained(uri, "read"):
            return local_path(uri).stat().st_size
    state = _remote(uri).find(uri)
    if state is None:
        raise missing(uri)
    return state.size


def read_bytes(uri: str) -> bytes:
    """Return a file's content.

    Raises:
        StorageError: it is missing or cannot be reached.
    """
    if is_local(uri):
        with explained(uri, "read"):
            return local_path(uri).read_bytes()
    return _remote(uri).read_bytes(uri)


def read_json(uri: str) -> Any:
    """Return the content of a JSON file.

    Raises:
        StorageError: it is missing, cannot be reached, or is not JSON.
    """
    try:
        return json.loads(read_bytes(uri))
    except ValueError as error:
        raise StorageError(
            f"{uri} is not JSON: {error}", fix="it may be cut off: delete it and write it again"
        ) from error


def write_bytes(uri: str, data: bytes, *, sync: bool = True) -> None:
    """Write a file whole or not at all; `sync` waits until a local disk has it.

    Raises:
        StorageError: it cannot be written (disk full, refused).
    """
    if not is_local(uri):
        _remote(uri).write_bytes(uri, data)
        return
    with new_file(uri, sync=sync) as path, explained(uri, "write"):
        path.write_bytes(data)


def write_json(uri: str, obj: Any) -> None:
    """Write an object as JSON, whole or not at all."""
    write_bytes(uri, json.dumps(obj, ensure_ascii=False).encode())


@contextmanager
def new_file(uri: str, *, sync: bool = True) -> Iterator[Path]:
    """Give a path to write to; what was written becomes the URI's content when the block ends.

    Local files are written beside their final name and renamed; remote ones are written to a
    temporary folder and uploaded. After an exception nothing is left.

    Raises:
        StorageError: it cannot be written; an OSError inside the block is turned into one.
    """
    if not is_local(uri):
        with tempfile.TemporaryDirectory(prefix="kubedet-") as folder:
            path = Path(folder) / "file"
            with explained(uri, "write"):
                yield path
            _remote(uri).upload(path, uri)
        return
    target = local_path(uri)
    temporary = target.with_name(f".{target.name[:100]}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with explained(uri, "write"):
            target.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            if sync:
                _flush_to_disk(temporary)
            temporary.replace(target)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def upload(source: str | Path, uri: str) -> None:
    """Copy a local file to a URI, whole or not at all; the file stays where it is.

    Raises:
        StorageError: the file is missing or the URI cannot be written.
    """
    if not is_local(uri):
        with explained(str(source), "read"):
            Path(source).stat()
        _remote(uri).upload(Path(source), uri)
        return
    with new_file(uri) as path, explained(str(source), "read"):
        shutil.copyfile(source, path)


def local_copy(uri: str, cache_dir: Path | None = None) -> Path:
    """Return a local file with the URI's content: itself if local, else a cached download.

    Args:
        uri: the file.
        cache_dir: where downloads are kept; a folder of this user under the system's temporary
            folder if None. A changed remote file is downloaded again.

    Raises:
        StorageError: the file is missing or cannot be reached, or the copy cannot be written.
    """
    if is_local(uri):
        path = local_path(uri)
        with explained(uri, "read"):
            path.stat()
        return path
    state = _remote(uri).find(uri)
    if state is None:
        raise missing(uri)
    cache = cache_dir or Path(tempfile.gettempdir()) / f"kubedet-cache-{os.getuid()}"
    name = re.sub(r"[^A-Za-z0-9._-]", "_", PurePosixPath(urlsplit(uri).path).name)[-80:]
    digest = hashlib.sha256(f"{uri} {state.version}".encode()).hexdigest()[:16]
    path = cache / f"{digest}-{name}"
    if not (path.is_file() and path.stat().st_size == state.size):
        with explained(str(cache), "write"):
            cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        with new_file(str(path), sync=False) as temporary:
            _remote(uri).download(uri, temporary)
    return path


def list_files(uri: str) -> list[str]:
    """Return the names of all files under a folder, relative to it, sorted; none if it is missing."""
    return sorted(list_states(uri, recursive=True))


def list_states(uri: str, *, recursive: bool = False) -> dict[str, FileState]:
    """Return size and version of the files in a folder by relative name; {} if it is missing.

    Raises:
        StorageError: it cannot be read, or the scheme cannot list.
    """
    if not is_local(uri):
        return _remote(uri).list_states(uri, recursive)
    folder = local_path(uri)
    with explained(uri, "list"):
        return dict(_walk(folder, "", recursive)) if folder.is_dir() else {}


def delete(uri: str) -> None:
    """Delete a file; one that is not there is no error.

    Raises:
        StorageError: it cannot be deleted.
    """
    if not is_local(uri):
        _remote(uri).delete(uri)
        return
    with explained(uri, "delete"):
        local_path(uri).unlink(missing_ok=True)


def remove_stale(uri: str) -> None:
    """Remove what killed writers left under a local folder more than an hour ago."""
    if not is_local(uri):
        return
    for path in local_path(uri).rglob(".*.tmp"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink()


def _walk(folder: Path, prefix: str, recursive: bool) -> Iterator[tuple[str, FileState]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                if recursive and not entry.is_symlink():
                    yield from _walk(folder / entry.name, f"{prefix}{entry.name}/", recursive)
            elif not (entry.name.startswith(".") and entry.name.endswith(".tmp")) and entry.is_file():
                found = entry.stat()
                yield prefix + entry.name, FileState(found.st_size, str(found.st_mtime_ns))


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remote(uri: str) -> ModuleType:
    """Import and return the backend of a remote URI."""
    if scheme(uri) in OBJECT_STORES:
        from trainer import object_store

        return object_store
    if scheme(uri) in WEB:
        from trainer import web

        return web
    raise StorageError(
        f"unknown scheme {scheme(uri)!r} in {uri}",
        fix="use a path, file:, s3://bucket/key, minio://bucket/key or, to read, https://",
    )
