"""Files of web servers, read by urllib3, which connects only to addresses that a policy allows.

obstore follows redirects to any address. Here each hop is checked, and each address of a host before a
connection is made to it.
"""

import random
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from functools import lru_cache
from http.client import HTTPException, InvalidURL
from typing import Any, NamedTuple, ParamSpec, TypeVar
from urllib.parse import urljoin

import urllib3
from urllib3.connection import HTTPConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.util import parse_url
from urllib3.util.connection import create_connection

from trainer.base import traffic
from trainer.base.daemon_threads import DaemonThreadPool, in_background
from trainer.base.errors import MissingError, StorageError, refuse_userinfo
from trainer.base.safe_text import whole_number
from trainer.storage import environment, failures, hub
from trainer.storage.uris import WEB, FileState, host_and_port, invalid_address, scheme
from trainer.storage.url_policy import MOST_BYTES, Refused, UrlPolicy

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_BLOCK = 1024 * 1024
_TRIES = 4
_REDIRECTS = (301, 302, 303, 307, 308)
_MOST_REDIRECTS = 5
_CONNECTIONS = 64  # connections to a server that are kept open
_LEAST_RATE = 50_000.0  # bytes a second, of an answer that takes longer than a request may
_BROKEN = (urllib3.exceptions.HTTPError, HTTPException, OSError)


class Part(NamedTuple):
    """A part of a file that was asked for."""

    uri: str  # after redirects
    size: int  # of the whole file
    etag: str
    sha256: str  # of the whole file; "" if it is not known
    body: Callable[[], Any]  # returns the bytes; a proxy may have truncated them


def part(uri: str, start: int, stop: int, etag: str = "", via: str = "") -> Part:
    """Ask for bytes of a file, by an address from the user.

    `etag` is the version that is wanted; `via` the address after redirects, if it is known.
    """
    headers = {"Range": f"bytes={start}-{stop - 1}"}
    if etag and not etag.startswith("W/"):  # A weak ETag cannot be used with ranges.
        headers["If-Match"] = etag
    with _answer("GET", via or uri, headers=headers) as (response, hop):
        size = whole_number(response.headers.get("content-range", "").rpartition("/")[2])
        if response.status != 206 or size is None:
            size = _content_length(response)
            if start or size is None or size > stop:
                raise failures.NoRanges(f"{uri} cannot be read in parts")
        data = b"".join(_blocks(response, uri))
        return Part(hop, size, response.headers.get("etag", ""), "", lambda: data)


def stream(uri: str) -> Iterator[bytes]:
    """Yield all bytes of a file as they arrive, by an address from the user."""
    with _answer("GET", uri) as (response, _):
        yield from _blocks(response, uri)


def state(uri: str) -> FileState | None:
    """Return a file's size (0 if unknown), time and ETag as reported, or None if it is missing."""
    try:
        with _answer("HEAD", uri) as (response, _):
            pass
    except MissingError:
        return None
    try:
        modified = parsedate_to_datetime(response.headers["last-modified"]).timestamp()
    except (KeyError, TypeError, ValueError):
        modified = None
    return FileState(_content_length(response) or 0, modified, response.headers.get("etag", ""))


def retried(action: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Repeat a read or write whose bytes were cut off, altered or changed; signals are handled meanwhile."""

    def repeat(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        def tries() -> Result:
            for number in range(1, _TRIES):
                try:
                    return action(*args, **kwargs)
                except failures.Transient:
                    time.sleep(random.uniform(0, min(environment.RETRIES.wait, 0.2 * 2**number)))
            return action(*args, **kwargs)

        return in_background(tries)

    return repeat


@retried
def read_within(uri: str, policy: UrlPolicy, most: int = MOST_BYTES) -> bytes:
    """Return the content of a file of at most `most` bytes, whose address comes from data."""
    blocks, received = [], 0
    with _answer("GET", uri, policy) as (response, _):
        for block in _blocks(response, uri):
            received += len(block)
            if received > most:
                fix = "use a smaller file, or put it next to the annotations, where files may be larger"
                raise StorageError(f"cannot read {uri}: more than {most} bytes", fix=fix)
            blocks.append(block)
    return b"".join(blocks)


def problem_of(server: str, uri: str, connect: float, silence: float) -> StorageError | None:
    """Ask a server for any answer within some seconds; return the error about a URI if there is none."""
    try:
        timeout = urllib3.Timeout(connect=max(connect, 0.1), read=max(silence, 0.1))
        client = environment.web_client(server)
        token = hub.authorization(server)
        client.request("HEAD", server, headers=token, timeout=timeout, retries=False, redirect=False)
    except urllib3.exceptions.ProtocolError:
        return None  # There is a server; the request itself will say what is wrong.
    except urllib3.exceptions.HTTPError as error:
        return failures.no_answer(uri, error)
    return None


def answers(uri: str, seconds: float) -> bool:
    """Return whether the server of a web address gives any answer within some seconds; it is asked once."""
    with DaemonThreadPool(1) as thread, suppress(TimeoutError):  # A name lookup has no timeout.
        problem = thread.submit(problem_of, uri, uri, seconds, seconds).result(timeout=seconds)
        return problem is None or not problem.passing
    return False


@lru_cache(maxsize=256)
def _policy_of_origin(origin: str) -> UrlPolicy:
    """Return where a server that the user named may redirect to.

    A public server has no reason to lead into this process's network. A server in that network is trusted.
    """
    try:
        UrlPolicy().check_names(origin)
    except (Refused, OSError, UnicodeError):
        return UrlPolicy((origin,), anywhere=True)
    return UrlPolicy((origin,))


@contextmanager
def _answer(
    method: str, uri: str, policy: UrlPolicy | None = None, headers: Mapping[str, str] | None = None
) -> Iterator[tuple[urllib3.BaseHTTPResponse, str]]:
    """Follow redirects; give the answer that is none, and its address. Without policy, the user named it."""
    if policy is None:
        refuse_userinfo(uri, "the address")
        policy = _policy_of_origin("/".join(uri.split("/", 3)[:3]))
    hops = [uri]
    while True:
        response = _request(method, hops[-1], policy, headers or {})
        if method == "HEAD" and response.status in (405, 501):
            response.close()
            method = "GET"
            continue
        target = response.headers.get("location", "") if response.status in _REDIRECTS else ""
        try:
            if not target and response.status < 300:
                yield response, hops[-1]
            if response.length_remaining is not None and response.length_remaining <= _BLOCK:
                response.drain_conn()  # Then the connection can be used again.
        finally:
            response.close()
        if not target and response.status >= 300:
            raise failures.web_refusal(response.status, uri)
        if not target:
            return
        try:
            following = urljoin(hops[-1], target)
        except ValueError as error:
            raise invalid_address(target, str(error)) from None
        if scheme(following) not in WEB:
            fix = "let it redirect to http:// or https://"
            raise Refused(f"refused {uri}: it redirects to {following}", fix=fix)
        if following in hops or len(hops) > _MOST_REDIRECTS:
            way = " -> ".join([*hops, following])
            raise StorageError(
                f"cannot read {uri}: it is redirected without end: {way}",
                fix="correct the address, or the server: it is no use to try again",
            )
        hops.append(following)


def _request(
    method: str, hop: str, policy: UrlPolicy, headers: Mapping[str, str]
) -> urllib3.BaseHTTPResponse:
    """Ask a server, without following its redirects."""
    policy.check(hop)
    # The hub's token is for the hub, if the user named it.
    token = hub.authorization(hop) if policy.is_named(hop) else {}
    waits = environment.RETRIES
    timeout = urllib3.Timeout(connect=waits.connect, read=waits.silence)
    retries = urllib3.Retry(
        total=None, connect=4, read=3, redirect=False, status=12, other=0, status_forcelist=failures.BUSY,
        backoff_factor=min(0.2, waits.wait), backoff_max=waits.wait, raise_on_status=False,
    )  # fmt: skip
    try:
        address, (_, port) = parse_url(hop), host_and_port(hop)
        client = _client(scheme(hop), address.host or "", port, policy)
        target = hop.partition("#")[0] if isinstance(client, urllib3.PoolManager) else address.request_uri
        return client.urlopen(
            method, target, headers={"Accept-Encoding": "identity", **headers, **token},
            timeout=timeout, preload_content=False, redirect=False, retries=retries,
        )  # fmt: skip
    except (urllib3.exceptions.LocationValueError, InvalidURL, UnicodeError) as error:
        raise invalid_address(hop, str(error)) from error
    except (urllib3.exceptions.HTTPError, HTTPException) as error:
        raise failures.no_answer(hop, error) from error


@lru_cache(maxsize=256)
def _client(kind: str, host: str, port: int, policy: UrlPolicy) -> urllib3.PoolManager | HTTPConnectionPool:
    """Return connections to a server, to addresses that the policy allows.

    A proxy connects by itself: then only the names are checked.
    """
    origin = f"{kind}://{host}:{port}"
    if environment.proxy_of(origin):
        with suppress(OSError):  # The proxy may know the name.
            policy.check_names(origin)
        return environment.web_client(origin)

    def connect(connection: HTTPConnection) -> Any:
        """Connect as urllib3 does, but to the addresses that were checked, without a second lookup."""
        try:
            addresses = policy.check_names(origin)
        except OSError as error:
            raise urllib3.exceptions.NameResolutionError(host, connection, error) from error  # type: ignore[arg-type]
        refusal = OSError()
        for *_, address in addresses:
            try:
                return create_connection(
                    address[:2], connection.timeout, connection.source_address, connection.socket_options
                )
            except OSError as error:
                refusal = error
        if isinstance(refusal, TimeoutError):
            raise urllib3.exceptions.ConnectTimeoutError(connection, str(refusal)) from refusal
        raise urllib3.exceptions.NewConnectionError(connection, str(refusal)) from refusal

    if kind == "http":
        pool = HTTPConnectionPool(host, port, maxsize=_CONNECTIONS)
    else:
        trusted = ssl.create_default_context(cadata=environment.authorities())
        pool = HTTPSConnectionPool(host, port, maxsize=_CONNECTIONS, ssl_context=trusted)
    pool.ConnectionCls = type("Guarded", (pool.ConnectionCls,), {"_new_conn": connect})
    return pool


def forget_stores() -> None:
    """Look up names, proxies and certificates again when a server is used next."""
    _client.cache_clear()
    _policy_of_origin.cache_clear()


def _content_length(response: urllib3.BaseHTTPResponse) -> int | None:
    return whole_number(response.headers.get("content-length", ""))


def _blocks(response: urllib3.BaseHTTPResponse, uri: str) -> Iterator[bytes]:
    """Yield the body of an answer as it arrives."""
    received, began = 0, time.monotonic()
    try:
        while block := response.read1(_BLOCK, decode_content=False):
            received += len(block)
            traffic.read(len(block))
            yield block
            if time.monotonic() - began > environment.RETRIES.total / 2 + received / _LEAST_RATE:
                message = f"cannot read {uri}: the server is too slow"
                raise StorageError(message, fix=failures.RUN_AGAIN, passing=True)
    except _BROKEN as error:
        message = f"cannot read {uri}: the connection broke off ({error})"
        raise failures.Transient(message, fix=failures.RUN_AGAIN) from error
