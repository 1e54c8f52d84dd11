"""One request over a kept connection of the standard library, with little around it.

The full client does around a request several times the work of the request itself, and of small
files there are millions. Here a request is sent once, and only a plain answer to it is taken: 200 or
206 with a length. Whatever else comes, be it a refusal, a redirect, a busy server, an answer in
chunks or a connection that breaks, and a proxy on the way, is not judged here: the careful way knows
all of these and tries again until its deadline; it then asks once more.
"""

import http.client
import re
import socket
import ssl
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import urllib3
from urllib3.util.wait import wait_for_read

from trainer.storage import connections
from trainer.storage.connections import BUSY, POOL, Deadline, backoff

_PLAIN = re.compile(r"(https?)://([A-Za-z0-9._\[\]:-]+)(/[A-Za-z0-9/._~!$&'()*+,;=:@%?-]*)")
"""Addresses that are sent as they stand; others are encoded first."""

_BLOCK = 256 * 1024
_SMALL = 64 * 1024
"""A refusal of so many bytes is read, so that its connection can be kept."""


class _Unplain(Exception):
    """The server's answers are of a kind that is not taken here."""


class Answer:
    """An answer whose body is not read yet: what `transfer` uses of urllib3's, with its exceptions."""

    def __init__(self, line: "_Line", connection: http.client.HTTPConnection) -> None:
        self._line = line
        self._connection: http.client.HTTPConnection | None = connection
        self._socket = connection.sock  # the connection forgets one that the server will close
        self._response = connection.getresponse()
        self.status = self._response.status
        self.headers = {name.lower(): value for name, value in self._response.headers.raw_items()}
        if self._response.length is None and self.status in (200, 206):
            raise _Unplain

    def read1(self, amt: int = _BLOCK, decode_content: bool | None = None) -> bytes:
        """Return what has arrived, at most `amt` bytes and as it came; b"" at the end."""
        try:
            return self._response.read1(amt)
        except TimeoutError as error:
            raise urllib3.exceptions.ReadTimeoutError(None, "", "silence") from error  # type: ignore[arg-type]
        except (OSError, http.client.HTTPException) as error:
            raise urllib3.exceptions.ProtocolError(f"connection broken: {error}", error) from error

    def shutdown(self) -> None:
        """Let a thread that reads from it end now."""
        self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the connection back, or close it when something is left in it."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        whole = self._response.length == 0
        self._response.close()
        if whole and connection.sock is not None:
            self._line.keep(connection)
        else:
            connection.close()

    release_conn = close

    def drain(self) -> None:
        """Read what nobody wants, if it is little, so that the connection can be kept; and close it."""
        with suppress(urllib3.exceptions.HTTPError):
            if self._response.length is not None and self._response.length <= _SMALL:
                while self.read1():
                    pass
        self.close()


class _Line:
    """Connections to one server that wait for their next request."""

    def __init__(self, kind: str, place: str, trusted: ssl.SSLContext) -> None:
        self.server = (kind, place)
        self.unplain = False
        """Its answers are of another kind: to ask it here first would be in vain."""
        self._trusted = trusted
        self._idle: deque[http.client.HTTPConnection] = deque()

    def ask(self, method: str, path: str, headers: dict[str, str], body: bytes, deadline: Deadline) -> Answer:
        """Send a request and return the answer; over a new connection if the idle ones were closed.

        Raises:
            OSError, HTTPException, ValueError: there is no connection, it breaks, or the server is silent;
                what came is no answer; what was to be sent is no request.
            _Unplain: this is no plain answer.
        """
        while True:
            try:
                connection, used = self._idle.pop(), True
            except IndexError:
                connection, used = self._connect(deadline), False
            if used and wait_for_read(connection.sock, 0):
                connection.close()  # its server closed it, or said what nobody asked for
                continue
            try:
                connection.sock.settimeout(_seconds(connections.PATIENCE.silence, deadline))
                connection.request(method, path, _blocks(body, deadline) if body else None, headers)
                return Answer(self, connection)
            except ConnectionError:
                connection.close()
                if not used:
                    raise
            except BaseException:
                connection.close()
                raise

    def keep(self, connection: http.client.HTTPConnection) -> None:
        """Keep a connection for the next request."""
        if len(self._idle) < POOL:
            self._idle.append(connection)
        else:
            connection.close()

    def _connect(self, deadline: Deadline) -> http.client.HTTPConnection:
        (kind, place), seconds = self.server, _seconds(connections.PATIENCE.connect, deadline)
        made: http.client.HTTPConnection
        if kind == "https":
            made = http.client.HTTPSConnection(place, timeout=seconds, context=self._trusted)
        else:
            made = http.client.HTTPConnection(place, timeout=seconds)
        try:
            made.connect()
            return made
        except BaseException:
            made.close()
            raise


def get(pool: Any, url: str, headers: dict[str, str]) -> Answer | None:
    """Ask for a file, and return the answer unread; None where it has to be asked for in the careful way.

    Args:
        pool: of `connections.pool`, which is the careful way.
        url: http(s)://host/path
        headers: of the request.
    """
    return _request(pool, "GET", url, headers, b"")


def put(pool: Any, url: str, headers: dict[str, str], body: bytes) -> dict[str, str] | None:
    """Send a file, and return the headers of the answer; None where it has to be sent in the careful way.

    What the server has then is unknown: nothing of it, or all.

    Args:
        pool: of `connections.pool`, which is the careful way.
        url: http(s)://host/path
        headers: of the request, without `Content-Length`.
        body: the content.
    """
    answer = _request(pool, "PUT", url, {**headers, "Content-Length": str(len(body))}, body)
    if answer is None:
        return None
    answer.drain()
    return answer.headers


def _request(pool: Any, method: str, url: str, headers: dict[str, str], body: bytes) -> Answer | None:
    """Send a request; return its answer if it is one of success."""
    found = _PLAIN.fullmatch(url)
    if found is None or "/." in url or pool.proxy is not None:
        return None
    kind, place, path = found.group(1, 2, 3)
    line = pool.lines.get((kind, place))
    if line is None:
        line = pool.lines.setdefault((kind, place), _Line(kind, place, pool.trusted))
    deadline = connections.current()
    if line.unplain or deadline.left() <= 0:
        return None
    try:
        answer = line.ask(method, path, {"User-Agent": "kubedet", **headers}, body, deadline)
    except _Unplain:
        line.unplain = True
        return None
    except (OSError, ValueError, http.client.HTTPException):
        deadline.sleep(backoff(1))
        return None
    connections.answered(line.server)
    if answer.status in (200, 206):
        return answer
    line.unplain = answer.status in (301, 302, 303, 307, 308)
    answer.drain()
    if answer.status in BUSY:
        asked = answer.headers.get("retry-after", "")
        deadline.sleep(float(asked) if asked.isdecimal() else backoff(1))
    return None


def _blocks(body: bytes, deadline: Deadline) -> Iterator[memoryview]:
    """Give a body piece by piece: each in its time, however slow the way."""
    view = memoryview(body)
    for place in range(0, len(body), _BLOCK):
        if deadline.left() <= 0:
            raise TimeoutError("too slow")
        yield view[place : place + _BLOCK]


def _seconds(most: float, deadline: Deadline) -> float:
    return min(most, max(deadline.left(), 0.1))
