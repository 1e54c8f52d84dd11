"""Several calls at the same time, in threads of this process."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Make all calls at the same moment, a thread each; return what they return, or raise what one raised."""
    barrier = Barrier(len(calls))

    def make(call: Callable[[], Any]) -> Any:
        barrier.wait(60)
        return call()

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(make, calls))
