"""One request through libcurl, answered whole in memory, with little around it.

The full client does around a request several times the work of the request itself, and of small
files there are millions. Here a request is sent once, outside of the interpreter's lock, over a
connection that is kept; and only a plain answer to it is taken: 200 or 206 with a length that fits
in memory. Whatever else comes, be it a refusal, a redirect, a busy server, an answer in chunks or a
connection that breaks, and a proxy on the way, is not judged here: the careful way knows all of these
and tries again until its deadline; it then asks once more.
"""

import threading
from typing import Any

import pycurl
from urllib3.util.wait import wait_for_read

from trainer.storage import connections, handles
from trainer.storage.connections import BUSY, POOL, Deadline, backoff
from trainer.storage.handles import Answer, Exchange, Line
from trainer.storage.signing import Keys

_BROKEN = (pycurl.E_PARTIAL_FILE, pycurl.E_RECV_ERROR, pycurl.E_OPERATION_TIMEDOUT)


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
    line, deadline = handles.line(pool, url, keys), connections.current()
    if line is None or deadline.left() <= 0:
        return None
    exchange = Exchange(_take(line), method, url, headers, keys, body, deadline)
    try:
        broken = _perform(exchange, deadline)
    except pycurl.error as error:
        if error.args[0] != pycurl.E_FILESIZE_EXCEEDED:
            deadline.sleep(backoff(1))
        return None
    finally:
        status, told, content = exchange.end()
        _keep(line, exchange.handle)
    wait = judge(line, status, told)
    if wait is None:
        return Answer(told, content, broken)
    deadline.sleep(wait)
    return None


def judge(line: Line, status: int, headers: dict[str, str]) -> float | None:
    """Note what an answer tells of its server; return None if it is plain, else the seconds to wait.

    Args:
        line: to the server.
        status: of the answer.
        headers: of the answer.
    """
    connections.answered(line.server)
    success = status in (200, 206)
    if success and "transfer-encoding" not in headers and headers.get("content-length", "").isdecimal():
        return None
    line.unplain |= success or status in (301, 302, 303, 307, 308)
    if status not in BUSY:
        return 0.0
    asked = headers.get("retry-after", "")
    return float(asked) if asked.isdecimal() else backoff(1)


def _perform(exchange: Exchange, deadline: Deadline) -> str:
    """Send a request and wait; return why the body of its answer is not whole, "" if it is.

    Raises:
        pycurl.error: there is no connection, it breaks, or the server is silent; the answer is none
            of HTTP, or too large.
    """
    handle = exchange.handle
    # Asked now and then, whether to go on; and only in between does the main thread see a signal.
    watched = deadline.shared or threading.current_thread() is threading.main_thread()
    handle.setopt(pycurl.NOPROGRESS, not watched)
    if watched:
        handle.setopt(pycurl.XFERINFOFUNCTION, lambda *_: deadline.left() <= 0)
    try:
        handle.perform()
    except pycurl.error as error:
        if not exchange.begun or error.args[0] not in _BROKEN:
            raise
        return str(handle.errstr())
    return ""


def _take(line: Line) -> pycurl.Curl:
    """Return a handle whose connection is open, or a new one."""
    try:
        while wait_for_read((handle := line.idle.pop()).getinfo(pycurl.ACTIVESOCKET), 0):
            handle.close()  # its server closed it, or said what nobody asked for
    except IndexError:
        handle = line.handle()
    return handle


def _keep(line: Line, handle: pycurl.Curl) -> None:
    """Keep a handle whose connection is open for the next request."""
    if len(line.idle) < POOL and handle.getinfo(pycurl.ACTIVESOCKET) >= 0:
        line.idle.append(handle)
    else:
        handle.close()
