"""Time and threads as an argument: a simulation of a cluster passes a clock that jumps."""

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime


class Clock:
    """The clock of this machine, and the threads of this process."""

    def monotonic(self) -> float:
        """Return seconds since an arbitrary moment."""
        return time.monotonic()

    def now(self) -> datetime:
        """Return the current date and time in UTC."""
        return datetime.now(UTC)

    def sleep(self, seconds: float) -> None:
        """Sleep for some seconds."""
        time.sleep(seconds)

    def start(self, work: Callable[..., object], *arguments: object) -> None:
        """Call `work` in a thread that ends with the process."""
        threading.Thread(target=work, args=arguments, daemon=True).start()

    def condition(self) -> threading.Condition:
        """Return a condition on which the threads of this clock can wait."""
        return threading.Condition()


CLOCK = Clock()
