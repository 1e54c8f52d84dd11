"""Threads for calls that wait for servers.

A request that a server leaves unanswered cannot be taken back: whoever gives it up goes on, and its thread
ends when the request does. These threads are daemons, so that no exit waits for a silent server, which it
would with those of ThreadPoolExecutor.
"""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from trainer.base.errors import Interrupted

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
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = 0

    def start(self, task: Callable[[], None]) -> None:
        """Let a thread call what raises nothing; dropped if the threads are closed before its turn."""
        self._tasks.put(task)
        if self._threads < self._count and self._tasks.qsize():
            self._threads += 1
            threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Let a thread call a function."""
        future: Future[Any] = Future()

        def task() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*arguments))
                except BaseException as error:
                    future.set_exception(error)

        self.start(task)
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
            if not self._closed.is_set():
                task()
            del task  # else its result is kept until the next one


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
