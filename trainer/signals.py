"""A request to stop that arrives as a signal and is answered where nothing is lost."""

import contextlib
import signal
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
