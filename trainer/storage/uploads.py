"""Objects written to a store: whole or not at all, checked on the way, in parts if they are large.

Every object carries its sha256 (`x-amz-meta-sha256`), so that it can be checked when it is read,
whatever the store makes of its ETag. The client's public `put_object` neither shows the ETags of
parts, nor takes conditions, nor forgets the parts of an upload that is interrupted; hence its
inner calls, for which pyproject.toml keeps it below version 8.
"""

import base64
import hashlib
import io
import mimetypes
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from minio import Minio
from minio.datatypes import Part
from minio.error import MinioException, S3Error

from trainer.errors import StorageError
from trainer.storage import connections, failures, quick
from trainer.storage.connections import Deadline, backoff
from trainer.storage.environment import client
from trainer.storage.failures import explained
from trainer.storage.object_store import split, state
from trainer.storage.signing import request
from trainer.storage.uris import scheme

PART = 8 * 1024 * 1024
"""Bytes of a part; more where an object would have too many parts."""

_MOST_PARTS = 10_000
_SENDERS = 6
_TIMES = 4
_BLOCK = 1024 * 1024


def write_bytes(uri: str, data: bytes) -> None:
    """Write an object."""
    _write(uri, io.BytesIO(data), len(data), hashlib.sha256(data).hexdigest())


def upload(path: Path, uri: str, sha256: str = "") -> None:
    """Write a local file's content as an object; in parts if it is large.

    Args:
        path: the file.
        uri: of the object.
        sha256: of the content, where it is known.
    """
    with path.open("rb") as file:
        _write(uri, file, path.stat().st_size, sha256 or _sha256(file))


def create(uri: str, data: bytes) -> bool:
    """Write an object unless there is one; tell whether it was written.

    A store that does not know conditional writes overwrites what another writer puts there between
    the look and the write.
    """
    if state(uri) is not None:
        return False
    bucket, key = split(uri)
    store, sha256 = client(scheme(uri)), hashlib.sha256(data).hexdigest()
    with explained(uri, "write"):
        try:
            _put(store, uri, data, _headers(key, sha256) | {"If-None-Match": "*"}, sha256=sha256)
        except MinioException as error:
            if failures.answer(error)[2] not in (409, 412):
                raise
            # Somebody else was first, or the answer to a first attempt of ours was lost.
            return _is_there(store, bucket, key, sha256, len(data))
    return True


def _write(uri: str, file: BinaryIO, size: int, sha256: str) -> None:
    bucket, key = split(uri)
    store, headers = client(scheme(uri)), _headers(key, sha256)
    with explained(uri, "write"):
        if size <= 2 * PART:
            _put(store, uri, file.read(), headers, sha256=sha256)
            return
        number = store._create_multipart_upload(bucket, key, dict(headers))
        try:
            parts = _send_parts(store, uri, file, size, number)
            _complete(store, uri, number, parts, sha256, size)
        except BaseException:
            # An interrupted upload too: its parts take room that no listing shows.
            with suppress(Exception):
                store._abort_multipart_upload(bucket, key, number)
            raise


def _send_parts(store: Minio, uri: str, file: BinaryIO, size: int, number: str) -> list[Part]:
    """Send a file in parts, a few at a time, and return their ETags in order."""
    length = max(PART, -(-size // _MOST_PARTS))
    done: dict[int, str] = {}

    def send(part: int, data: bytes) -> None:
        query = {"partNumber": str(part), "uploadId": number}
        done[part] = _put(store, uri, data, {}, query)

    pool = ThreadPoolExecutor(_SENDERS, "write")
    try:
        under_way: set[Future[None]] = set()
        for part, data in enumerate(_blocks(file, length), 1):
            under_way.add(pool.submit(send, part, data))
            if len(under_way) > _SENDERS:  # what is read ahead stays in memory
                finished, under_way = wait(under_way, return_when=FIRST_COMPLETED)
                for future in finished:
                    future.result()
        for future in under_way:
            future.result()
    finally:
        pool.shutdown(cancel_futures=True)
    return [Part(part, etag) for part, etag in sorted(done.items())]


def _put(
    store: Minio,
    uri: str,
    data: bytes,
    headers: dict[str, str],
    query: dict[str, Any] | None = None,
    sha256: str = "",
) -> str:
    """Send an object or a part, again if it arrived wrongly, and return its ETag.

    A hash goes with it with which the store compares what it got: the sha256 that is signed, or the
    MD5 where nothing is signed. A store that compares neither (there are such) keeps what came; then
    the hash in the object's headers or in the manifest tells whoever reads it.
    """
    bucket, key = split(uri)
    if store._provider is None:
        digest = hashlib.md5(data, usedforsecurity=False).digest()
        headers = {**headers, "Content-MD5": base64.b64encode(digest).decode()}
    else:
        sha256 = sha256 or hashlib.sha256(data).hexdigest()
    for attempt in range(1, _TIMES + 1):
        try:
            found = request(store, "PUT", bucket, key, headers, query=query, sha256=sha256)
            answer: Any = quick.put(store._http, *found, data)
            if answer is None:
                # A copy: the client adds the headers of this one request to it.
                answer = store._put_object(bucket, key, data, dict(headers), query).http_headers
            return str(answer.get("etag", "")).strip('"')
        except MinioException as error:
            if attempt == _TIMES or not failures.again(error):
                raise
        time.sleep(backoff(attempt))
    raise AssertionError("unreachable")


def _complete(store: Minio, uri: str, number: str, parts: list[Part], sha256: str, size: int) -> None:
    """Let the parts become an object, which may take a store longer than it lets one wait."""
    bucket, key = split(uri)
    deadline, attempt = Deadline(connections.PATIENCE.total), 0
    while True:
        attempt += 1
        try:
            # A store may say 200 and tell of an error in the answer, which then has no ETag.
            if store._complete_multipart_upload(bucket, key, number, parts).etag:
                return
        except MinioException as error:
            # The answer to the first attempt may have been lost, and its work not be done yet.
            if failures.answer(error)[0] == "NoSuchUpload" and _is_there(store, bucket, key, sha256, size):
                return
            if not deadline.left() or not failures.again(error):
                raise
        if not deadline.left():
            raise StorageError(
                f"cannot write {uri}: the store does not join its parts",
                fix="run again later",
                passing=True,
            )
        deadline.sleep(backoff(attempt))


def _is_there(store: Minio, bucket: str, key: str, sha256: str, size: int) -> bool:
    try:
        found = store.stat_object(bucket, key)
    except S3Error as error:
        if error.code == "NoSuchKey":
            return False
        raise
    return found.size == size and (found.metadata or {}).get("x-amz-meta-sha256") == sha256


def _headers(key: str, sha256: str) -> dict[str, str]:
    """Return what goes with an object: a browser that opens it wants to know what it is."""
    kind = mimetypes.guess_type(key)[0] or "application/octet-stream"
    return {"Content-Type": kind, "x-amz-meta-sha256": sha256}


def _sha256(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    for block in _blocks(file, _BLOCK):
        digest.update(block)
    file.seek(0)
    return digest.hexdigest()


def _blocks(file: BinaryIO, length: int) -> Iterator[bytes]:
    while data := file.read(length):
        yield data
