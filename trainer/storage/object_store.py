"""The object-store half of `trainer.storage`: s3://bucket/key and minio://bucket/key.

Reading and listing; `uploads.py` writes. Settings come from the environment (`environment.py`).
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from minio import Minio
from minio.error import MinioException
from urllib3 import PoolManager

from trainer.errors import StorageError
from trainer.storage import answers, failures, quick, transfer
from trainer.storage.environment import client
from trainer.storage.failures import explained
from trainer.storage.signing import Keys, request
from trainer.storage.transfer import Empty, Opener
from trainer.storage.uris import FileState, check_bucket, climbs, scheme

_REASONLESS = (301, 307, 400, 403)


def state(uri: str) -> FileState | None:
    """Return an object's size, time and ETag, or None if it is missing."""
    bucket, key = split(uri)
    store = client(scheme(uri))
    try:
        with explained(uri, "read"):
            try:
                found = store.stat_object(bucket, key)
            except MinioException as error:
                if failures.answer(error)[2] not in _REASONLESS:
                    raise
                # An answer to HEAD has no body: asked for a byte, the store says why it refuses.
                store.get_object(bucket, key, length=1).close()
                raise
    except failures.Absent:
        return None
    headers = found.metadata or {}
    return FileState(found.size or 0, answers.modified(headers), found.etag or "")


def open_range(uri: str) -> Opener:
    """Return what asks for ranges of an object."""
    bucket, key = split(uri)

    def ask(start: int, stop: int, etag: str) -> answers.Response:
        headers: dict[str, Any] = {"If-Match": etag} if etag else {}
        if stop > start:
            headers["Range"] = f"bytes={start}-{stop - 1}"
        with explained(uri, "read"):
            store = client(scheme(uri))
            try:
                found = None
                if not transfer.is_piece(start, stop):
                    found = quick.get(*get_request(store, uri, headers))
                return found or store.get_object(bucket, key, request_headers=headers)
            except MinioException as error:
                if stop and failures.answer(error)[2] == 416:
                    raise Empty from error
                raise

    return ask


def get_request(
    store: Minio, uri: str, headers: dict[str, str]
) -> tuple[PoolManager, str, dict[str, str], Keys | None]:
    """Return what asks for an object: connections, address, headers, and who signs.

    Raises:
        StorageError: the URI is wrong, or the bucket's region cannot be found out.
    """
    with explained(uri, "read"):
        return store._http, *request(store, "GET", *split(uri), headers)


def scan(uri: str, recursive: bool) -> Iterator[tuple[str, FileState]]:
    """Yield the objects under a prefix, by name relative to it, page by page in order.

    Raises:
        StorageError: it cannot be listed, or a name leads out of the folder.
    """
    bucket, key = split(uri, folder=True)
    prefix = f"{key}/" if key else ""
    with explained(uri, "list"):
        for item in client(scheme(uri)).list_objects(bucket, prefix=prefix, recursive=recursive):
            name = (item.object_name or "")[len(prefix) :]
            if item.is_dir or not name or name.endswith("/"):
                continue
            if climbs(name):
                raise StorageError(
                    f"refused name {name!r} under {uri}", fix="rename the object: no '..' and no first '/'"
                )
            changed = item.last_modified.timestamp() if item.last_modified else None
            yield name, FileState(item.size or 0, changed, (item.etag or "").strip('"'))


def delete(uri: str) -> None:
    """Delete an object; one that is not there is no error."""
    bucket, key = split(uri)
    with contextlib.suppress(failures.Absent), explained(uri, "delete"):
        client(scheme(uri)).remove_object(bucket, key)


def split(uri: str, *, folder: bool = False) -> tuple[str, str]:
    """Return bucket and key; a key is taken as it stands, without decoding.

    Raises:
        StorageError: there is none, or the key would be another one after normalisation.
    """
    check_bucket(uri)
    bucket, _, key = uri.partition("://")[2].partition("/")
    if not key and not folder:
        raise StorageError(f"{uri} names no object", fix="use s3://bucket/key")
    if {".", ".."} & set(key.split("/")):
        raise StorageError(
            f"refused key {key!r} in {uri}", fix="use a key without '.' and '..' between slashes"
        )
    return bucket, key.rstrip("/")
