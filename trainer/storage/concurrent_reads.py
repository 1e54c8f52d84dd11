"""Many small files read side by side by one thread, and calls beside them in others.

Each thread that waits for obstore takes the interpreter's lock anew when a file came, and with dozens of them
much of the time goes into handing it over (figures: docs/architecture.md). Here one thread waits for all, by
libcurl's multi interface. It asks once: whatever comes back that is not a whole small file with the hash that
is known is read by `reads.py`, in a thread, with its patience, its checks and its messages.
"""

import selectors
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import pycurl

from trainer import storage
from trainer.base.errors import StorageError
from trainer.storage import attempts, environment, reads, traffic
from trainer.storage.addresses import Address, Addresses
from trainer.storage.content_hash import Check, Content, known_hash
from trainer.storage.parallel import Workers
from trainer.storage.reach import Reach, Refused
from trainer.storage.uris import WEB, scheme

_LOOK = 1.0
"""Seconds between two looks at what libcurl has to do, at most."""
_REFUSALS = 3
"""Answers of a server in a row that were no whole small file, after which it is not asked here again."""
_BUFFER = 256 * 1024
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class _Read(NamedTuple):
    """A file that is under way."""

    tag: Hashable
    address: Address
    handle: pycurl.Curl
    headers: list[bytes]
    blocks: list[bytes]
    sha256: str
    """What its hash must be; "" for what the answer tells of it."""


class Many:
    """Reads and calls that are under way side by side; not to be shared by threads.

    Args:
        threads: for calls, and for reads that do not succeed at once; the others wait for their turn.
        reach: where the addresses that `read` gets may lead; None where a user named them all.
    """

    def __init__(self, threads: int, reach: Reach | None = None) -> None:
        self._reach = reach
        self.busy = 0
        """How many were begun, and were not given by `wait`."""
        self._workers = Workers(threads, "many")
        self._results: deque[tuple[Hashable, Any]] = deque()
        self._reads: dict[pycurl.Curl, _Read] = {}
        self._idle: dict[str, list[pycurl.Curl]] = {}
        self._stores: set[str] = set()
        self._addresses = Addresses()
        self._refusals: Counter[str] = Counter()
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._woken, _READ)
        self._due: float | None = None
        self._signalled: BaseException | None = None
        self._multi = pycurl.CurlMulti()
        self._multi.setopt(pycurl.M_SOCKETFUNCTION, self._watch)
        self._multi.setopt(pycurl.M_TIMERFUNCTION, self._time)

    def __enter__(self) -> "Many":
        return self

    def __exit__(self, *_error: object) -> None:
        """Give up what is under way."""
        self._workers.close()
        for handle in self._reads:
            with suppress(pycurl.error):  # a signal may have come before it was added
                self._multi.remove_handle(handle)
        for handle in (*self._reads, *(handle for idle in self._idle.values() for handle in idle)):
            handle.close()
        self._multi.close()
        self._selector.close()
        self._waker.close()
        self._woken.close()

    def read(self, tag: Hashable, uri: str, sha256: str = "") -> None:
        """Begin to read a file whole; `wait` gives its bytes, or a StorageError.

        Args:
            tag: what `wait` names it by.
            uri: the file.
            sha256: what its hash must be, of a file that a user named; "" for what a store tells of it.
        """
        address = None if storage.is_local(uri) else self._address(uri)
        if address is None:
            self._read_with_care(tag, uri, sha256)
            return
        self.busy += 1
        idle = self._idle.setdefault(address.server, [])
        handle = idle.pop() if idle else self._handle(uri, address.server)
        read = _Read(tag, address, handle, [], [], sha256)
        handle.setopt(pycurl.URL, address.url)
        handle.setopt(pycurl.HEADERFUNCTION, read.headers.append)
        handle.setopt(pycurl.WRITEFUNCTION, read.blocks.append)
        self._reads[handle] = read
        self._multi.add_handle(handle)

    def call(self, tag: Hashable, function: Callable[..., Any], *arguments: Any) -> None:
        """Begin to call a function; `wait` gives what it returns, or its StorageError."""
        self.busy += 1

        def task() -> None:
            try:
                result = function(*arguments)
            except BaseException as error:
                result = error
            self._results.append((tag, result))
            with suppress(OSError):  # full, and wakes anyway; or closed
                self._waker.send(b"!")

        self._workers.start(task)

    def wait(self, seconds: float | None = None) -> list[tuple[Any, Any]]:
        """Return tags with what came of them: a value, or a StorageError.

        Args:
            seconds: to wait for the first; None for as long as it takes. With nothing under way, none.

        Raises:
            Exception: what a call raised, StorageErrors apart.
        """
        end = None if seconds is None else time.monotonic() + seconds
        ended: list[tuple[Any, Any]] = []
        while self.busy and not ended:
            self._turn(end)
            while self._results:
                tag, result = self._results[0]
                if isinstance(result, BaseException) and not isinstance(result, StorageError) and ended:
                    break  # it is raised by the next call, when these were given
                self._results.popleft()
                self.busy -= 1
                if isinstance(result, BaseException) and not isinstance(result, StorageError):
                    raise result
                ended.append((tag, result))
            if end is not None and time.monotonic() >= end:
                break
        return ended

    def _read_with_care(self, tag: Hashable, uri: str, sha256: str) -> None:
        if self._reach is None:
            self.call(tag, partial(storage.read_bytes, uri, sha256=sha256))
        else:
            self.call(tag, storage.read_within, uri, self._reach)

    def _address(self, uri: str) -> Address | None:
        """Return where libcurl finds a file; None where it needs care."""
        try:
            if self._reach is not None:
                self._reach.check(uri)
            address = self._addresses(uri)
        except StorageError:
            return None  # the thread that reads it says why
        if self._reach is not None and scheme(uri) not in WEB:
            # An address in data must not have a connection that was opened to a store of the user's.
            self._stores.add(address.server)
        elif address.server in self._stores:
            return None
        return address if address.url and self._refusals[address.server] < _REFUSALS else None

    def _turn(self, end: float | None) -> None:
        """Wait until something can be done, and do it."""
        now = time.monotonic()
        waits = [_LOOK, *(max(0.0, until - now) for until in (self._due, end) if until is not None)]
        ready = self._selector.select(0 if self._results else min(waits))
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
            self._act(key.fd, bits)
        left = 1
        while left:
            left, whole, broken = self._multi.info_read()
            for handle in whole:
                self._end(handle, True)
            for handle, _, _ in broken:
                self._end(handle, False)

    def _act(self, descriptor: int, events: int) -> None:
        """Let libcurl do what there is to do."""
        try:
            self._multi.socket_action(descriptor, events)
        finally:
            if self._signalled is not None:
                raise self._signalled

    def _end(self, handle: pycurl.Curl, is_whole: bool) -> None:
        """Take what came of a read; what is no whole small file is read with care."""
        self._multi.remove_handle(handle)
        read = self._reads.pop(handle)
        traffic.read(sum(map(len, read.blocks)))
        data = _content(read) if is_whole else None
        # The handle is kept, and what it refers to with it.
        read.headers.clear()
        read.blocks.clear()
        server = read.address.server
        self._idle[server].append(handle)
        if data is None:
            self._refusals[server] += 1
            self.busy -= 1
            self._read_with_care(read.tag, read.address.uri, read.sha256)
        else:
            self._refusals[server] = 0
            self._results.append((read.tag, data))

    def _handle(self, uri: str, server: str) -> pycurl.Curl:
        """Return a new handle for a server; it connects only to what is within reach."""
        handle = _handle(server)
        reach = self._reach
        if reach is None or scheme(uri) not in WEB:
            return handle

        def open_socket(_purpose: int, address: Any) -> Any:
            try:
                reach.check_peer(uri, str(address.addr[0]))
                return socket.socket(address.family, address.socktype, address.protocol)
            except (Refused, ValueError, OSError):
                return pycurl.SOCKET_BAD
            except BaseException as error:  # of a signal; libcurl would turn it into an error of its own
                self._signalled = error
                return pycurl.SOCKET_BAD

        handle.setopt(pycurl.OPENSOCKETFUNCTION, open_socket)
        return handle

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
            self._signalled = error


def _handle(server: str) -> pycurl.Curl:
    """Return a new handle with what is the same for all requests to a server."""
    patience = attempts.PATIENCE
    handle = pycurl.Curl()
    handle.setopt(pycurl.NOSIGNAL, True)
    handle.setopt(pycurl.PROXY, "")  # it would look for one in the environment
    handle.setopt(pycurl.HTTP_VERSION, pycurl.CURL_HTTP_VERSION_1_1)
    handle.setopt(pycurl.USERAGENT, "kubedet")
    handle.setopt(pycurl.BUFFERSIZE, _BUFFER)
    handle.setopt(pycurl.MAXFILESIZE_LARGE, reads.PIECE)
    handle.setopt(pycurl.CONNECTTIMEOUT_MS, int(1000 * min(patience.connect, patience.total)))
    handle.setopt(pycurl.TIMEOUT_MS, int(1000 * patience.total / 2))
    handle.setopt(pycurl.LOW_SPEED_LIMIT, 1)
    handle.setopt(pycurl.LOW_SPEED_TIME, max(1, round(patience.silence)))
    if server.startswith("https"):
        handle.setopt(pycurl.CAINFO_BLOB, environment.authorities())
    return handle


def _content(read: _Read) -> bytes | None:
    """Return a file's bytes; None where the answer is none with a whole file and the hash that is known."""
    parts = (line.decode("latin-1").partition(":") for line in read.headers)
    headers = {name.lower(): value.strip() for name, colon, value in parts if colon}
    data = b"".join(read.blocks)
    # Of chunks libcurl tells whether the last one has come; of what ends with its connection nobody does.
    is_whole = headers.get("transfer-encoding") == "chunked" or headers.get("content-length") == str(
        len(data)
    )
    if read.handle.getinfo(pycurl.RESPONSE_CODE) != 200 or not is_whole:
        return None
    known = known_hash(headers.get("x-amz-meta-sha256", ""))
    check = Check(read.address.uri, Content(len(data), headers.get("etag", ""), known), read.sha256)
    check.update(data)
    return data if check.is_same() else None
