"""Signals that ask a launcher to end, as an exception: whatever it waits for, it ends its job first."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Asked(BaseException):
    """Somebody asked this process to end. Not an Exception: nothing on the way may take it for an error."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number).name


@contextmanager
def raising_on_signals() -> Iterator[None]:
    """Raise Asked at the first SIGTERM or SIGINT, whatever is waited for; further ones mean nothing."""
    asked: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if len(asked) == 1:
            raise Asked(number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
