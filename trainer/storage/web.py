"""The guarded client for files of web servers: it connects only to addresses that a policy allows.

Authors of annotations choose addresses, and servers choose redirects. Either could lead into the pod's
network, to a node's metadata service, or to a bucket that the pod's keys open. Allowed are the servers and
buckets that the user named, public addresses, and what the user allows by name. obstore would follow
redirects to any address; here urllib3 asks for each hop once it is checked, and connects to an address of
its host that was checked.
"""

import ipaddress
import random
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
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

from trainer.base.daemon_threads import DaemonThreadPool, in_background
from trainer.base.errors import (
    ConfigError,
    DamagedError,
    MissingError,
    RefusedError,
    StorageError,
    refuse_userinfo,
)
from trainer.base.os_errors import missing
from trainer.base.safe_text import has_userinfo, whole_number
from trainer.storage import OBJECT_STORES, FileState, environment, is_local

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_BLOCK_BYTES = 1024 * 1024
_MAX_TRIES = 4
_REDIRECTS = (301, 302, 303, 307, 308)
_MAX_REDIRECTS = 5
_CONNECTIONS = 64  # connections to a server that are kept open
_MIN_BYTES_PER_SECOND = 50_000.0  # bytes a second, of an answer that takes longer than a request may
_tokens: dict[str, dict[str, str]] = {}  # headers by host and port
_CONNECTION_ERRORS = (urllib3.exceptions.HTTPError, HTTPException, OSError)
BUSY = (408, 429, 500, 502, 503, 504)  # HTTP statuses after which the same request may succeed
RETRY_FIX = "check the network and the server, and run again: finished work is kept"
_NETWORK_FIX = (
    "check the address (the endpoint in the environment), HTTP_PROXY and NO_PROXY, this machine's DNS, and "
    "that the server runs; run again: finished work is kept"
)
_AUTHORITY = re.compile(r"(https?)://([^/?#]*)", re.IGNORECASE)
_BUCKET = re.compile(rf"({'|'.join(OBJECT_STORES)})://([^/]+)", re.IGNORECASE)
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:]+)(?::([0-9]*))?")
_LABEL = re.compile(r"[A-Za-z0-9_-]{1,63}")
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")
_PORTS = {"http": 80, "https": 443}
MOST_BYTES = 64 * 1024 * 1024  # of a file whose address comes from data; a server could send without end
_ALLOWED = re.compile(  # buckets and hosts
    r"(s3|minio|gs|az)://[^/]+/?|([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])(:[1-9][0-9]{0,4})?", re.IGNORECASE
)

# The standard library's idea of a global address has changed with its patch releases. Ranges with a few
# reachable addresses for infrastructure (anycast relays, Teredo, 6to4) are refused whole: they have no web
# servers, and some lead to any IPv4 address.
# https://www.iana.org/assignments/iana-ipv4-special-registry (2025-10-22), .../iana-ipv6-special-registry
_SPECIAL_IPV4 = tuple(
    map(
        ipaddress.IPv4Network,
        (
            "0.0.0.0/8",
            "10.0.0.0/8",
            "100.64.0.0/10",
            "127.0.0.0/8",
            "169.254.0.0/16",
            "172.16.0.0/12",
            "192.0.0.0/24",
            "192.0.2.0/24",
            "192.88.99.0/24",
            "192.168.0.0/16",
            "198.18.0.0/15",
            "198.51.100.0/24",
            "203.0.113.0/24",
            "224.0.0.0/4",
            "240.0.0.0/4",
            # Azure's platform (Microsoft Learn, "What is IP address 168.63.129.16?").
            "168.63.129.16/32",
        ),
    )
)
_ALLOCATED = ipaddress.IPv6Network("2000::/3")  # https://www.iana.org/assignments/ipv6-address-space
_SPECIAL_IPV6 = tuple(map(ipaddress.IPv6Network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")))
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # leads to the IPv4 address in the last 32 bits (RFC 6052)


class Transient(StorageError):
    """Bytes were truncated, altered or from two versions: the next attempt may succeed."""

    transient = True


class RangePastEnd(Transient):
    """The file ends before the requested range."""


class Corrupt(Transient, DamagedError):
    """The bytes do not have the expected hash."""

    transient = False


class RangesNotSupported(StorageError):
    """The server only sends complete files."""


def changed(uri: str, status: int = 0) -> Transient:
    """Return the error for a file that changed while it was read; `status` is that of the HTTP response."""
    kind = RangePastEnd if status == 416 else Transient
    return kind(f"{uri} changed while it was read", fix="run again when no other process is writing to it")


def no_answer(uri: str, error: BaseException) -> StorageError:
    """Return the error for a server that does not respond to urllib3."""
    cause = error.reason if isinstance(error, urllib3.exceptions.MaxRetryError) and error.reason else error
    if isinstance(cause, urllib3.exceptions.SSLError | ssl.SSLError):
        cause = cause.args[0] if cause.args and isinstance(cause.args[0], ssl.SSLError) else cause
        reason = getattr(cause, "verify_message", "") or str(cause)
        fix = "set AWS_CA_BUNDLE to a file with the certificate of its authority, or correct the address"
        if getattr(cause, "reason", "") in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
            fix = "the server speaks plain http there: write http:// in the endpoint, or another port"
        return StorageError(f"cannot read {uri}: the connection is not trusted: {reason}", fix=fix)
    who = "the proxy" if isinstance(cause, urllib3.exceptions.ProxyError) else "the server"
    reason = str(cause).rpartition("] ")[2].rstrip("\"')")
    return StorageError(
        f"cannot read {uri}: no answer from {who}: {reason}", fix=_NETWORK_FIX, transient=True
    )


@lru_cache(maxsize=1024)
def host_and_port(uri: str) -> tuple[str, int]:
    """Return the host of a web address, in lower case and without brackets, and its port.

    Clients disagree about odd hosts such as `0177.0.0.1`, so only hosts that all read alike are accepted:
    names of letters, digits, `-` and `_` (others as in IDNA), IPv4 as four decimal numbers, and IPv6 in
    brackets (RFC 3986, section 3.2.2; RFC 1035, section 2.3.4; https://url.spec.whatwg.org/#host-parsing).
    """
    authority = _AUTHORITY.match(uri)
    named = authority[2].rpartition("@")[2] if authority else ""
    match = _HOST.fullmatch(named)
    try:
        if match is None or authority is None:
            raise ValueError(f"{named!r} is not a host and port")
        host, port = match[1].lower(), int(match[2][:6] if match[2] else _PORTS[authority[1].lower()])
        if not 0 < port < 2**16:
            raise ValueError(f"invalid port {match[2]}")
        if host.startswith("["):
            return str(ipaddress.IPv6Address(host[1:-1])), port
        labels = host.encode("idna").decode("ascii").removesuffix(".").split(".")
        ".".join(labels).encode("ascii").decode("idna")
        if not all(map(_LABEL.fullmatch, labels)) or len(".".join(labels)) > 253:
            raise ValueError(f"{host!r} is not a valid host name")
        if _NUMBER.fullmatch(labels[-1]):
            ipaddress.IPv4Address(".".join(labels))
        return host.removesuffix("."), port
    except ValueError as error:  # Also UnicodeError.
        raise invalid_address(uri, str(error)) from None


def invalid_address(uri: str, reason: str) -> MissingError:
    """Return the error for an invalid server address."""
    return MissingError(f"{uri} is not a valid address: {reason}", fix="correct it")


class Refused(StorageError):
    """An address that is not allowed."""


@dataclass(frozen=True)
class UrlPolicy:
    """Which addresses from data are allowed."""

    named: tuple[str, ...] = ()  # URIs that the user named; their servers and buckets may be read
    allowed: tuple[str, ...] = ()  # others: `host`, `host:port`, `10.0.0.0/8`, `s3://bucket`
    anywhere: bool = False  # whether all servers may be read

    def __post_init__(self) -> None:
        for text in self.allowed:
            if not _ALLOWED.fullmatch(text) and _network(text) is None:
                fix = "write host, host:port, a network such as 10.0.0.0/8, or a bucket such as s3://bucket"
                raise ConfigError(f"data.allow_hosts: cannot use {text!r}", fix=fix)

    def is_named(self, uri: str) -> bool:
        """Return whether a URI is local, or on a server or in a bucket that the user named."""
        place = _place(uri)
        return not place or place in map(_place, self.named)

    def check(self, uri: str) -> None:
        """Refuse an address by its text alone; `check_names` looks up its host."""
        if has_userinfo(uri):
            fix = "remove it from the address"
            raise Refused(f"refused {uri}: it contains a name or password", fix=fix)
        host = host_and_port(uri)[0] if _AUTHORITY.match(uri) else ""
        if self.anywhere or self.is_named(uri):
            return
        if host:
            with suppress(ValueError):  # A name.
                self.check_peer(uri, host)
        elif not _BUCKET.match(uri):
            raise Refused(f"refused {uri}: no address of a server", fix="write http://, https:// or a bucket")
        elif (place := _place(uri)) not in map(_place, self.allowed):
            fix = f"to allow it: --set 'data.allow_hosts=[\"{place}\"]'"
            raise Refused(f"refused {uri}: this bucket is not the source's", fix=fix)

    def check_peer(self, uri: str, peer: str) -> None:
        """Refuse the IP address of a web address if it is not public."""
        address = ipaddress.ip_address(peer.partition("%")[0].strip("[]"))
        if self.anywhere or _is_public(address):
            return
        host, port = host_and_port(uri)
        if self.is_named(uri):
            return
        for text in self.allowed:
            network = _network(text)
            if network is not None and address in network:
                return
            if text.lower().replace("[", "").replace("]", "") in (host, f"{host}:{port}"):
                return
        at = f"{host} is at {address}" if host != str(address) else str(address)
        raise Refused(
            f"refused {uri}: {at}, which is no address of the public network",
            fix=f"to allow it: --set 'data.allow_hosts=[\"{host}\"]'",
        )

    def check_names(self, uri: str) -> list[Any]:
        """Return what `socket.getaddrinfo` finds for a host; refuse it if one of the addresses is refused."""
        host, port = host_and_port(uri)
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for *_, address in addresses:
            self.check_peer(uri, str(address[0]))
        return addresses


def _place(uri: str) -> str:
    """Return host and port of a web address, scheme and bucket of an object; "" for a local path."""
    if bucket := _BUCKET.match(uri):
        return f"{bucket[1].lower()}://{bucket[2]}"
    with suppress(MissingError):
        return "" if is_local(uri) else "{}:{}".format(*host_and_port(uri))
    return uri


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    with suppress(ValueError):
        return ipaddress.ip_network(text)
    return None


def _is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Return whether an address is public; of an IPv6 address that contains an IPv4 one, that one counts."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None and address not in _NAT64:
            return address in _ALLOCATED and not any(address in network for network in _SPECIAL_IPV6)
        address = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return not any(address in network for network in _SPECIAL_IPV4)


class Part(NamedTuple):
    """A requested part of a file."""

    uri: str  # after redirects
    size: int  # of the whole file
    etag: str
    sha256: str  # of the whole file; "" if it is not known
    data: Any  # a buffer of its bytes; a proxy may have truncated them


def part(uri: str, start: int, stop: int, etag: str = "", via: str = "") -> Part:
    """Ask for bytes of a file by an address from the user: of version `etag`, at `via` after redirects."""
    headers = {"Range": f"bytes={start}-{stop - 1}"}
    if etag and not etag.startswith("W/"):  # A weak ETag cannot be used with ranges.
        headers["If-Match"] = etag
    with _open_response("GET", via or uri, headers=headers) as (response, hop):
        size = whole_number(response.headers.get("content-range", "").rpartition("/")[2])
        if response.status != 206 or size is None:
            size = whole_number(response.headers.get("content-length", ""))
            if start or size is None or size > stop:
                raise RangesNotSupported(f"{uri} cannot be read in parts")
        data = b"".join(_blocks(response, uri))
        return Part(hop, size, response.headers.get("etag", ""), "", data)


def stream(uri: str) -> Iterator[bytes]:
    """Yield all bytes of a file as they arrive, by an address from the user."""
    with _open_response("GET", uri) as (response, _):
        yield from _blocks(response, uri)


def state(uri: str) -> FileState | None:
    """Return a file's size (0 if unknown), time and ETag as reported, or None if it is missing."""
    try:
        with _open_response("HEAD", uri) as (response, _):
            pass
    except MissingError:
        return None
    try:
        modified = parsedate_to_datetime(response.headers["last-modified"]).timestamp()
    except (KeyError, TypeError, ValueError):
        modified = None
    size = whole_number(response.headers.get("content-length", "")) or 0
    return FileState(size, modified, response.headers.get("etag", ""))


def retried(action: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Repeat a read or write whose bytes were truncated, altered or changed; signals are handled
    meanwhile.
    """

    def repeat(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        def tries() -> Result:
            for number in range(1, _MAX_TRIES):
                try:
                    return action(*args, **kwargs)
                except Transient:
                    time.sleep(random.uniform(0, min(environment.RETRIES.wait, 0.2 * 2**number)))
            return action(*args, **kwargs)

        return in_background(tries)

    return repeat


@retried
def read_within(uri: str, policy: UrlPolicy, most: int = MOST_BYTES) -> bytes:
    """Return the content of a file of at most `most` bytes, whose address comes from data."""
    blocks, received = [], 0
    with _open_response("GET", uri, policy) as (response, _):
        for block in _blocks(response, uri):
            received += len(block)
            if received > most:
                fix = "use a smaller file, or put it next to the annotations, where files may be larger"
                raise StorageError(f"cannot read {uri}: more than {most} bytes", fix=fix)
            blocks.append(block)
    return b"".join(blocks)


def problem_of(server: str, uri: str, connect: float, read_timeout: float) -> StorageError | None:
    """Check that a server responds within a few seconds; return the error about a URI if it does not."""
    try:
        timeout = urllib3.Timeout(connect=max(connect, 0.1), read=max(read_timeout, 0.1))
        client = environment.web_client(server)
        client.request("HEAD", server, timeout=timeout, retries=False, redirect=False)
    except urllib3.exceptions.HTTPError as error:
        # After a ProtocolError there is a server; the request itself will say what is wrong.
        return None if isinstance(error, urllib3.exceptions.ProtocolError) else no_answer(uri, error)
    return None


def answers(uri: str, seconds: float) -> bool:
    """Return whether the server of a web address responds within a few seconds; checked once."""
    with DaemonThreadPool(1) as thread, suppress(TimeoutError):  # A name lookup has no timeout.
        problem = thread.submit(problem_of, uri, uri, seconds, seconds).result(timeout=seconds)
        return problem is None or not problem.transient
    return False


@lru_cache(maxsize=256)
def _policy_of_origin(origin: str) -> UrlPolicy:
    """Return where a server that the user named may redirect to: a public one only to public addresses."""
    try:
        UrlPolicy().check_names(origin)
    except (Refused, OSError, UnicodeError):
        return UrlPolicy((origin,), anywhere=True)
    return UrlPolicy((origin,))


@contextmanager
def _open_response(
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
            if response.length_remaining is not None and response.length_remaining <= _BLOCK_BYTES:
                response.drain_conn()  # Then the connection can be used again.
        finally:
            response.close()
        if not target:
            _check_status(response.status, uri)
            return
        try:
            following = urljoin(hops[-1], target)
        except ValueError as error:
            raise invalid_address(target, str(error)) from None
        if not _AUTHORITY.match(following):
            fix = "let it redirect to http:// or https://"
            raise Refused(f"refused {uri}: it redirects to {following}", fix=fix)
        if following in hops or len(hops) > _MAX_REDIRECTS:
            way = " -> ".join([*hops, following])
            raise StorageError(
                f"cannot read {uri}: too many redirects: {way}",
                fix="correct the address or the server; retrying does not help",
            )
        hops.append(following)


def _check_status(status: int, uri: str) -> None:
    if status in (404, 410):
        raise missing(uri)
    if status in (412, 416):
        raise changed(uri, status)
    if status >= 300:
        kind, busy = RefusedError if status in (401, 403) else StorageError, status in BUSY
        fix = "run again later" if busy else "check the address and who may read it"
        raise kind(f"cannot read {uri}: the server answers {status}", fix=fix, transient=busy)


def _request(
    method: str, hop: str, policy: UrlPolicy, headers: Mapping[str, str]
) -> urllib3.BaseHTTPResponse:
    """Ask a server, without following its redirects."""
    policy.check(hop)
    token = _tokens.get(_place(hop), {}) if policy.is_named(hop) else {}
    waits = environment.RETRIES
    timeout = urllib3.Timeout(connect=waits.connect, read=waits.read_timeout)
    retries = urllib3.Retry(
        total=None,
        connect=4,
        read=3,
        redirect=False,
        status=12,
        other=0,
        status_forcelist=BUSY,
        backoff_factor=min(0.2, waits.wait),
        backoff_max=waits.wait,
        raise_on_status=False,
    )
    try:
        address, (_, port) = parse_url(hop), host_and_port(hop)
        client = _client(address.scheme or "", address.host or "", port, policy)
        target = hop.partition("#")[0] if isinstance(client, urllib3.PoolManager) else address.request_uri
        return client.urlopen(
            method,
            target,
            headers={"Accept-Encoding": "identity", **headers, **token},
            timeout=timeout,
            preload_content=False,
            redirect=False,
            retries=retries,
        )
    except (urllib3.exceptions.LocationValueError, InvalidURL, UnicodeError) as error:
        raise invalid_address(hop, str(error)) from error
    except (urllib3.exceptions.HTTPError, HTTPException) as error:
        raise no_answer(hop, error) from error


@lru_cache(maxsize=256)
def _client(kind: str, host: str, port: int, policy: UrlPolicy) -> urllib3.PoolManager | HTTPConnectionPool:
    """Return connections to the allowed addresses of a server; a proxy connects itself: names are checked."""
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


def use_token(origin: str, token: str) -> None:
    """Send a token with each request to a server, if the user named it."""
    _tokens[_place(origin)] = {"Authorization": f"Bearer {token}"} if token else {}


def forget_stores() -> None:
    """Look up names, proxies and certificates again when a server is used next."""
    _client.cache_clear()
    _policy_of_origin.cache_clear()


def _blocks(response: urllib3.BaseHTTPResponse, uri: str) -> Iterator[bytes]:
    """Yield the body of an answer as it arrives."""
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
        raise Transient(message, fix=RETRY_FIX) from error
