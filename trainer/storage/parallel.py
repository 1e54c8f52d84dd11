"""Threads for calls that wait for servers, and many reads side by side in them.

A request that a server leaves unanswered cannot be taken back: whoever gives it up goes on, and its thread
ends when the request does. These threads are daemons, so that no exit waits for a silent server, which it
would with those of ThreadPoolExecutor.
"""

import math
import queue
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from types import TracebackType
from typing import Any

from trainer import storage
from trainer.errors import Interrupted, StorageError

_LOOK = 0.2
"""Seconds between two looks at whether the work was given up."""

_current = threading.local()


class Workers:
    """Threads that are started as they are needed, for the thread that made this and those below it.

    Args:
        count: how many there are at most.
        name: what they are called.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._closed = threading.Event()
        self._given_up: tuple[threading.Event, ...] = (self._closed, *getattr(_current, "given_up", ()))
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads = 0
        self._idle = threading.Semaphore(0)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Let a thread call a function."""
        future: Future[Any] = Future()
        self._tasks.put((future, lambda: function(*arguments)))
        if not self._idle.acquire(blocking=False) and self._threads < self._count:
            self._threads += 1
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return future

    def result(self, future: Future[Any]) -> Any:
        """Wait for what `submit` returned; a signal is seen meanwhile, whichever thread it reaches.

        Raises:
            Interrupted: the work was given up, here or by whoever this is done for.
        """
        while True:
            try:
                return future.result(timeout=_LOOK)
            except TimeoutError:
                if future.done():  # meanwhile, or with an error like this one
                    return future.result()
                if any(event.is_set() for event in self._given_up):
                    raise Interrupted("the reading was given up") from None

    def close(self) -> None:
        """Give up what is under way, and end the threads."""
        self._closed.set()
        for _ in range(self._threads):
            self._tasks.put(None)

    def _work(self) -> None:
        _current.given_up = self._given_up
        while (task := self._tasks.get()) is not None:
            future, call = task
            if not self._closed.is_set() and future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            del task, future, call  # else the last result is kept until the next task
            self._idle.release()


def is_given_up() -> bool:
    """Tell whether nobody waits any more for what this thread does."""
    return watch()()


def watch() -> Callable[[], bool]:
    """Return what tells in any thread whether the work of this one was given up."""
    events: tuple[threading.Event, ...] = getattr(_current, "given_up", ())
    return lambda: any(event.is_set() for event in events)


def pause(seconds: float) -> None:
    """Wait, but not after the work was given up."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0 and not is_given_up():
        time.sleep(min(left, _LOOK) if hasattr(_current, "given_up") else left)


class Many:
    """Reads and calls that are under way side by side; not to be shared by threads.

    Args:
        threads: how many are under way at a time; the others wait for their turn.
    """

    def __init__(self, threads: int) -> None:
        self.busy = 0
        """How many were begun, and were not given by `wait`."""
        self._workers = Workers(threads, "many")
        self._ended: queue.SimpleQueue[tuple[Hashable, Future[Any]]] = queue.SimpleQueue()
        self._results: list[tuple[Any, Any]] = []

    def __enter__(self) -> "Many":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give up what is under way."""
        self._workers.close()

    def read(self, tag: Hashable, uri: str) -> None:
        """Begin to read a file whole; `wait` gives its bytes, or a StorageError."""
        self.call(tag, storage.read_bytes, uri)

    def call(self, tag: Hashable, function: Callable[..., Any], *arguments: Any) -> None:
        """Begin to call a function; `wait` gives what it returns, or its StorageError."""
        self.busy += 1
        future = self._workers.submit(function, *arguments)
        future.add_done_callback(lambda done: self._ended.put((tag, done)))

    def wait(self, seconds: float | None = None) -> list[tuple[Any, Any]]:
        """Return tags with what came of them: a value, or a StorageError.

        Args:
            seconds: to wait for the first; None for as long as it takes. With nothing under way, none.

        Raises:
            Exception: what a call raised, StorageErrors apart.
        """
        until = math.inf if seconds is None else time.monotonic() + seconds
        while self.busy:
            try:
                left = 0 if self._results else max(0, until - time.monotonic())
                tag, future = self._ended.get(left > 0, min(left, _LOOK))
            except queue.Empty:
                if left > _LOOK:
                    continue
                break
            self.busy -= 1
            error = future.exception()
            if error is not None and not isinstance(error, StorageError):
                raise error
            self._results.append((tag, error or future.result()))
        results, self._results = self._results, []
        return results
