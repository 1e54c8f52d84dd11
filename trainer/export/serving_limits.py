"""What a request to the local server may take: time, memory, and one of a number of connections.

A time-out of the web server's own does not end who sends a header or a body byte by byte, or never reads what
is answered; so every phase of a connection has an end here.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from uvicorn.protocols.http.h11_impl import H11Protocol

from trainer.base.errors import DataError

MOST_BYTES = 256 * 1024 * 1024
"""Largest body of a request."""

BODY_SECONDS = 60.0
"""Longest that a body may take to arrive."""

_MOST_HELD = 2 * MOST_BYTES
"""Bytes of all bodies together that are in memory."""

_NO_ROOM = b"too many connections to this server: try again"


class RequestRefused(DataError):
    """A request that is refused with an HTTP status of its own."""

    def __init__(self, status: int, message: str, *, fix: str = "") -> None:
        super().__init__(message, fix=fix)
        self.status = status


class LimitedConnection(H11Protocol):
    """A connection of uvicorn's whose phases end, and which is refused where there are too many.

    It is in one of two phases: before the end of a request's header, or in a request until its answer is
    written.
    """

    most = 100
    """Connections at a time."""
    header_seconds = 10.0
    """Longest that a header may take, the first counted from the connection."""
    request_seconds = 300.0
    """Longest from a header to the end of its answer."""
    _timer: asyncio.TimerHandle | None = None
    _in_request: bool | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, or refuse it at once."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            head = b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain\r\nretry-after: 5\r\n"
            length = b"content-length: %d\r\nconnection: close\r\n\r\n" % len(_NO_ROOM)
            transport.write(head + length + _NO_ROOM)
            transport.close()
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Take bytes of the client's."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Note that an answer has been handed to the operating system, or waits to be."""
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        if self._timer:
            self._timer.cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        in_request = self.cycle is not None and not self.cycle.response_complete
        if in_request == self._in_request:
            return
        self._in_request = in_request
        if self._timer:
            self._timer.cancel()
        seconds = self.request_seconds if in_request else self.header_seconds
        self._timer = self.loop.call_later(seconds, self.transport.abort)


class Bodies:
    """Reads the bodies of requests, which are bounded in time, and in bytes by themselves and together."""

    def __init__(self) -> None:
        self._held = 0
        self._arriving: set[asyncio.Timeout] = set()
        self._ending = False

    @asynccontextmanager
    async def read(self, stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Provide a body, whose bytes count until the end of the context.

        Raises:
            RequestRefused: it is too large, too slow, or the server holds too much or is ending.
        """
        if self._ending:
            raise ending()
        parts, total = [], 0
        try:
            try:
                async with asyncio.timeout(BODY_SECONDS) as timeout:
                    self._arriving.add(timeout)
                    async for part in stream:
                        if total + len(part) > MOST_BYTES:
                            raise RequestRefused(413, f"the request is larger than {MOST_BYTES // 2**20} MiB")
                        if self._held + len(part) > _MOST_HELD:
                            raise RequestRefused(503, "the server holds too many large requests: try again")
                        self._held += len(part)
                        total += len(part)
                        parts.append(part)
            except TimeoutError:
                if self._ending:
                    raise ending() from None
                late = f"the request took longer than {BODY_SECONDS:g} s to arrive"
                raise RequestRefused(408, late) from None
            finally:
                self._arriving.discard(timeout)
            yield b"".join(parts)
        finally:
            self._held -= total

    def end(self) -> None:
        """Refuse what is arriving, and what comes."""
        self._ending = True
        for timeout in self._arriving:
            timeout.reschedule(0)


def ending() -> RequestRefused:
    """Return the refusal of a server that is about to end."""
    return RequestRefused(503, "the server is ending")


T = TypeVar("T")

MOST_WAITING = 32
"""Requests that wait for their turn; further ones are refused."""

GRACE_SECONDS = 2.5
"""How long the request that is computed when the server is to end may still take."""


class ModelThread:
    """Calls functions one at a time."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._pending: dict[Future[Any], asyncio.Future[Any]] = {}
        self._ending = False
        self.idle = True
        """Whether nothing is computed."""

    async def run(self, job: Callable[[], T]) -> T:
        """Return what a function returns, when its turn has come.

        Raises:
            RequestRefused: too many wait already, or the server is ending.
        """
        if self._ending:
            raise ending()
        if len(self._pending) > MOST_WAITING:
            raise RequestRefused(503, f"{MOST_WAITING} requests wait already: try again")
        submitted = self._pool.submit(self._compute, job)
        self._pending[submitted] = answer = asyncio.wrap_future(submitted)
        try:
            return await answer
        except asyncio.CancelledError:
            if self._ending:
                raise ending() from None
            raise
        finally:
            del self._pending[submitted]

    def end(self) -> None:
        """Refuse at once what waits and what comes, and after some seconds what is being computed."""
        self._ending = True
        for submitted, answer in self._pending.items():
            if not submitted.cancel():
                asyncio.get_running_loop().call_later(GRACE_SECONDS, answer.cancel)

    def _compute(self, job: Callable[[], T]) -> T:
        self.idle = False
        try:
            return job()
        finally:
            self.idle = True
