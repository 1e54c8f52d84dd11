"""Reads files of web servers, only from hosts on an allow-list.

Addresses in annotations, and redirects of servers, could lead to a server inside the cluster or to a bucket
that the pod's keys can access. So their host or bucket must be named by the user, in the source or in
data.allow_hosts, or belong to a well-known public data set. obstore follows any redirect, so urllib3 is used
here, and each redirect is checked.
"""

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from functools import lru_cache
from http.client import HTTPException
from typing import Any, NamedTuple
from urllib.parse import urljoin

import urllib3

from trainer.base.errors import AccessDeniedError, ConfigError, MissingError, StorageError, refuse_userinfo
from trainer.base.os_errors import missing_error
from trainer.base.safe_text import has_userinfo, parse_digits
from trainer.storage import environment
from trainer.storage.retries import (
    BUSY,
    MAX_TRIES,
    RETRY_FIX,
    RangesNotSupported,
    TransientError,
    changed_error,
    no_answer_error,
    retry,
)
from trainer.storage.uris import OBJECT_STORES, WEB, FileState, host_or_bucket, is_local, scheme

MAX_BYTES = 64 * 1024 * 1024  # largest file whose address comes from data
KNOWN_HOSTS = (  # of published data sets and weights; a leading dot includes all subdomains
    "images.cocodataset.org", ".staticflickr.com", "storage.googleapis.com",
    "open-images-dataset.s3.amazonaws.com", "huggingface.co", ".huggingface.co", ".hf.co",
    "download.pytorch.org", "github.com", ".githubusercontent.com",
)  # fmt: skip
_BLOCK_BYTES = 1024 * 1024
_MIN_BYTES_PER_SECOND = 50_000.0  # of a response that takes longer than a request may
_MAX_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_PLACE = re.compile(
    rf"({'|'.join(OBJECT_STORES)})://[^/]+|([a-z0-9_.-]+|\[[0-9a-f:.]+\])(:[1-9][0-9]{{0,4}})?"
)
_CONNECTION_ERRORS = (urllib3.exceptions.HTTPError, HTTPException, OSError)

allowed_places: set[str] = set()
"""Hosts and buckets that the user named: `host`, `host:port` or `s3://bucket`."""
_tokens: dict[str, str] = {}  # by host and port


class AddressNotAllowed(StorageError):
    """An address that is not on the allow-list."""


def allow(uris: Iterable[str], hosts: Iterable[str] = ()) -> None:
    """Add the servers and buckets of URIs that the user named, and entries of data.allow_hosts."""
    allowed_places.update(host_or_bucket(uri) for uri in uris if not is_local(uri))
    for text in hosts:
        place = text.lower().rstrip("/")
        if not _PLACE.fullmatch(place):
            fix = "write host, host:port, or a bucket such as s3://bucket"
            raise ConfigError(f"data.allow_hosts: cannot use {text!r}", fix=fix)
        allowed_places.add(place)


def check_allowed(uri: str) -> None:
    """Raise AddressNotAllowed unless an address from data or a redirect is on the allow-list."""
    if is_local(uri):
        return
    if has_userinfo(uri):
        raise AddressNotAllowed(
            f"refused {uri}: it contains a name or password", fix="remove it from the address"
        )
    if scheme(uri) not in (*WEB, *OBJECT_STORES):
        raise AddressNotAllowed(f"refused {uri}: it is not on a server", fix="use http(s):// or a bucket")
    place = host_or_bucket(uri)
    host = place.rpartition(":")[0] if scheme(uri) in WEB else place
    if not (host in allowed_places or _covers(allowed_places, place)) and not any(
        host.endswith(known) if known.startswith(".") else host == known for known in KNOWN_HOSTS
    ):
        fix = f"if you trust it: --set 'data.allow_hosts=[\"{host}\"]'"
        raise AddressNotAllowed(
            f"refused {uri}: neither the source's address nor data.allow_hosts names {host}", fix=fix
        )


def _covers(places: set[str], place: str) -> bool:
    """Return whether `places` include a host or bucket; port 80 includes 443, as servers redirect to it."""
    return place in places or (place.endswith(":443") and f"{place.removesuffix('443')}80" in places)


class Part(NamedTuple):
    """Part of a file, as a server returned it."""

    uri: str  # after redirects
    size: int  # of the whole file
    etag: str
    sha256: str  # of the whole file; "" if it is not known
    data: Any  # a buffer of its bytes; a proxy may have truncated them


def read_part(uri: str, start: int, stop: int, etag: str = "", via: str = "") -> Part:
    """Read a range of a file at an address from the user; check its `etag`. `via` is its redirect."""
    headers = {"Range": f"bytes={start}-{stop - 1}"}
    if etag and not etag.startswith("W/"):  # A weak ETag cannot be used with ranges.
        headers["If-Match"] = etag
    with _open_response("GET", via or uri, headers=headers) as (response, hop):
        size = parse_digits(response.headers.get("content-range", "").rpartition("/")[2])
        if response.status != 206 or size is None:
            size = parse_digits(response.headers.get("content-length", ""))
            if start or size is None or size > stop:
                raise RangesNotSupported(f"{uri} cannot be read in parts")
        data = b"".join(_blocks(response, uri))
        return Part(hop, size, response.headers.get("etag", ""), "", data)


def stream(uri: str) -> Iterator[bytes]:
    """Stream the content of a file at an address from the user."""
    with _open_response("GET", uri) as (response, _):
        yield from _blocks(response, uri)


def state(uri: str) -> FileState | None:
    """Return a file's size (0 if unknown), modification time and ETag; None if it is missing."""
    try:
        with _open_response("HEAD", uri) as (response, _):
            pass
    except MissingError:
        return None
    try:
        modified = parsedate_to_datetime(response.headers["last-modified"]).timestamp()
    except (KeyError, TypeError, ValueError):
        modified = None
    size = parse_digits(response.headers.get("content-length", "")) or 0
    return FileState(size, modified, response.headers.get("etag", ""))


@retry
def read_allowed(uri: str, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a file whose address comes from data and is on the allow-list."""
    blocks, received = [], 0
    with _open_response("GET", uri, from_data=True) as (response, _):
        for block in _blocks(response, uri):
            received += len(block)
            if received > max_bytes:
                fix = "use a smaller file, or put it next to the annotations, where files may be larger"
                raise StorageError(f"cannot read {uri}: more than {max_bytes} bytes", fix=fix)
            blocks.append(block)
    return b"".join(blocks)


@contextmanager
def _open_response(
    method: str, uri: str, *, headers: Mapping[str, str] | None = None, from_data: bool = False
) -> Iterator[tuple[urllib3.BaseHTTPResponse, str]]:
    """Follow redirects; yield the final response and its address.

    The host of an address from the user is allowed. Redirects and addresses `from_data` must be on the
    allow-list.
    """
    if not from_data:
        refuse_userinfo(uri, "the address")
    hops, own = [uri], "" if from_data else host_or_bucket(uri)
    while True:
        place = host_or_bucket(hops[-1])
        if not _covers({own}, place):
            check_allowed(hops[-1])
        token = "" if from_data else _tokens.get(place, "")
        authorization = {"Authorization": f"Bearer {token}"} if token else {}
        response = _request(method, hops[-1], {**(headers or {}), **authorization})
        if method == "HEAD" and response.status in (405, 501):
            response.close()
            method = "GET"
            continue
        target = response.headers.get("location", "") if response.status in _REDIRECTS else ""
        try:
            if not target and response.status < 300:
                yield response, hops[-1]
            if response.length_remaining is not None and response.length_remaining <= _BLOCK_BYTES:
                response.drain_conn()  # So that the connection can be reused.
        finally:
            response.close()
        if not target:
            _check_status(response.status, uri)
            return
        try:
            following = urljoin(hops[-1], target)
        except ValueError as error:
            problem = f"{uri} redirects to {target}, which is not a valid address: {error}"
            raise MissingError(problem, fix="correct the server") from None
        if scheme(following) not in WEB:
            fix = "make the server redirect to http:// or https://"
            raise AddressNotAllowed(f"refused {uri}: it redirects to {following}", fix=fix)
        if following in hops or len(hops) > _MAX_REDIRECTS:
            way = " -> ".join([*hops, following])
            fix = "correct the address or the server; retrying does not help"
            raise StorageError(f"cannot read {uri}: too many redirects: {way}", fix=fix)
        hops.append(following)


def _check_status(status: int, uri: str) -> None:
    if status in (404, 410):
        raise missing_error(uri)
    if status in (412, 416):
        raise changed_error(uri, status)
    if status >= 300:
        kind, busy = AccessDeniedError if status in (401, 403) else StorageError, status in BUSY
        fix = "run again later" if busy else "check the address and its permissions"
        raise kind(f"cannot read {uri}: the server answers {status}", fix=fix, transient=busy)


def _request(method: str, uri: str, headers: Mapping[str, str]) -> urllib3.BaseHTTPResponse:
    """Send a request without following redirects."""
    waits = environment.RETRIES
    retries = urllib3.Retry(
        total=None,
        connect=MAX_TRIES,
        read=MAX_TRIES - 1,
        redirect=False,
        status=12,
        other=0,
        status_forcelist=BUSY,
        backoff_factor=min(0.2, waits.wait),
        backoff_max=waits.wait,
        raise_on_status=False,
    )
    try:
        return _client(f"{scheme(uri)}://{host_or_bucket(uri)}").urlopen(
            method,
            uri.partition("#")[0],
            headers={"Accept-Encoding": "identity", **headers},
            timeout=urllib3.Timeout(connect=waits.connect, read=waits.read_timeout),
            preload_content=False,
            redirect=False,
            retries=retries,
        )
    except (urllib3.exceptions.HTTPError, HTTPException, UnicodeError) as error:
        raise no_answer_error(uri, error) from error


@lru_cache(maxsize=256)
def _client(origin: str) -> urllib3.PoolManager:
    return environment.web_client(origin)


def use_token(origin: str, token: str) -> None:
    """Send a bearer token with each request to a server that the user named."""
    _tokens[host_or_bucket(origin)] = token


def reset_clients() -> None:
    """Drop cached clients, so that the next request reads proxies and certificates again."""
    _client.cache_clear()


def _blocks(response: urllib3.BaseHTTPResponse, uri: str) -> Iterator[bytes]:
    """Yield the body of a response as it arrives."""
    received, began = 0, time.monotonic()
    try:
        while block := response.read1(_BLOCK_BYTES, decode_content=False):
            received += len(block)
            yield block
            if time.monotonic() - began > environment.RETRIES.total / 2 + received / _MIN_BYTES_PER_SECOND:
                message = f"cannot read {uri}: the server is too slow"
                raise StorageError(message, fix=RETRY_FIX, transient=True)
    except _CONNECTION_ERRORS as error:
        message = f"cannot read {uri}: the connection was interrupted ({error})"
        raise TransientError(message, fix=RETRY_FIX) from error
