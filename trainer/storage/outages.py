"""Logs stores that do not respond, since obstore retries requests silently for minutes.

A thread watches the pending requests and probes the server of a slow one.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from urllib3.exceptions import HTTPError

from trainer.base.log import format_duration
from trainer.storage import environment
from trainer.storage.retries import BUSY, no_answer_error

logger = logging.getLogger(__name__)

SLOW_SECONDS = 20.0  # Seconds after which the server of a pending request is probed.
_CHECK_SECONDS = 10.0  # Seconds between two checks.
_REPORT_SECONDS = 60.0  # Seconds between two log messages about one server.

_waiting: dict[object, tuple[float, str]] = {}
"""Start time and server of each pending request."""
_process = 0  # The process that runs the thread; a forked child has to start its own.


@contextmanager
def report_outages(server: str) -> Iterator[None]:
    """Log if the server stops responding within the block, and when it responds again."""
    global _process  # noqa: PLW0603 (of this process)
    if _process != os.getpid():
        _process = os.getpid()
        _waiting.clear()
        threading.Thread(target=_watch_requests, name="outages", daemon=True).start()
    token = object()
    _waiting[token] = time.monotonic(), server
    try:
        yield
    finally:
        _waiting.pop(token, None)


def _watch_requests() -> None:
    away: dict[str, tuple[float, float]] = {}  # Since when, and when it was reported last, by server.
    while True:
        time.sleep(min(_CHECK_SECONDS, SLOW_SECONDS))
        now, oldest = time.monotonic(), dict[str, float]()
        for begun, server in list(_waiting.values()):
            oldest[server] = min(begun, oldest.get(server, begun))
        slow = {name for name, begun in oldest.items() if now - begun > SLOW_SECONDS}
        problems = {name: _find_problem(name) for name in slow | away.keys()}
        for server, problem in problems.items():
            since, reported = away.get(server, (oldest.get(server, now), float("-inf")))
            if problem and now - reported >= _REPORT_SECONDS:
                logger.warning("%s; still trying, for %s so far", problem, format_duration(now - since))
                reported = now
            if problem:
                away[server] = since, reported
        for server in [name for name in away if not problems[name]]:
            logger.warning("%s answers again, after %s", server, format_duration(now - away.pop(server)[0]))


def _find_problem(server: str) -> str:
    """Probe a server and return its problem; "" if it responds normally."""
    try:
        client = environment.web_client(server)
        answer = client.request("HEAD", server, timeout=5.0, retries=False, redirect=False)
    except HTTPError as error:
        return no_answer_error(server, error).message
    return f"{server} answers with status {answer.status}" if answer.status in BUSY else ""
