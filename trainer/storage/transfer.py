"""Files read from servers: in pieces side by side, gone on with where a connection broke, and checked.

A backend gives one function that asks for a range; everything else is the same for all. Pieces go
straight to their place in a file or a buffer, so that memory does not grow with the file.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import urllib3

from trainer.errors import StorageError
from trainer.storage import connections, failures
from trainer.storage.answers import Head, head_of
from trainer.storage.connections import Deadline, backoff
from trainer.storage.sinks import Sink

PIECE = 4 * 1024 * 1024
"""Bytes of one request: large enough that 20 ms of waiting do not matter, small enough to repeat."""

THREADS = 16
"""Pieces of one file under way at a time."""

_BLOCK = 256 * 1024
_TIMES = 3

Opener = Callable[[int, int, str], urllib3.BaseHTTPResponse]
"""Asks for the bytes from `start` to before `stop` of the content with an ETag ("" for any), and
returns the answer unread; (0, 0) asks for all. It raises `Empty` if there is nothing at `start`."""


class Empty(Exception):
    """The file has no byte at the place that was asked for."""


class Remote:
    """One file on a server, from which pieces are read until `close`."""

    def __init__(self, uri: str, open_range: Opener) -> None:
        self.uri = uri
        self.head: Head | None = None
        """Known after the first answer, and binding from then on."""
        self._open = open_range
        self._given_up = threading.Event()
        self._answers: set[urllib3.BaseHTTPResponse] = set()

    def ask(self, start: int, stop: int) -> urllib3.BaseHTTPResponse:
        """Ask for a range, and return the answer unread.

        Raises:
            Empty: there is nothing.
            StorageError: it cannot be had, or is another file than before.
        """
        changed = failures.Changed(
            f"{self.uri} changed while it was read", fix="run again when nobody writes to it"
        )
        try:
            response = self._open(start, stop, self.head.etag if self.head else "")
        except Empty:
            if self.head is None:
                raise
            raise changed from None  # there was a byte at this place before
        head = head_of(response)
        if self.head is None:
            self.head = head
        same = (head.size, head.etag) == (self.head.size, self.head.etag)
        if not same or head.start > start:
            response.close()
            raise changed
        return response

    def copy(
        self, start: int, stop: int | None, write: Callable[[int, bytes], None], response: Any = None
    ) -> int:
        """Read a range to its end, going on after every break, and return where it ended.

        Args:
            start: the first byte.
            stop: the byte after the last; None for all that comes, where the size is not known.
            write: takes a place in the file and bytes.
            response: an answer to `ask(start, ...)`, if there is one already.

        Raises:
            StorageError: the deadline has passed, or there is no sense in going on.
        """
        seconds = connections.PATIENCE.total + ((stop or start) - start) / connections.PATIENCE.rate
        deadline, place, failed = Deadline(seconds, self._given_up), start, 0
        with connections.until(deadline):
            while True:
                error: Exception | None = None
                try:
                    response = response or self.ask(place, stop or place + PIECE)
                    for data in self._stream(response, place, stop, deadline):
                        write(place, data)
                        place, failed = place + len(data), 0
                    if stop is None or place >= stop:
                        return place
                except urllib3.exceptions.HTTPError as caught:
                    error = caught
                finally:
                    _close(response)
                    response = None
                failed += 1
                if deadline.left() <= 0:
                    cause = error or urllib3.exceptions.ProtocolError(f"after {place:,} bytes")
                    raise failures.explain_network(cause, self.uri, "read") from error
                deadline.sleep(backoff(failed))

    def _stream(
        self, response: urllib3.BaseHTTPResponse, place: int, stop: int | None, deadline: Deadline
    ) -> Iterator[bytes]:
        """Yield what an answer holds from `place` on, as it arrives."""
        ahead = place - head_of(response).start
        left = None if stop is None else stop - place
        self._answers.add(response)
        try:
            # read1 returns what has arrived: a server that sends a byte now and then is noticed.
            while left != 0 and (data := response.read1(_BLOCK, decode_content=False)):
                if deadline.left() <= 0:
                    raise urllib3.exceptions.ReadTimeoutError(None, "", "too slow")  # type: ignore[arg-type]
                if ahead:
                    ahead, data = max(0, ahead - len(data)), data[ahead:]
                if left is not None:
                    data = data[:left]
                    left -= len(data)
                if data:
                    yield data
        finally:
            self._answers.discard(response)

    def close(self) -> None:
        """Let every thread that still reads end now."""
        self._given_up.set()
        for response in list(self._answers):
            with suppress(Exception):  # it may end by itself in this moment
                response.shutdown()


def fetch(
    uri: str, open_range: Opener, sink: Sink, *, start: int = 0, stop: int | None = None, sha256: str = ""
) -> int:
    """Read a file, or a range of it, into a sink; check its hash where it is whole and one is known.

    Args:
        uri: for messages.
        open_range: asks for ranges.
        sink: takes the bytes, the first at place 0.
        start: the first byte.
        stop: the byte after the last; None for the end of the file.
        sha256: what the whole file's hash must be; "" for what the store tells of it, if anything.

    Returns:
        the number of bytes.

    Raises:
        StorageError: it cannot be read, or arrives damaged again and again.
    """
    for attempt in range(1, _TIMES + 1):
        remote = Remote(uri, open_range)
        try:
            return _fetch(remote, sink, start, stop, sha256)
        except (failures.Changed, _Damaged):
            if attempt == _TIMES:
                raise
        finally:
            remote.close()
        time.sleep(backoff(attempt))
    raise AssertionError("unreachable")


class _Damaged(StorageError):
    """The bytes are not those whose hash is known."""


def _fetch(remote: Remote, sink: Sink, start: int, stop: int | None, sha256: str) -> int:
    with connections.until(Deadline(connections.PATIENCE.total)):
        try:
            first = remote.ask(start, start + PIECE if stop is None else min(stop, start + PIECE))
        except Empty:
            if start:
                sink.resize(0)
                return 0
            first = remote.ask(0, 0)  # an empty file has no range, but a hash
    head = remote.head
    assert head is not None
    end = head.size if stop is None or head.size is None else min(stop, head.size)
    step = PIECE if head.ranges and end is not None else None
    edges = [start, *range(start + step, end, step)] if step and end else [start]
    stops = [*edges[1:], end]
    check = Check(head, sha256, whole=start == 0 and end == head.size)
    if end is not None:
        sink.resize(end - start)

    def read(edge: int, until: int | None, response: Any = None) -> int:
        return remote.copy(edge, until, lambda place, data: sink.write(place - start, data), response)

    with _threads(len(edges) - 1, remote) as submit:
        others = [submit(read, edge, until) for edge, until in zip(edges[1:], stops[1:], strict=True)]
        done = read(edges[0], stops[0], first)
        check.update(sink.blocks(0, done - start))
        for future in others:
            before, done = done, future.result()
            check.update(sink.blocks(before - start, done - start))
    sink.resize(done - start)
    check.compare(remote.uri)
    return done - start


@contextmanager
def _threads(count: int, remote: Remote) -> Iterator[Callable[..., Future[int]]]:
    """Give what starts a task in a thread; when the block fails, end them all before it is left."""
    pool = ThreadPoolExecutor(max(1, min(count, THREADS - 1)), "read")
    try:
        yield pool.submit
    except BaseException:
        remote.close()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


class Check:
    """The hash of a content, while it arrives in order."""

    def __init__(self, head: Head, sha256: str, *, whole: bool) -> None:
        self._name, self._wanted = ("sha256", sha256) if sha256 else (head.algorithm, head.digest)
        self._hash = hashlib.new(self._name, usedforsecurity=False) if whole and self._wanted else None

    def update(self, blocks: Iterable[bytes | bytearray]) -> None:
        """Count bytes in."""
        if self._hash is not None:
            for block in blocks:
                self._hash.update(block)

    def compare(self, uri: str) -> None:
        """Raise `_Damaged` if the content is another one."""
        if self._hash is not None and self._hash.hexdigest() != self._wanted:
            raise _Damaged(
                f"{uri} is damaged: its {self._name} is {self._hash.hexdigest()}, not {self._wanted}",
                fix="it was read again and differs still: delete it and have it written again",
            )


def _close(response: Any) -> None:
    """Give the connection back, or close it when something is left in it."""
    if response is not None:
        response.close()
        response.release_conn()
