"""The one thread of the local server that decodes images and runs the model, one request after the other.

So the memory of one image is the most that images take, and the event loop is free to answer, to refuse
and to end.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from trainer.export.serving_limits import RequestRefused, ending

T = TypeVar("T")

MOST_WAITING = 32
"""Requests that wait for their turn; further ones are refused."""

GRACE_SECONDS = 2.5
"""How long the request that is computed when the server is to end may still take."""


class ModelThread:
    """Calls functions one at a time."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]]] = queue.SimpleQueue()
        self._pending: dict[asyncio.Future[Any], None] = {}
        self._ending = False
        self._idle = threading.Event()
        self._idle.set()
        # A decoder cannot be stopped: a daemon's does not hold up the end of the process.
        threading.Thread(target=self._work, name="model", daemon=True).start()

    async def run(self, job: Callable[[], T]) -> T:
        """Return what a function returns, when its turn has come.

        Raises:
            RequestRefused: too many wait already, or the server is ending.
        """
        if self._ending:
            raise ending()
        if len(self._pending) > MOST_WAITING:
            raise RequestRefused(503, f"{MOST_WAITING} requests wait already: try again")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._pending[future] = None
        self._jobs.put((job, future))
        try:
            return await future
        finally:
            self._pending.pop(future, None)

    def end(self) -> None:
        """Refuse at once what waits and what comes, and after some seconds what is being computed."""
        self._ending = True
        computed, *waiting = self._pending or (None,)
        for future in waiting:
            _settle(future, ending())
        if computed:
            asyncio.get_running_loop().call_later(GRACE_SECONDS, _settle, computed, ending())

    @property
    def idle(self) -> bool:
        """Tell whether nothing is computed."""
        return self._idle.is_set()

    def _work(self) -> None:
        while True:
            job, future = self._jobs.get()
            if future.done():
                continue
            self._idle.clear()
            try:
                value = job()
            except Exception as error:  # It is the request's, not this thread's.
                value = error
            del job  # It holds the request's body.
            self._idle.set()
            with suppress(RuntimeError):  # The loop is closed: the process ends.
                future.get_loop().call_soon_threadsafe(_settle, future, value)
            del future, value


def _settle(future: "asyncio.Future[Any]", value: Any) -> None:
    if future.done():
        return
    if isinstance(value, Exception):
        future.set_exception(value)
    else:
        future.set_result(value)
