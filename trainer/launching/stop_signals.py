"""Handles stop signals at moments when no work is lost."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)  # sent by a cluster, and by Ctrl-C


@contextlib.contextmanager
def signal_handler(
    handler: Callable[[int, FrameType | None], object], numbers: tuple[int, ...] = STOP_SIGNALS
) -> Iterator[None]:
    """Handle signals with `handler` inside the context, and restore the previous handlers after it."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


class StopRequest:
    """Records whether this process was asked to stop."""

    def __init__(self) -> None:
        self.requested = False
        self._error: Callable[[], Exception] | None = None

    def request_stop(self) -> None:
        """Record the request; inside `raise_immediately`, raise its error."""
        self.requested = True
        if self._error:
            raise self._error()

    @contextlib.contextmanager
    def raise_immediately(self, error: Callable[[], Exception]) -> Iterator[None]:
        """Raise `error` as soon as a stop is requested inside this context."""
        self._error = error
        try:
            if self.requested:
                raise error()
            yield
        finally:
            self._error = None


@contextlib.contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Record SIGTERM and SIGINT inside the context, instead of ending the process."""
    request = StopRequest()
    with signal_handler(lambda _number, _frame: request.request_stop()):
        yield request


@contextlib.contextmanager
def exit_on_signal(codes: Mapping[int, int]) -> Iterator[None]:
    """Exit with `codes[signal]` if a signal arrives inside the context; only the main thread may enter it.

    A thread exits the process: Python's handlers run only after a call into C returns, which takes minutes if
    it waits for other machines, and the first process of a container ignores signals without a handler.
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
        # With a Python handler, even an empty one, Python writes the signal's number to the pipe immediately.
        with signal_handler(lambda _number, _frame: None, tuple(codes)):
            former = signal.set_wakeup_fd(writer)
            try:
                yield
            finally:
                signal.set_wakeup_fd(former)
    finally:
        os.close(writer)
        watcher.join()
        os.close(reader)
