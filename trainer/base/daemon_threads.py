"""Daemon threads for calls that wait for servers. They never delay signals or the exit of the process.

In contrast, Python waits for the threads of a ThreadPoolExecutor before it exits.
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

_POLL_SECONDS = 0.2  # interval at which the main thread handles signals that another thread received

_Task = tuple["Future[Any]", Callable[[], Any]]


class DaemonThreadPool(Executor):
    """An executor whose daemon threads start on demand; leaving its `with` block does not wait for them."""

    def __init__(self, threads: int, name: str = "worker") -> None:
        self._max_threads, self._name = threads, name
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._started = 0

    def submit(self, function: Callable[..., Result], /, *args: Any, **kwargs: Any) -> "Future[Result]":
        """Call a function in a thread."""
        future: Future[Result] = Future()
        self._tasks.put((future, partial(function, *args, **kwargs)))
        if self._started < self._max_threads and not self._idle.acquire(blocking=False):
            self._started += 1
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads after their current calls, without waiting."""
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
            future, function = task
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)
            del task, future, function  # Otherwise the result would stay in memory until the next task.
            self._idle.release()


def wait_for(future: "Future[Result]") -> Result:
    """Wait for a future; signals are handled during the wait."""
    while True:
        try:
            return future.result(timeout=_POLL_SECONDS)
        except TimeoutError:
            if future.done():  # The function itself may have raised it.
                return future.result()


_background = DaemonThreadPool(1000, "background")


def run_in_background(function: Callable[[], Result]) -> Result:
    """Call a function that blocks outside Python; signals are handled during the call.

    The main thread only handles signals between bytecodes, so it runs the function in another thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return function()
    return wait_for(_background.submit(function))


def _replace_threads() -> None:
    """Create a new pool in a forked child, which does not have its parent's threads."""
    global _background  # noqa: PLW0603
    _background = DaemonThreadPool(1000, "background")


if hasattr(os, "register_at_fork"):  # Not on Windows.
    os.register_at_fork(after_in_child=_replace_threads)
