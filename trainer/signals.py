"""A request to stop that arrives as a signal and is answered where nothing is lost."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator


class StopRequest:
    """Whether this process was asked to stop."""

    def __init__(self) -> None:
        self.asked = False
        self._error: Callable[[], Exception] | None = None

    def ask(self) -> None:
        """Note the request; where the work may end at once, end it."""
        self.asked = True
        if self._error:
            raise self._error()

    @contextlib.contextmanager
    def at_once(self, error: Callable[[], Exception]) -> Iterator[None]:
        """While this lasts a request raises `error` instead of waiting to be read."""
        self._error = error
        try:
            if self.asked:
                raise error()
            yield
        finally:
            self._error = None


@contextlib.contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Note SIGTERM and SIGINT instead of dying of them, while the context lasts."""
    request = StopRequest()
    previous = {
        number: signal.signal(number, lambda _number, _frame: request.ask())
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def exit_on_signal(code: int) -> Iterator[None]:
    """End this process with `code` at SIGTERM or SIGINT, while the context lasts.

    Python's own handlers wait until a call into C returns, for minutes where it waits for
    other machines, and the first process of a container ignores what it does not handle.
    So a thread watches. For the main thread only.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    numbers = (signal.SIGTERM, signal.SIGINT)

    def watch() -> None:
        while number := os.read(reader, 1):
            if number[0] in numbers:
                print(f"stopped by {signal.Signals(number[0]).name}", file=sys.stderr, flush=True)
                os._exit(code)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    # With a handler of Python's, however empty, the number of a signal is written at once.
    previous = {number: signal.signal(number, lambda _number, _frame: None) for number in numbers}
    former = signal.set_wakeup_fd(writer)
    try:
        yield
    finally:
        signal.set_wakeup_fd(former)
        for number, handler in previous.items():
            signal.signal(number, handler)
        os.close(writer)
        watcher.join()
        os.close(reader)
