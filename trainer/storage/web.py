"""What obstore cannot read of the web: answers of unknown length, and addresses that it cannot write down.

Such files are read with urllib3, from start to end. So are those whose address may not lead everywhere: each
redirect is looked at here, and each address of a host before it is connected to.
"""

import queue
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from functools import lru_cache
from http.client import HTTPException, InvalidURL
from typing import Any
from urllib.parse import urljoin

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.util.connection import create_connection

from trainer.base.bounded_text import whole_number
from trainer.base.errors import StorageError
from trainer.storage import attempts, environment, failures, hub, traffic
from trainer.storage.reach import MOST_BYTES, Reach, Refused
from trainer.storage.uris import WEB, FileState, InvalidAddress, host_and_port, invalid_address, scheme

_BLOCK = 256 * 1024
_NO_HEAD = (405, 501)
_REDIRECTS = (301, 302, 303, 307, 308)
_HOPS = 5
"""Redirects that are followed."""
_CONNECTIONS = 64
"""That are kept open to a server."""


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
    return FileState(whole_number(length) or 0, modified, headers.get("etag", ""))


def head(uri: str) -> Any:
    """Return the headers of a server's answer, by name."""
    with _answer("HEAD", uri) as response:
        if response.status not in _NO_HEAD:
            return _checked(response, uri).headers
    with _answer("GET", uri) as response:
        response.close()
        return _checked(response, uri).headers


def answers(uri: str, seconds: float) -> bool:
    """Tell whether a server gives any answer, be it a refusal; see `storage.answers`."""
    received: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def ask() -> None:
        try:
            client, headers = environment.web_client(uri), hub.authorization(uri)
            client.request("HEAD", uri, headers=headers, timeout=seconds, retries=False, redirect=False)
        except urllib3.exceptions.TimeoutError:  # No connection, for whatever reason, is one of these.
            received.put(False)
        except (urllib3.exceptions.HTTPError, StorageError):
            received.put(True)  # What is wrong the request itself tells.
        else:
            received.put(True)

    # A thread of its own: nothing limits the time of looking a name up.
    threading.Thread(target=ask, daemon=True).start()
    try:
        return received.get(timeout=seconds)
    except queue.Empty:
        return False


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


def read_within(uri: str, reach: Reach, most: int = MOST_BYTES) -> bytes:
    """Return a file's content, by an address that somebody else wrote.

    Args:
        uri: the address, of the web.
        reach: where it, and the redirects from it, may lead.
        most: bytes that it may have.

    Raises:
        Refused: it leads where it may not.
        StorageError: it is missing, larger, or cannot be read.
    """
    server = "{}:{}".format(*host_and_port(uri))

    def read() -> bytes:
        try:
            return _read_hops(uri, reach, most)
        except (urllib3.exceptions.HTTPError, HTTPException, OSError, UnicodeError) as error:
            raise _broken(uri, error) from error

    return attempts.call(uri, "read", server, read)


def _read_hops(uri: str, reach: Reach, most: int) -> bytes:
    with _answer("GET", uri, reach) as response:
        return _content(_checked(response, uri), uri, most)


@lru_cache(maxsize=1024)
def check_hops(uri: str) -> None:
    """Refuse an address in the public network whose server redirects to what is none of it.

    What a user named is trusted, the servers of a network of their own as well; but no public server has a
    reason to lead into the network that this process is in. Whoever reads the file follows redirects anew.

    Raises:
        Refused: a hop leads to a private, loopback or link-local address, or to no server.
        Circling: it redirects without end.
    """
    if environment.proxy_of(uri):
        return  # The proxy connects, and knows what it may.
    try:
        Reach().check_names(uri)
    except (Refused, OSError, UnicodeError):
        return
    try:
        with _answer("GET", uri, Reach((uri,)), {"Range": "bytes=0-0"}) as response:
            response.close()
    except (Refused, failures.Circling, InvalidAddress):
        raise
    except (StorageError, HTTPException, OSError, UnicodeError):
        return  # Whoever reads the file says it better.


def _content(response: urllib3.BaseHTTPResponse, uri: str, most: int) -> bytes:
    """Return the body of an answer, if it is whole and not too long."""
    length = response.headers.get("content-length", "")
    blocks_read, received, began = [], 0, time.monotonic()
    patience = attempts.PATIENCE
    while data := response.read1(_BLOCK, decode_content=False):
        received += len(data)
        traffic.read(len(data))
        blocks_read.append(data)
        if received > most:
            response.close()
            fix = "give it beside the annotations, where files may be larger, or a smaller one"
            raise StorageError(f"cannot read {uri}: more than {most} bytes", fix=fix)
        if time.monotonic() - began > patience.total + received / patience.rate:
            raise urllib3.exceptions.TimeoutError
    if whole_number(length) not in (None, received):
        raise urllib3.exceptions.ProtocolError(f"{received} of {length} bytes came")
    return b"".join(blocks_read)


def _client_within(uri: str, reach: Reach) -> urllib3.PoolManager:
    """Return connections that lead nowhere but within reach; where a proxy connects, as far as names tell."""
    if environment.proxy_of(uri):
        with suppress(OSError):  # the proxy may know the name
            reach.check_names(uri)
        return environment.web_client(uri)
    return _direct_client(reach, environment.authorities())


@lru_cache(maxsize=4)
def _direct_client(reach: Reach, authorities: str) -> urllib3.PoolManager:
    def connected(connection: HTTPConnection, kind: str) -> Any:
        """Connect as urllib3 does, but to addresses that were looked at: none is asked for twice."""
        uri = f"{kind}://{_bracketed(connection.host)}:{connection.port}"
        refusal: OSError | None = None
        for *_, address in reach.check_names(uri):
            try:
                return create_connection(
                    address[:2], connection.timeout, connection.source_address, connection.socket_options
                )
            except OSError as error:
                refusal = error
        raise urllib3.exceptions.NewConnectionError(connection, str(refusal)) from refusal

    class Plain(HTTPConnection):
        def _new_conn(self) -> Any:
            return connected(self, "http")

    class Encrypted(HTTPSConnection):
        def _new_conn(self) -> Any:
            return connected(self, "https")

    class PlainPool(HTTPConnectionPool):
        ConnectionCls = Plain

    class EncryptedPool(HTTPSConnectionPool):
        ConnectionCls = Encrypted

    trusted = ssl.create_default_context(cadata=authorities)
    client = urllib3.PoolManager(ssl_context=trusted, maxsize=_CONNECTIONS)
    client.pool_classes_by_scheme = {"http": PlainPool, "https": EncryptedPool}
    return client


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


@contextmanager
def _answer(
    method: str, uri: str, reach: Reach | None = None, headers: Mapping[str, str] | None = None
) -> Iterator[urllib3.BaseHTTPResponse]:
    """Give a server's answer that is no redirect, of the last of the hops that lead there.

    Args:
        method: GET or HEAD.
        uri: the address.
        reach: where it, and the redirects from it, may lead; None for anywhere.
        headers: of the request, besides those that all have.

    Raises:
        Refused: a hop leads where it may not.
        Circling: there is no end of them.
        StorageError: the server cannot be reached.
    """
    hops = [uri]
    while True:
        response = _request(method, hops[-1], reach, headers or {})
        try:
            target = response.headers.get("location", "")
            if response.status not in _REDIRECTS or not target:
                yield response
                response.release_conn()
                return
            response.drain_conn()
            response.release_conn()
        except BaseException:
            response.close()
            raise
        try:
            following = urljoin(hops[-1], target)
        except ValueError as error:
            raise invalid_address(target, str(error)) from None
        if scheme(following) not in WEB:
            fix = "let it redirect to http:// or https://"
            raise Refused(f"refused {uri}: it redirects to {following}", fix=fix)
        if following in hops or len(hops) > _HOPS:
            raise failures.circling(uri, [*hops, following])
        hops.append(following)


def _request(
    method: str, hop: str, reach: Reach | None, headers: Mapping[str, str]
) -> urllib3.BaseHTTPResponse:
    """Ask a server, without following where it sends one on to."""
    patience = attempts.PATIENCE
    timeout = urllib3.Timeout(connect=patience.connect, read=patience.silence)
    host_and_port(hop)
    if reach is not None:
        reach.check(hop)
    # The hub's token is for the hub, where the user named that.
    token = hub.authorization(hop) if reach is None or reach.is_named(hop) else {}
    client = environment.web_client(hop) if reach is None else _client_within(hop, reach)
    try:
        return client.request(
            method, hop, headers={"Accept-Encoding": "identity", **headers, **token}, timeout=timeout,
            preload_content=False, redirect=False, retries=2 if reach is None else False,
        )  # fmt: skip
    except (urllib3.exceptions.HTTPError, HTTPException, UnicodeError) as error:
        raise _broken(hop, error) from error


def _broken(uri: str, error: Exception) -> StorageError:
    """Return the error for a request that failed; one that cannot be written down fails each time."""
    if isinstance(error, urllib3.exceptions.LocationValueError | InvalidURL | UnicodeError):
        return invalid_address(uri, str(error))
    return failures.broken(uri, error)


def _checked(response: urllib3.BaseHTTPResponse, uri: str) -> urllib3.BaseHTTPResponse:
    if response.status >= 300:
        raise failures.web_refusal(response.status, uri, "read")
    return response
