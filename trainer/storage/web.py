"""The web half of `trainer.storage`: http:// and https://, to read only."""

from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import urllib3

from trainer.errors import StorageError
from trainer.storage import answers, failures, quick, transfer
from trainer.storage.connections import pool
from trainer.storage.failures import explained
from trainer.storage.transfer import Empty, Opener
from trainer.storage.uris import FileState

HEADERS = {"Accept-Encoding": "identity"}
"""Of every request for a content."""

_ABSENT = (404, 410)
_BUSY = (408, 429, 500, 502, 503, 504)
_NO_HEAD = (405, 501)


def state(uri: str) -> FileState | None:
    """Return a file's size, time and ETag as the server tells them, or None if it is missing."""
    response = _request("HEAD", uri)
    if response.status in _NO_HEAD:
        response.close()
        response = _request("GET", uri)
    try:
        if response.status in _ABSENT:
            return None
        _check(response, uri)
        head = answers.head_of(response)
        return FileState(head.size or 0, answers.modified(response.headers), head.etag)
    finally:
        response.close()


def open_range(uri: str) -> Opener:
    """Return what asks for ranges of a file; a server may answer with all of it."""

    def ask(start: int, stop: int, etag: str) -> answers.Response:
        headers = dict(HEADERS)
        if stop > start:
            headers["Range"] = f"bytes={start}-{stop - 1}"
        if etag and not etag.startswith("W/"):  # a weak mark holds for no range
            headers["If-Match"] = etag
        found = None if transfer.is_piece(start, stop) else quick.get(pool(uri), uri, headers)
        if found is not None:
            return found
        response = _request("GET", uri, headers)
        try:
            if stop and response.status == 416:
                raise Empty
            _check(response, uri)
        except BaseException:
            response.close()
            raise
        return response

    return ask


def write_bytes(uri: str, data: bytes) -> NoReturn:
    """Refuse to write."""
    raise _read_only(uri)


def upload(path: Path, uri: str, sha256: str = "") -> NoReturn:
    """Refuse to write."""
    raise _read_only(uri)


def create(uri: str, data: bytes) -> NoReturn:
    """Refuse to write."""
    raise _read_only(uri)


def delete(uri: str) -> NoReturn:
    """Refuse to delete."""
    raise _read_only(uri)


def scan(uri: str, recursive: bool) -> Iterator[tuple[str, FileState]]:
    """Refuse to list: the web has no folders."""
    raise StorageError(f"cannot list {uri}", fix="name one file, or use a local folder or an object store")


def _request(method: str, uri: str, headers: dict[str, str] | None = None) -> urllib3.BaseHTTPResponse:
    with explained(uri, "read"):
        return pool(uri).request(method, uri, headers=headers, preload_content=False)


def _check(response: urllib3.BaseHTTPResponse, uri: str) -> None:
    status = response.status
    if status in _ABSENT:
        raise failures.absent(uri)
    if status == 412:
        raise failures.Changed(f"{uri} changed while it was read", fix="run again when nobody writes to it")
    if status >= 300:
        busy = status in _BUSY
        fix = "the server refuses: check the address and who may read it"
        if busy:
            fix = "the server is busy or broken: run again later"
        raise StorageError(f"cannot read {uri}: the server answers {status}", fix=fix, passing=busy)


def _read_only(uri: str) -> StorageError:
    return StorageError(
        f"cannot write {uri}: the web is read only", fix="use a local folder or s3://bucket/key"
    )
