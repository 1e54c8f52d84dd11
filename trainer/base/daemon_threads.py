"""Threads for calls that wait for servers: they delay neither signals nor the end of the process.

A request that a server leaves unanswered cannot be taken back. The threads of a ThreadPoolExecutor are joined
before Python exits, however long that takes; these are daemons.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, TypeVar

Result = TypeVar("Result")

_LOOK = 0.2
"""Seconds between two looks at whether a signal came: another thread than the main one may receive it."""

_Task = tuple["Future[Any]", Callable[[], Any]]


class DaemonThreadPool(Executor):
    """An executor whose threads are daemons; leaving its `with` block waits for none of them.

    Args:
        threads: the most at the same time; they start as they are needed.
        name: of the threads.
    """

    def __init__(self, threads: int, name: str = "worker") -> None:
        self._most, self._name = threads, name
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._started = 0

    def submit(self, function: Callable[..., Result], /, *args: Any, **kwargs: Any) -> "Future[Result]":
        """Let a thread call a function."""
        future: Future[Result] = Future()
        self._tasks.put((future, partial(function, *args, **kwargs)))
        if self._started < self._most and not self._idle.acquire(blocking=False):
            self._started += 1
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads as they finish what they do; nothing is waited for."""
        try:
            while cancel_futures and (task := self._tasks.get_nowait()) is not None:
                task[0].cancel()
        except Empty:
            pass
        for _ in range(self._started):
            self._tasks.put(None)

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.shutdown(cancel_futures=True)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            _call(*task)
            del task  # Otherwise its result is kept until the next one comes.
            self._idle.release()


def _call(future: "Future[Any]", function: Callable[[], Any]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)


def result_of(future: "Future[Result]") -> Result:
    """Wait for a future; signals are handled meanwhile, whichever thread receives them."""
    while True:
        try:
            return future.result(timeout=_LOOK)
        except TimeoutError:
            if future.done():  # Meanwhile, or the function itself raised it.
                return future.result()


_background = DaemonThreadPool(1000, "background")


def in_background(function: Callable[[], Result]) -> Result:
    """Call a function that blocks outside Python so that signals are handled meanwhile.

    The main thread handles signals between two lines of Python only. There, the function runs in another
    thread, and continues in it if a signal ends the waiting; elsewhere it is just called.
    """
    if threading.current_thread() is not threading.main_thread():
        return function()
    return result_of(_background.submit(function))


def _forget_threads() -> None:
    """Start with new threads in a forked child, which has those of its parent no more."""
    global _background  # noqa: PLW0603 (the one of the process)
    _background = DaemonThreadPool(1000, "background")


os.register_at_fork(after_in_child=_forget_threads)
