"""Limits of the local server: time and memory of a request, and the number of connections.

uvicorn's own timeouts do not stop clients that send a request byte by byte, or never read the answer.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from uvicorn.protocols.http.h11_impl import H11Protocol

from trainer.base.errors import DataError

MOST_BYTES = 256 * 1024 * 1024  # largest body of a request
BODY_SECONDS = 60.0  # time within which a body must arrive
MAX_WAITING = 32  # largest number of waiting requests
GRACE_SECONDS = 2.5  # time for the running request after the server begins to end
_MAX_BYTES_HELD = 2 * MOST_BYTES  # largest total of the bodies in memory

_TOO_MANY_CONNECTIONS = b"too many connections to this server: try again"
T = TypeVar("T")


class RequestRefused(DataError):
    """A request is refused with this HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class LimitedConnection(H11Protocol):
    """uvicorn's connection with a time limit for each of its phases: header, and request with its answer."""

    most = 100  # connections at a time
    header_seconds = 10.0
    request_seconds = 300.0
    _timer: asyncio.TimerHandle | None = None
    _in_request: bool | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most:
            head = b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain\r\nretry-after: 5\r\n"
            length = b"content-length: %d\r\nconnection: close\r\n\r\n" % len(_TOO_MANY_CONNECTIONS)
            transport.write(head + length + _TOO_MANY_CONNECTIONS)
            transport.close()
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
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
    """Reads the bodies of requests, limited in time, in size, and in total size."""

    def __init__(self) -> None:
        self._held = 0
        self._arriving: set[asyncio.Timeout] = set()
        self._ending = False

    @asynccontextmanager
    async def read(self, stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Provide a body, which counts as held until the end of the context."""
        if self._ending:
            raise _ending()
        parts, total = [], 0
        try:
            try:
                async with asyncio.timeout(BODY_SECONDS) as timeout:
                    self._arriving.add(timeout)
                    async for part in stream:
                        if total + len(part) > MOST_BYTES:
                            raise RequestRefused(413, f"the request is larger than {MOST_BYTES // 2**20} MiB")
                        if self._held + len(part) > _MAX_BYTES_HELD:
                            raise RequestRefused(503, "the server holds too many large requests: try again")
                        self._held += len(part)
                        total += len(part)
                        parts.append(part)
            except TimeoutError:
                if self._ending:
                    raise _ending() from None
                late = f"the request took longer than {BODY_SECONDS:g} s to arrive"
                raise RequestRefused(408, late) from None
            finally:
                self._arriving.discard(timeout)
            yield b"".join(parts)
        finally:
            self._held -= total

    def end(self) -> None:
        """Refuse arriving and later bodies."""
        self._ending = True
        for timeout in self._arriving:
            timeout.reschedule(0)


def _ending() -> RequestRefused:
    return RequestRefused(503, "the server is ending")


class ModelThread:
    """Calls functions one at a time, in the order of the requests."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._pending: dict[Future[Any], asyncio.Future[Any]] = {}
        self._ending = False
        self.idle = True

    async def run(self, job: Callable[[], T]) -> T:
        """Call a function after those before it."""
        if self._ending:
            raise _ending()
        if len(self._pending) > MAX_WAITING:
            raise RequestRefused(503, f"{MAX_WAITING} requests wait already: try again")
        submitted = self._pool.submit(self._compute, job)
        self._pending[submitted] = answer = asyncio.wrap_future(submitted)
        try:
            return await answer
        except asyncio.CancelledError:
            if self._ending:
                raise _ending() from None
            raise
        finally:
            del self._pending[submitted]

    def end(self) -> None:
        """Refuse waiting and later requests at once, and the running one after GRACE_SECONDS."""
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
