"""The web half of `trainer.storage`: http:// and https://, to read only."""

import os
from functools import lru_cache
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import urllib3

from trainer.errors import StorageError
from trainer.os_errors import missing
from trainer.storage import FileState

_CONNECTIONS = 64
_TIMEOUT = urllib3.Timeout(connect=10, read=60)
_BLOCK = 1024 * 1024
_ATTEMPTS = 3
_ABSENT = (404, 410)


def find(uri: str) -> FileState | None:
    """Return a file's size and version as the server tells them, or None if it is missing."""
    response = _request("HEAD", uri)
    if response.status in (405, 501):  # a server that knows no HEAD
        response.close()
        response = _request("GET", uri)
    response.close()
    if response.status in _ABSENT:
        return None
    _check(response, uri)
    headers = response.headers
    version = headers.get("ETag") or headers.get("Last-Modified") or ""
    return FileState(int(headers.get("Content-Length") or 0), version)


def read_bytes(uri: str) -> bytes:
    """Return a file's content."""
    for attempt in range(1, _ATTEMPTS + 1):
        response = _request("GET", uri)
        try:
            _check(response, uri)
            return response.read()
        except urllib3.exceptions.HTTPError as error:  # the connection broke off in the midst
            if attempt == _ATTEMPTS:
                raise _unreachable(uri, error) from error
        finally:
            response.close()
    raise AssertionError("unreachable")


def download(uri: str, path: Path) -> None:
    """Write a file's content to a local file."""
    for attempt in range(1, _ATTEMPTS + 1):
        response = _request("GET", uri)
        try:
            _check(response, uri)
            with path.open("wb") as file:
                for block in response.stream(_BLOCK):
                    file.write(block)
            return
        except urllib3.exceptions.HTTPError as error:
            if attempt == _ATTEMPTS:
                raise _unreachable(uri, error) from error
        finally:
            response.close()


def write_bytes(uri: str, data: bytes) -> NoReturn:
    """Refuse to write."""
    raise _read_only(uri)


def upload(path: Path, uri: str) -> NoReturn:
    """Refuse to write."""
    raise _read_only(uri)


def delete(uri: str) -> NoReturn:
    """Refuse to delete."""
    raise _read_only(uri)


def list_states(uri: str, recursive: bool) -> NoReturn:
    """Refuse to list: the web has no folders."""
    raise StorageError(f"cannot list {uri}", fix="name one file, or use a local folder or an object store")


def _request(method: str, uri: str) -> urllib3.BaseHTTPResponse:
    try:
        return _pool(_proxy(uri), os.getpid()).request(method, uri, preload_content=False)
    except (urllib3.exceptions.HTTPError, ValueError) as error:
        raise _unreachable(uri, error) from error


def _proxy(uri: str) -> str | None:
    """Return the proxy that the environment names for this address, if any."""
    parts = urlsplit(uri)
    return None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)


@lru_cache(maxsize=8)
def _pool(proxy: str | None, _process: int) -> urllib3.PoolManager:
    """Return this process's connections; a busy server is asked again."""
    retries = urllib3.Retry(
        total=4, backoff_factor=0.3, status_forcelist=[429, 500, 502, 503, 504], raise_on_status=False
    )
    if proxy:
        return urllib3.ProxyManager(proxy, maxsize=_CONNECTIONS, timeout=_TIMEOUT, retries=retries)
    return urllib3.PoolManager(maxsize=_CONNECTIONS, timeout=_TIMEOUT, retries=retries)


def _check(response: urllib3.BaseHTTPResponse, uri: str) -> None:
    if response.status in _ABSENT:
        raise missing(uri)
    if response.status >= 300:
        fix = "the server refuses: check the address and who may read it"
        if response.status >= 500 or response.status == 429:
            fix = "the server is busy or broken: run again later"
        raise StorageError(f"cannot read {uri}: the server answers {response.status}", fix=fix)


def _unreachable(uri: str, error: Exception) -> StorageError:
    return StorageError(f"cannot read {uri}: {error}", fix="check the address and the network, and run again")


def _read_only(uri: str) -> StorageError:
    return StorageError(
        f"cannot write {uri}: the web is read only", fix="use a local folder or s3://bucket/key"
    )
