"""Files read from servers: in pieces side by side, gone on with where a connection broke, and checked.

A backend gives one function that asks for a range; everything else is the same for all. Pieces go
straight to their place in a file or a buffer, so that memory does not grow with the file. A file of
one piece, of which there may be millions, takes one request and no thread.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TypeVar

import urllib3

from trainer.errors import StorageError
from trainer.storage import connections, failures
from trainer.storage.answers import Head, Response, head_of
from trainer.storage.connections import Deadline, backoff
from trainer.storage.sinks import MemorySink, Sink

PIECE = 4 * 1024 * 1024
"""Bytes of one request: large enough that 20 ms of waiting do not matter, small enough to repeat."""

FIRST = 512 * 1024
"""Bytes of the first request for a file of unknown size: most files, whole; and of a large one so
little that its other pieces need not wait long."""

THREADS = 16
"""Pieces of one file under way at a time."""

_BLOCK = 256 * 1024
_TIMES = 3

Opener = Callable[[int, int, str], Response]
"""Asks for the bytes from `start` to before `stop` of the content with an ETag ("" for any), and
returns the answer unread; (0, 0) asks for all. It raises `Empty` if there is nothing at `start`."""


Result = TypeVar("Result")


class Empty(Exception):
    """The file has no byte at the place that was asked for."""


def is_piece(start: int, stop: int) -> bool:
    """Tell whether a range is one of many: its bytes are then taken as they arrive, not at once."""
    return start > 0 and stop - start >= PIECE


class Remote:
    """One file on a server, from which pieces are read until `close`."""

    def __init__(self, uri: str, open_range: Opener) -> None:
        self.uri = uri
        self.head: Head | None = None
        """Known after the first answer, and binding from then on."""
        self._open = open_range
        self._given_up = threading.Event()
        self._work = connections.work()
        self._answers: set[Response] = set()

    def ask(self, start: int, stop: int) -> tuple[Response, int]:
        """Ask for a range; return the answer unread, and the place of its first byte.

        Raises:
            Empty: there is nothing.
            StorageError: it cannot be had, or is another file than before.
        """
        try:
            response = self._open(start, stop, self.head.etag if self.head else "")
        except Empty:
            if self.head is None:
                raise
            raise self._changed() from None  # there was a byte at this place before
        head = head_of(response)
        if self.head is None:
            self.head = head
        same = (head.size, head.etag) == (self.head.size, self.head.etag)
        if not same or head.start > start:
            response.close()
            raise self._changed()
        return response, head.start

    def _changed(self) -> failures.Changed:
        return failures.Changed(
            f"{self.uri} changed while it was read", fix="run again when nobody writes to it"
        )

    def copy(
        self,
        start: int,
        stop: int | None,
        write: Callable[[int, bytes], None],
        first: tuple[Response, int] | None = None,
    ) -> int:
        """Read a range to its end, going on after every break, and return where it ended.

        Args:
            start: the first byte.
            stop: the byte after the last; None for all that comes, where the size is not known.
            write: takes a place in the file and bytes.
            first: what `ask(start, ...)` returned, if that was asked already.

        Raises:
            StorageError: the deadline has passed, or there is no sense in going on.
        """
        seconds = connections.PATIENCE.total + ((stop or start) - start) / connections.PATIENCE.rate
        deadline, place, failed = Deadline(seconds, self._given_up, self._work), start, 0
        with connections.until(deadline):
            while True:
                error: Exception | None = None
                answer: tuple[Response, int] | None = None
                try:
                    answer, first = first or self.ask(place, stop or place + PIECE), None
                    for data in self._stream(*answer, place, stop, deadline):
                        write(place, data)
                        place, failed = place + len(data), 0
                    if stop is None or place >= stop:
                        return place
                except urllib3.exceptions.HTTPError as caught:
                    error = caught
                finally:
                    if answer is not None:
                        # Gives the connection back, or closes it when something is left in it.
                        answer[0].close()
                        answer[0].release_conn()
                failed += 1
                if deadline.left() <= 0:
                    cause = error or urllib3.exceptions.ProtocolError(f"after {place:,} bytes")
                    raise failures.explain_network(cause, self.uri, "read") from error
                deadline.sleep(backoff(failed))

    def _stream(
        self, response: Response, begin: int, place: int, stop: int | None, deadline: Deadline
    ) -> Iterator[bytes]:
        """Yield what an answer that begins at `begin` holds from `place` on, as it arrives."""
        ahead = place - begin
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


def fetch(uri: str, open_range: Opener, sink: Sink, *, sha256: str = "") -> int:
    """Read a file into a sink; check its hash where one is known.

    Args:
        uri: for messages.
        open_range: asks for ranges.
        sink: takes the bytes.
        sha256: what the file's hash must be; "" for what the store tells of it, if anything.

    Returns:
        the number of bytes.

    Raises:
        StorageError: it cannot be read, or arrives damaged again and again.
    """
    return _repeated(uri, open_range, lambda remote: _Reading(remote, 0, None, sha256).into(sink))


def fetch_bytes(
    uri: str, open_range: Opener, *, start: int = 0, stop: int | None = None, sha256: str = ""
) -> bytes:
    """Read a file, or the bytes from `start` to before `stop` of it, into memory; otherwise as `fetch`."""

    def read(remote: Remote) -> bytes:
        reading = _Reading(remote, start, stop, sha256)
        if len(reading.edges) == 1:
            return reading.at_once()
        sink = MemorySink()
        reading.into(sink)
        return sink.value()

    return _repeated(uri, open_range, read)


def _repeated(uri: str, open_range: Opener, read: Callable[[Remote], Result]) -> Result:
    """Read again what changed meanwhile, or arrived damaged."""
    for attempt in range(1, _TIMES + 1):
        remote = Remote(uri, open_range)
        try:
            return read(remote)
        except (failures.Changed, _Damaged):
            if attempt == _TIMES:
                raise
        finally:
            remote.close()
        time.sleep(backoff(attempt))
    raise AssertionError("unreachable")


class _Damaged(StorageError):
    """The bytes are not those whose hash is known."""


class _Reading:
    """A file, or a part of it, whose first piece was asked for."""

    def __init__(self, remote: Remote, start: int, stop: int | None, sha256: str) -> None:
        self._remote, self._start = remote, start
        step = start + min(FIRST, PIECE) if stop is None or stop - start > PIECE else stop
        with connections.until(Deadline(connections.PATIENCE.total)):
            try:
                self._first: tuple[Response, int] | None = remote.ask(start, step)
            except Empty:
                # An empty file has no range, but a hash.
                self._first = None if start else remote.ask(0, 0)
        head = remote.head or Head(start, start, "", True, "", "")
        self._end = head.size if stop is None or head.size is None else min(stop, head.size)
        self.edges = [start]
        """Where its pieces begin."""
        if head.ranges and self._end:
            self.edges += range(step, self._end, PIECE)
        self._check = Check(head, sha256, whole=start == 0 and self._end == head.size)

    def at_once(self) -> bytes:
        """Return what consists of one piece."""
        if self._first is None:
            return b""
        blocks: list[bytes] = []
        self._remote.copy(self._start, self._end, lambda _, data: blocks.append(data), self._first)
        self._check.update(blocks)
        self._check.compare(self._remote.uri)
        return blocks[0] if len(blocks) == 1 else b"".join(blocks)

    def into(self, sink: Sink) -> int:
        """Put it into a sink, the first byte at place 0, and return how many there are."""
        start, remote = self._start, self._remote
        if self._end is not None:
            sink.resize(self._end - start)

        def read(edge: int, until: int | None, first: tuple[Response, int] | None = None) -> int:
            return remote.copy(edge, until, lambda place, data: sink.write(place - start, data), first)

        with _threads(len(self.edges) - 1, remote) as submit:
            stops = [*self.edges[1:], self._end]
            others = [submit(read, *ends) for ends in zip(self.edges[1:], stops[1:], strict=True)]
            done = read(self.edges[0], stops[0], self._first)
            self._check.update(sink.blocks(0, done - start))
            for future in others:
                before, done = done, future.result()
                self._check.update(sink.blocks(before - start, done - start))
        sink.resize(done - start)
        self._check.compare(remote.uri)
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
