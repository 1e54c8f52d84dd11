"""One request through libcurl, answered whole in memory, with little around it.

The full client does around a request several times the work of the request itself, and of small
files there are millions. Here a request is sent once, outside of the interpreter's lock, over a
connection that is kept; and only a plain answer to it is taken: 200 or 206 with a length that fits
in memory. Whatever else comes, be it a refusal, a redirect, a busy server, an answer in chunks or a
connection that breaks, and a proxy on the way, is not judged here: the careful way knows all of these
and tries again until its deadline; it then asks once more.
"""

import io
import math
import re
import threading
from collections import deque
from typing import Any

import pycurl
import urllib3
from urllib3.util.wait import wait_for_read

from trainer.storage import connections
from trainer.storage.connections import BUSY, POOL, Deadline, backoff
from trainer.storage.signing import Keys

LARGEST = 16 * 1024 * 1024
"""Bytes of an answer that is taken: more than a piece has that `transfer` asks for."""

_PLAIN = re.compile(r"(https?)://([A-Za-z0-9._\[\]:-]+)(/[A-Za-z0-9/._~!$&'()*+,;=:@%?-]*)")
"""Addresses that are sent as they stand; others are encoded first."""

_BLOCK = 256 * 1024
_BROKEN = (pycurl.E_PARTIAL_FILE, pycurl.E_RECV_ERROR, pycurl.E_OPERATION_TIMEDOUT)


class Answer:
    """What `transfer` uses of urllib3's answers, with its exceptions: a body that has come already."""

    def __init__(self, headers: dict[str, str], body: bytes, broken: str) -> None:
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


class _Line:
    """Handles that each keep a connection to one server, and wait for its next request."""

    def __init__(self, authorities: bytes) -> None:
        self.unplain = False
        """Its answers are of another kind: to ask it here first would be in vain."""
        self._authorities = authorities
        self._idle: deque[pycurl.Curl] = deque()

    def ask(
        self,
        method: str,
        url: str,
        headers: dict[str, str],
        keys: Keys | None,
        body: bytes,
        deadline: Deadline,
    ) -> tuple[int, dict[str, str], bytes, str]:
        """Send a request; return status, headers, body, and why the body is not whole ("" if it is).

        Raises:
            pycurl.error: there is no connection, it breaks, or the server is silent; the answer is none
                of HTTP, or too large.
        """
        try:
            while wait_for_read((handle := self._idle.pop()).getinfo(pycurl.ACTIVESOCKET), 0):
                handle.close()  # its server closed it, or said what nobody asked for
        except IndexError:
            handle = self._handle()
        lines: list[bytes] = []
        blocks = io.BytesIO()
        told = [f"{name}: {value}" for name, value in headers.items()]
        handle.setopt(pycurl.HEADERFUNCTION, lines.append)
        handle.setopt(pycurl.WRITEFUNCTION, blocks.write)
        handle.setopt(pycurl.URL, url)
        handle.setopt(pycurl.CONNECTTIMEOUT_MS, _milliseconds(connections.PATIENCE.connect, deadline))
        handle.setopt(pycurl.TIMEOUT_MS, _milliseconds(math.inf, deadline))
        handle.setopt(pycurl.LOW_SPEED_TIME, math.ceil(connections.PATIENCE.silence))
        if keys is not None:
            handle.setopt(pycurl.AWS_SIGV4, f"aws:amz:{keys.region}:s3")
            handle.setopt(pycurl.USERNAME, keys.access)
            handle.setopt(pycurl.PASSWORD, keys.secret)
        if method == "PUT":
            handle.setopt(pycurl.POSTFIELDS, body)
            handle.setopt(pycurl.CUSTOMREQUEST, "PUT")
            told += ["Expect:"] if "Content-Type" in headers else ["Expect:", "Content-Type:"]
        else:
            handle.setopt(pycurl.HTTPGET, True)
            handle.unsetopt(pycurl.CUSTOMREQUEST)
        handle.setopt(pycurl.HTTPHEADER, told)
        # Asked now and then, whether to go on; and only in between does the main thread see a signal.
        watched = deadline.shared or threading.current_thread() is threading.main_thread()
        handle.setopt(pycurl.NOPROGRESS, not watched)
        if watched:
            handle.setopt(pycurl.XFERINFOFUNCTION, lambda *_: deadline.left() <= 0)
        broken = ""
        try:
            handle.perform()
        except pycurl.error as error:
            broken = handle.errstr()
            if not blocks.tell() or error.args[0] not in _BROKEN:
                raise
        finally:
            status: int = handle.getinfo(pycurl.RESPONSE_CODE)
            if method == "PUT":
                # It holds the body, and would sign the next request with its hash.
                handle.setopt(pycurl.POSTFIELDS, b"")
            self._keep(handle)
        return status, _headers(lines), blocks.getvalue(), broken

    def _keep(self, handle: pycurl.Curl) -> None:
        """Keep a handle whose connection is open for the next request."""
        if len(self._idle) < POOL and handle.getinfo(pycurl.ACTIVESOCKET) >= 0:
            self._idle.append(handle)
        else:
            handle.close()

    def _handle(self) -> pycurl.Curl:
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
        handle.setopt(pycurl.CAINFO_BLOB, self._authorities)
        return handle


def get(pool: Any, url: str, headers: dict[str, str], keys: Keys | None = None) -> Answer | None:
    """Ask for a file, and return the answer; None where it has to be asked for in the careful way.

    Args:
        pool: of `connections.pool`, which is the careful way.
        url: http(s)://host/path
        headers: of the request.
        keys: who signs it.
    """
    return _request(pool, "GET", url, headers, keys, b"")


def put(
    pool: Any, url: str, headers: dict[str, str], keys: Keys | None, body: bytes
) -> dict[str, str] | None:
    """Send a file, and return the headers of the answer; None where it has to be sent in the careful way.

    What the server has then is unknown: nothing of it, or all.

    Args:
        pool: of `connections.pool`, which is the careful way.
        url: http(s)://host/path
        headers: of the request, without `Content-Length`.
        keys: who signs it.
        body: the content.
    """
    answer = _request(pool, "PUT", url, headers, keys, body)
    return answer.headers if answer else None


def _request(
    pool: Any, method: str, url: str, headers: dict[str, str], keys: Keys | None, body: bytes
) -> Answer | None:
    """Send a request; return its answer if it is one of success."""
    found = _PLAIN.fullmatch(url)
    if found is None or "/." in url or pool.proxy is not None:
        return None
    server = (found[1], found[2])
    # A handle that has keys signs whatever it sends.
    name = (server, keys is None)
    line = pool.lines.get(name)
    if line is None:
        line = pool.lines.setdefault(name, _Line(pool.authorities))
    deadline = connections.current()
    if line.unplain or deadline.left() <= 0:
        return None
    try:
        status, told, content, broken = line.ask(method, url, headers, keys, body, deadline)
    except pycurl.error as error:
        if error.args[0] != pycurl.E_FILESIZE_EXCEEDED:
            deadline.sleep(backoff(1))
        return None
    connections.answered(server)
    if status in (200, 206):
        if "transfer-encoding" not in told and "content-length" in told:
            return Answer(told, content, broken)
        line.unplain = True
    line.unplain |= status in (301, 302, 303, 307, 308)
    if status in BUSY:
        asked = told.get("retry-after", "")
        deadline.sleep(float(asked) if asked.isdecimal() else backoff(1))
    return None


def _headers(lines: list[bytes]) -> dict[str, str]:
    """Return the headers of an answer by name in lower case."""
    parts = (line.decode("latin-1").partition(":") for line in lines)
    return {name.lower(): value.strip() for name, colon, value in parts if colon}


def _milliseconds(most: float, deadline: Deadline) -> int:
    return int(1000 * min(most, max(deadline.left(), 0.1)))
