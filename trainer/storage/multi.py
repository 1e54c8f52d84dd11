"""Many files read side by side by one thread, and slow calls beside them in threads.

Each thread that waits for a file takes the interpreter's lock anew for every block that arrives, and
with dozens of them most of the time goes into handing it over: libcurl's multi interface lets one thread
wait for all. What it does not get at the first attempt is read in the careful way, in a thread.
"""

import hashlib
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import pycurl

from trainer import storage
from trainer.errors import StorageError
from trainer.storage import connections, handles, quick
from trainer.storage.answers import head_of
from trainer.storage.connections import Deadline, backoff
from trainer.storage.handles import Answer, Exchange, Line
from trainer.storage.signing import Keys

_LONGEST = 1.0
"""Seconds between two looks at what libcurl has to do, at most."""

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


@dataclass(slots=True)
class _Read:
    """A file that is under way."""

    tag: Any
    uri: str
    line: Line
    exchange: Exchange


class Many:
    """Reads and calls that are under way; not to be shared by threads.

    Args:
        threads: of calls, and of reads that need care.
    """

    def __init__(self, threads: int) -> None:
        self.busy = 0
        """How many are under way."""
        self._closed = threading.Event()
        self._threads = ThreadPoolExecutor(threads, "many")
        self._done: deque[tuple[Any, Any]] = deque()
        self._called: deque[tuple[Any, Future[Any]]] = deque()
        self._reads: dict[pycurl.Curl, _Read] = {}
        self._servers: dict[str, Any] = {}
        self._careful: set[str] = set()
        self._caught: BaseException | None = None
        self._idle: dict[Line, list[pycurl.Curl]] = {}
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._woken, _READ)
        self._due: float | None = None
        self._multi = pycurl.CurlMulti()
        self._multi.setopt(pycurl.M_SOCKETFUNCTION, self._watch)
        self._multi.setopt(pycurl.M_TIMERFUNCTION, self._time)

    def __enter__(self) -> "Many":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give up what is under way."""
        self._closed.set()
        for handle in self._reads:
            with suppress(pycurl.error):  # a signal may have come before it was added
                self._multi.remove_handle(handle)
            handle.close()
        for idle in self._idle.values():
            for handle in idle:
                handle.close()
        self._multi.close()
        self._threads.shutdown(cancel_futures=True)
        self._selector.close()
        self._waker.close()
        self._woken.close()

    def read(self, tag: Hashable, uri: str) -> None:
        """Begin to read a file whole; `wait` gives its bytes, or a StorageError."""
        self.busy += 1
        found = self._request(uri)
        line = handles.line(found[0], found[1], found[3]) if found else None
        if found is None or line is None:
            self._submit(tag, self._read_after, 0.0, uri)
            return
        _, url, headers, keys = found
        idle = self._idle.setdefault(line, [])
        handle = idle.pop() if idle else line.handle()
        deadline = Deadline(connections.PATIENCE.total)
        exchange = Exchange(handle, "GET", url, headers, keys, b"", deadline)
        self._reads[handle] = _Read(tag, uri, line, exchange)
        self._multi.add_handle(handle)

    def call(self, tag: Hashable, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function in a thread; `wait` gives what it returns, or its StorageError."""
        self.busy += 1
        self._submit(tag, function, *arguments)

    def wait(self, seconds: float | None = None) -> list[tuple[Any, Any]]:
        """Return tags with what came of them: a value, or a StorageError.

        Args:
            seconds: to wait for the first; None for as long as it takes. With nothing under way, none.

        Raises:
            Exception: what a call raised, StorageErrors apart.
        """
        end = None if seconds is None else time.monotonic() + seconds
        while self.busy:
            self._turn(end)
            while self._called:
                tag, future = self._called.popleft()
                error = future.exception()
                if error is not None and not isinstance(error, StorageError):
                    self.busy -= 1
                    raise error
                self._done.append((tag, error or future.result()))
            if self._done or (end is not None and time.monotonic() >= end):
                break
        found = list(self._done)
        self._done.clear()
        self.busy -= len(found)
        return found

    def _request(self, uri: str) -> tuple[Any, str, dict[str, str], Keys | None] | None:
        """Return what asks for a file: connections, address, headers, keys; None where it needs care."""
        # What the environment says of a server is looked up once: it takes as long as half a request.
        server = "/".join(uri.split("/", 3)[:3])
        if server in self._careful:
            return None
        try:
            if storage.scheme(uri) in storage.WEB:
                from trainer.storage import web

                if server not in self._servers:
                    self._servers[server] = connections.pool(uri)
                return self._servers[server], uri, dict(web.HEADERS), None
            if storage.scheme(uri) in storage.OBJECT_STORES:
                from trainer.storage import environment, object_store

                if server not in self._servers:
                    self._servers[server] = environment.client(storage.scheme(uri))
                return object_store.get_request(self._servers[server], uri, {})
        except StorageError:
            # To find that out may take long, and would hold up all others: from now on in a thread.
            self._careful.add(server)
        return None

    def _turn(self, end: float | None) -> None:
        """Wait until something can be done, and do it."""
        now = time.monotonic()
        waits = [_LONGEST, *(max(0.0, until - now) for until in (self._due, end) if until is not None)]
        ready = self._selector.select(0 if self._called or self._done else min(waits))
        if self._due is not None and time.monotonic() >= self._due:
            self._due = None
            self._act(pycurl.SOCKET_TIMEOUT, 0)
        for key, events in ready:
            if key.fileobj is self._woken:
                self._woken.recv(4096)
                continue
            bits = (pycurl.CSELECT_IN if events & _READ else 0) | (
                pycurl.CSELECT_OUT if events & _WRITE else 0
            )
            self._multi.socket_action(key.fd, bits)
        left = 1
        while left:
            left, whole, broken = self._multi.info_read()
            for handle in whole:
                self._end(handle, 0)
            for handle, code, _ in broken:
                self._end(handle, code)

    def _act(self, descriptor: int, events: int) -> None:
        """Let libcurl do what there is to do."""
        try:
            self._multi.socket_action(descriptor, events)
        finally:
            if self._caught is not None:
                raise self._caught

    def _end(self, handle: pycurl.Curl, code: int) -> None:
        """Take the answer of a read that has ended; what is not plain or not whole needs care."""
        self._multi.remove_handle(handle)
        read = self._reads.pop(handle)
        status, headers, body = read.exchange.end()
        self._idle[read.line].append(handle)
        wait: float | None = 0.0 if code == pycurl.E_FILESIZE_EXCEEDED else backoff(1)
        if not code:
            wait = quick.judge(read.line, status, headers)
        # A part that nobody asked for is no file.
        if wait is None and status == 200 and _is_sound(Answer(headers, body), body):
            self._done.append((read.tag, body))
        else:
            self._submit(read.tag, self._read_after, wait or 0.0, read.uri)

    def _read_after(self, seconds: float, uri: str) -> bytes:
        """Read a file in the careful way, after a while, as long as somebody waits for it."""
        deadline = Deadline(connections.PATIENCE.total, self._closed)
        deadline.sleep(seconds)
        with connections.until(deadline):
            return storage.read_bytes(uri)

    def _submit(self, tag: Any, function: Callable[..., Any], *arguments: Any) -> None:
        def note(future: Future[Any]) -> None:
            self._called.append((tag, future))
            with suppress(OSError):  # it is full, and wakes anyway; or closed
                self._waker.send(b"!")

        self._threads.submit(function, *arguments).add_done_callback(note)

    def _watch(self, what: int, descriptor: int, _multi: Any, _data: Any) -> None:
        """Wait for a socket from now on, or no more, as libcurl wishes."""
        known = descriptor in self._selector.get_map()
        if what == pycurl.POLL_REMOVE:
            if known:
                self._selector.unregister(descriptor)
            return
        events = (_READ if what & pycurl.POLL_IN else 0) | (_WRITE if what & pycurl.POLL_OUT else 0)
        (self._selector.modify if known else self._selector.register)(descriptor, events)

    def _time(self, milliseconds: int) -> None:
        """Call libcurl after that time, or not before a socket is ready."""
        try:
            self._due = None if milliseconds < 0 else time.monotonic() + milliseconds / 1000
        except BaseException as error:  # of a signal; libcurl would turn it into an error of its own
            self._caught = error


def _is_sound(answer: Answer, body: bytes) -> bool:
    """Tell whether a whole file has the hash that the store tells, if it tells one."""
    head = head_of(answer)
    return (
        not head.digest or hashlib.new(head.algorithm, body, usedforsecurity=False).hexdigest() == head.digest
    )
