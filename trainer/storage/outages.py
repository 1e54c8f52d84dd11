"""Reports stores that do not answer while requests wait: obstore repeats requests for minutes without a word.

A thread looks at the waiting requests. If one waits for long, it asks the server itself.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from urllib3.exceptions import HTTPError

from trainer.base.log import clock
from trainer.storage import environment
from trainer.storage.retries import BUSY, no_answer

logger = logging.getLogger(__name__)

LONG = 20.0  # Seconds after which the server of a waiting request is asked.
_EVERY = 10.0  # Seconds between two looks.
_REPORT_EVERY = 60.0  # Seconds between two lines on one server.

_waiting: dict[object, tuple[float, str]] = {}
"""Beginning and server of each waiting request."""
_process = 0  # The process that the thread belongs to: a forked child does not have it.


@contextmanager
def report_while(server: str) -> Iterator[None]:
    """Log if the server does not answer meanwhile, and when it answers again."""
    global _process  # noqa: PLW0603 (of this process)
    if _process != os.getpid():
        _process = os.getpid()
        _waiting.clear()
        threading.Thread(target=_look, name="outages", daemon=True).start()
    token = object()
    _waiting[token] = time.monotonic(), server
    try:
        yield
    finally:
        _waiting.pop(token, None)


def _look() -> None:
    away: dict[str, tuple[float, float]] = {}  # Since when, and when it was reported last, by server.
    while True:
        time.sleep(min(_EVERY, LONG))
        now, oldest = time.monotonic(), dict[str, float]()
        for begun, server in list(_waiting.values()):
            oldest[server] = min(begun, oldest.get(server, begun))
        slow = {name for name, begun in oldest.items() if now - begun > LONG}
        problems = {name: _problem(name) for name in slow | away.keys()}
        for server, problem in problems.items():
            since, told = away.get(server, (oldest.get(server, now), float("-inf")))
            if problem and now - told >= _REPORT_EVERY:
                logger.warning("%s; still trying, for %s so far", problem, clock(now - since))
                told = now
            if problem:
                away[server] = since, told
        for server in [name for name in away if not problems[name]]:
            logger.warning("%s answers again, after %s", server, clock(now - away.pop(server)[0]))


def _problem(server: str) -> str:
    """Return what is wrong with a server; empty if it answers."""
    try:
        client = environment.web_client(server)
        answer = client.request("HEAD", server, timeout=5.0, retries=False, redirect=False)
    except HTTPError as error:
        return no_answer(server, error).message
    return f"{server} answers with status {answer.status}" if answer.status in BUSY else ""
