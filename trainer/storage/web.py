"""What obstore cannot read of the web: answers of unknown length, and addresses that it cannot write down.

Such files are read with urllib3, from start to end.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import Any

import urllib3

from trainer.storage import attempts, environment, failures, hub
from trainer.storage.uris import FileState

_BLOCK = 256 * 1024
_NO_HEAD = (405, 501)


def state(uri: str) -> FileState:
    """Return a file's size, time and ETag as the server tells them; a size of 0 where it does not.

    Raises:
        StorageError: it is missing or cannot be read.
    """
    headers = head(uri)
    length = headers.get("content-length", "")
    try:
        modified = parsedate_to_datetime(headers["last-modified"]).timestamp()
    except (KeyError, TypeError, ValueError):
        modified = None
    return FileState(int(length) if length.isdecimal() else 0, modified, headers.get("etag", ""))


def head(uri: str) -> Any:
    """Return the headers of a server's answer, by name."""
    with _answer("HEAD", uri) as response:
        if response.status not in _NO_HEAD:
            return _checked(response, uri).headers
    with _answer("GET", uri) as response:
        return _checked(response, uri).headers


def blocks(uri: str) -> Iterator[bytes]:
    """Yield a file's content as it arrives.

    Raises:
        StorageError: it cannot be read, or the server is too slow.
    """
    began, received, patience = time.monotonic(), 0, attempts.PATIENCE
    with _answer("GET", uri) as response:
        _checked(response, uri)
        try:
            while data := response.read1(_BLOCK, decode_content=False):
                received += len(data)
                if time.monotonic() - began > patience.total + received / patience.rate:
                    raise urllib3.exceptions.TimeoutError
                yield data
        except urllib3.exceptions.HTTPError as error:
            raise failures.broken(uri, error) from error


@contextmanager
def _answer(method: str, uri: str) -> Iterator[urllib3.BaseHTTPResponse]:
    patience = attempts.PATIENCE
    timeout = urllib3.Timeout(connect=patience.connect, read=patience.silence)
    # urllib3 drops the token of the hub where it is sent on to another server.
    headers = {"Accept-Encoding": "identity", **hub.authorization(uri)}
    try:
        response = environment.web_client(uri).request(
            method, uri, headers=headers, timeout=timeout, preload_content=False, retries=2
        )
    except urllib3.exceptions.HTTPError as error:
        raise failures.broken(uri, error) from error
    try:
        yield response
    finally:
        response.close()


def _checked(response: urllib3.BaseHTTPResponse, uri: str) -> urllib3.BaseHTTPResponse:
    if response.status >= 300:
        raise failures.web_refusal(response.status, uri, "read")
    return response
