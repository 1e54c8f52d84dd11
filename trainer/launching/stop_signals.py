"""Stop requests by signal, answered at a point where no work is lost."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGINT)
"""Signals that ask a process to end: from a cluster, and by Ctrl-C."""


@contextlib.contextmanager
def handling(
    handler: Callable[[int, FrameType | None], object], numbers: tuple[int, ...] = ENDING
) -> Iterator[None]:
    """Handle signals with `handler` inside the context, and restore the previous handlers after it.

    Args:
        handler: takes a signal's number, and where it arrived.
        numbers: the signals.
    """
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


class StopRequest:
    """Whether this process was asked to stop."""

    def __init__(self) -> None:
        self.requested = False
        self._error: Callable[[], Exception] | None = None

    def ask(self) -> None:
        """Record the request; inside `at_once`, raise its error."""
        self.requested = True
        if self._error:
            raise self._error()

    @contextlib.contextmanager
    def at_once(self, error: Callable[[], Exception]) -> Iterator[None]:
        """Inside this context a request raises `error` at once instead of being polled."""
        self._error = error
        try:
            if self.requested:
                raise error()
            yield
        finally:
            self._error = None


@contextlib.contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Record SIGTERM and SIGINT instead of ending the process, inside the context."""
    request = StopRequest()
    with handling(lambda _number, _frame: request.ask()):
        yield request


@contextlib.contextmanager
def exit_on_signal(codes: Mapping[int, int]) -> Iterator[None]:
    """End this process at a signal, while the context lasts.

    Args:
        codes: the exit code for each signal.

    Python's own handlers wait until a call into C returns, for minutes where it waits for
    other machines, and the first process of a container ignores what it does not handle.
    So a thread watches. For the main thread only.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch() -> None:
        while number := os.read(reader, 1):
            if number[0] in codes:
                print(f"stopped by {signal.Signals(number[0]).name}", file=sys.stderr, flush=True)
                os._exit(codes[number[0]])

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        # With a handler of Python's, however empty, the number of a signal is written at once.
        with handling(lambda _number, _frame: None, tuple(codes)):
            former = signal.set_wakeup_fd(writer)
            try:
                yield
            finally:
                signal.set_wakeup_fd(former)
    finally:
        os.close(writer)
        watcher.join()
        os.close(reader)
