"""Handles of libcurl, and one request on a handle with what comes back.

A handle is kept for request after request: to make one, and to open its connection, takes longer than
to ask for a small file. How requests are sent is the affair of `quick` (one, and wait for it) and of
`multi` (several at a time in one thread).
"""

import math
import re
from typing import Any

import pycurl
import urllib3

from trainer.storage import connections
from trainer.storage.connections import Deadline
from trainer.storage.signing import Keys

LARGEST = 16 * 1024 * 1024
"""Bytes of an answer that is taken: more than a piece has that `transfer` asks for."""

_PLAIN = re.compile(r"(https?)://([A-Za-z0-9._\[\]:-]+)(/[A-Za-z0-9/._~!$&'()*+,;=:@%?-]*)")
"""Addresses that are sent as they stand; others are encoded first."""

_BLOCK = 256 * 1024


class Line:
    """What is known of a server, and the handles that wait for its next request."""

    def __init__(self, server: tuple[str, str], authorities: str | bytes) -> None:
        self.server = server
        self.unplain = False
        """Its answers are of another kind: to ask it without much ado would be in vain."""
        self.idle: list[pycurl.Curl] = []
        """Each with its connection. Any thread may take from its end and add to it."""
        self._authorities = authorities

    def handle(self) -> pycurl.Curl:
        """Return a new handle with what is the same for all requests."""
        handle = pycurl.Curl()
        handle.setopt(pycurl.NOSIGNAL, True)
        handle.setopt(pycurl.PROXY, "")  # it would look for one in the environment
        handle.setopt(pycurl.HTTP_VERSION, pycurl.CURL_HTTP_VERSION_1_1)
        handle.setopt(pycurl.USERAGENT, "kubedet")
        handle.setopt(pycurl.BUFFERSIZE, _BLOCK)
        handle.setopt(pycurl.UPLOAD_BUFFERSIZE, _BLOCK)
        handle.setopt(pycurl.MAXFILESIZE_LARGE, LARGEST)
        handle.setopt(pycurl.LOW_SPEED_LIMIT, 1)
        if self.server[0] == "https":  # libcurl copies it for each request, of http too
            named = isinstance(self._authorities, str)
            handle.setopt(pycurl.CAINFO if named else pycurl.CAINFO_BLOB, self._authorities)
        return handle


def line(pool: Any, url: str, keys: Keys | None) -> Line | None:
    """Return the line to a server; None where it has to be asked in the careful way.

    Args:
        pool: of `connections.pool`.
        url: http(s)://host/path
        keys: who signs.
    """
    found = _PLAIN.fullmatch(url)
    if found is None or "/." in url or pool.proxy is not None:
        return None
    server = (found[1], found[2])
    # A handle that has keys signs whatever it sends.
    name = (server, keys is None)
    known: Line | None = pool.lines.get(name)
    if known is None:
        known = pool.lines.setdefault(name, Line(server, pool.authorities))
    return None if known.unplain else known


class Exchange:
    """A request that was put on a handle; it is sent by whoever has the handle."""

    def __init__(
        self,
        handle: pycurl.Curl,
        method: str,
        url: str,
        headers: dict[str, str],
        keys: Keys | None,
        body: bytes,
        deadline: Deadline,
    ) -> None:
        self.handle = handle
        self._sends = method == "PUT"
        self._lines: list[bytes] = []
        self._blocks: list[bytes] = []
        told = [f"{name}: {value}" for name, value in headers.items()]
        handle.setopt(pycurl.HEADERFUNCTION, self._lines.append)
        handle.setopt(pycurl.WRITEFUNCTION, self._blocks.append)
        handle.setopt(pycurl.URL, url)
        handle.setopt(pycurl.CONNECTTIMEOUT_MS, _milliseconds(connections.PATIENCE.connect, deadline))
        handle.setopt(pycurl.TIMEOUT_MS, _milliseconds(math.inf, deadline))
        handle.setopt(pycurl.LOW_SPEED_TIME, math.ceil(connections.PATIENCE.silence))
        if keys is not None:
            handle.setopt(pycurl.AWS_SIGV4, f"aws:amz:{keys.region}:s3")
            handle.setopt(pycurl.USERNAME, keys.access)
            handle.setopt(pycurl.PASSWORD, keys.secret)
        if self._sends:
            handle.setopt(pycurl.POSTFIELDS, body)
            handle.setopt(pycurl.CUSTOMREQUEST, "PUT")
            told += ["Expect:"] if "Content-Type" in headers else ["Expect:", "Content-Type:"]
        else:
            handle.setopt(pycurl.HTTPGET, True)
            handle.unsetopt(pycurl.CUSTOMREQUEST)
        handle.setopt(pycurl.HTTPHEADER, told)

    @property
    def begun(self) -> bool:
        """Tell whether bytes of an answer's body have come."""
        return bool(self._blocks)

    def end(self) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers by name in lower case, and body of the answer; forget the request."""
        status: int = self.handle.getinfo(pycurl.RESPONSE_CODE)
        if self._sends:
            # The handle holds the body, and would sign the next request with its hash.
            self.handle.setopt(pycurl.POSTFIELDS, b"")
        parts = (text.decode("latin-1").partition(":") for text in self._lines)
        headers = {name.lower(): value.strip() for name, colon, value in parts if colon}
        body = b"".join(self._blocks)
        # The handle, which is kept, refers to both.
        self._lines.clear()
        self._blocks.clear()
        return status, headers, body


class Answer:
    """What `transfer` uses of urllib3's answers, with its exceptions: a body that has come already."""

    def __init__(self, headers: dict[str, str], body: bytes, broken: str = "") -> None:
        self.headers = headers
        self._body = body
        self._broken = broken

    def read1(self, amt: int = -1, decode_content: bool | None = None) -> bytes:
        """Return all bytes; when asked again, b"".

        Raises:
            ProtocolError: when asked again, if the connection broke after these bytes.
        """
        body, self._body = self._body, b""
        if self._broken and not body:
            raise urllib3.exceptions.ProtocolError(f"connection broken: {self._broken}")
        return body

    def shutdown(self) -> None:
        """Nobody waits for it."""

    def close(self) -> None:
        """Its connection was given back before."""

    release_conn = close


def _milliseconds(most: float, deadline: Deadline) -> int:
    return int(1000 * min(most, max(deadline.left(), 0.1)))
