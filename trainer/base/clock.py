"""A clock that is passed as an argument, so that a simulated cluster can advance its time in steps."""

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
        """Call `work` in a daemon thread."""
        threading.Thread(target=work, args=arguments, daemon=True).start()

    def condition(self) -> threading.Condition:
        """Return a condition variable for threads that use this clock."""
        return threading.Condition()


CLOCK = Clock()
