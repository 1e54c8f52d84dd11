"""Requests that are made again until they succeed, cannot succeed, or have had their time.

obstore repeats a request a few times at once, and goes on where an answer broke off. What lasts longer is
waited for here: a store that restarts, a network that is away. The waits between grow and are drawn at
random, so that many readers that were turned away together do not come back together.
"""

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from trainer.storage import failures
from trainer.storage.clouds import is_panic
from trainer.storage.parallel import Workers, is_given_up, pause

Result = TypeVar("Result")

_TIMES = 4
_LOG = logging.getLogger("storage")


@dataclass(frozen=True)
class Patience:
    """Seconds after which hope is given up."""

    connect: float = 10.0
    """For a connection."""
    silence: float = 30.0
    """Without a byte in the midst of an answer."""
    first: float = 15.0
    """For a server that has not answered this process yet: most likely its address is wrong."""
    total: float = 300.0
    """For one request, with all attempts and the waits between; and on top of it, for its bytes,"""
    rate: float = 50_000.0
    """as many a second."""
    wait: float = 10.0
    """The longest wait between two attempts."""
    quiet: float = 5.0
    """Of trying again before a line in the log says so."""


PATIENCE = Patience()

_answered: set[str] = set()
"""Servers that are there: what breaks from now on may come back."""

_for_the_main_thread: list[Workers] = []


def call(uri: str, verb: str, server: str, request: Callable[[], Result]) -> Result:
    """Make a request, again where that may help, and return what it returns.

    Args:
        uri: what is asked for; for messages.
        verb: what is done with it; for messages.
        server: whom it is asked of.
        request: is called once for each attempt, in another thread where this is the main one.

    Raises:
        StorageError: what came of the last attempt.
    """
    began, attempt, logged = time.monotonic(), 0, False
    while True:
        try:
            result = _interruptible(request)
            _answered.add(server)
            return result
        except BaseException as error:
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            problem, answered = failures.explain(error, uri, verb)
            if answered:
                _answered.add(server)
            spent = time.monotonic() - began
            late = spent >= (PATIENCE.total if server in _answered else PATIENCE.first)
            if late:
                _answered.discard(server)  # what follows need not wait as long again
            if late or not problem.passing or isinstance(problem, failures.Spoiled) or is_given_up():
                raise problem from error
        attempt += 1
        if spent >= PATIENCE.quiet and not logged:
            logged = True
            left = PATIENCE.total - spent
            _LOG.warning("%s; trying again for %.0f s", problem.message, left)
        pause(backoff(attempt))


def note_answer(server: str) -> None:
    """Note that a server has begun to answer: what breaks from now on may come back."""
    _answered.add(server)


def backoff(attempt: int) -> float:
    """Return a random wait in seconds before attempt number `attempt` (from 1)."""
    return random.uniform(0, min(PATIENCE.wait, 0.2 * 2 ** min(attempt, 16)))


def repeated(read: Callable[[], Result]) -> Result:
    """Do again what changed or was damaged on the way.

    Raises:
        StorageError: what came of the last attempt.
    """
    for attempt in range(1, _TIMES):
        try:
            return read()
        except failures.Spoiled:
            pause(backoff(attempt))
    return read()


def _interruptible(request: Callable[[], Result]) -> Result:
    """Make a request so that signals are seen meanwhile, which they are between lines of Python only.

    What is interrupted is left to its thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return request()
    workers = _for_the_main_thread.pop() if _for_the_main_thread else Workers(1, "request")
    future = workers.submit(request)
    try:
        result: Result = workers.result(future)
    finally:
        if future.done():
            _for_the_main_thread.append(workers)
        else:
            workers.close()
    return result
