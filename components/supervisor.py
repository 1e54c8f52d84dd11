"""Runs the work of a step in a child process, with retries.

Kubeflow Pipelines (since 2.17) restarts only pods that were deleted or evicted. So work is retried inside the
pod if its process was killed (mostly for lack of memory) or its error is temporary (a store or an API server
is down). The waiting process stays small, so that it is the last to be killed for memory.
"""

import logging
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from trainer.base.errors import EXIT_RETRY, ConfigError, Interrupted, KubedetError, LaunchError
from trainer.base.safe_text import whole_number
from trainer.launching.stop_signals import ENDING, handling

T = TypeVar("T")
logger = logging.getLogger(__name__)

TRIES = "KUBEDET_STEP_TRIES"
"""Environment variable: number of tries; by default 5 in a cluster, 1 elsewhere."""

_LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class Patience:
    """How often work is tried, and the waits between, in seconds."""

    tries: int = 1
    """1 works in this very process."""
    first_wait: float = 5.0
    """Wait after the first try; each further one is three times as long."""
    longest_wait: float = 120.0
    steady: float = 600.0
    """A try that lasted this long resets the count of tries."""

    @classmethod
    def here(cls) -> "Patience":
        """Return the settings for this process's environment."""
        text = os.environ.get(TRIES) or ("5" if "KUBERNETES_SERVICE_HOST" in os.environ else "1")
        tries = whole_number(text)
        if not tries:
            raise ConfigError(
                f"{TRIES} is {text!r}, not a number from 1", fix=f"unset {TRIES}, or set it to 5"
            )
        return cls(tries)


class Crashed(LaunchError):
    """Work that raised an exception without a message for users; its traceback is in the log."""


class Killed(LaunchError):
    """Work whose process was killed."""

    passing = True


def run(
    step: str,
    work: Callable[[], T],
    patience: Patience,
    *,
    lasting: bool = False,
    orphaned: Callable[[], None] = lambda: None,
) -> T:
    """Run work and return its result.

    SIGTERM and SIGINT are passed on to the work's process, and nothing is retried after them.

    Args:
        step: name of the step, for messages.
        work: its result is pickled.
        patience: number of tries, and the waits between.
        lasting: the work continues elsewhere when its process ends, and every attempt adopts it: a crash is
            then retried, too.
        orphaned: called in the work's process if this one is killed; then the work's process ends.
    """
    if patience.tries == 1:
        return work()
    tries, wait = 0, patience.first_wait
    stops: list[int] = []
    while True:
        began = time.monotonic()
        outcome = _once(work, orphaned, stops)
        if not isinstance(outcome, KubedetError):
            return outcome
        if stops:
            stopped = Interrupted(f"the step {step} was stopped", fix="run the same again to continue")
            raise outcome if isinstance(outcome, Interrupted) else stopped
        if time.monotonic() - began > patience.steady:
            tries, wait = 0, patience.first_wait
        tries += 1
        retry = outcome.passing or (lasting and isinstance(outcome, Crashed))
        if not retry or tries == patience.tries:
            raise outcome
        logger.warning("%s\n  trying again in %.0f s (%d of %d)", outcome, wait, tries + 1, patience.tries)
        end = time.monotonic() + wait
        with handling(lambda number, frame: stops.append(number)):
            while not stops and (remaining := end - time.monotonic()) > 0:
                time.sleep(min(remaining, _LOOK_SECONDS))
        if stops:
            raise Interrupted(f"the step {step} was stopped")
        wait = min(3 * wait, patience.longest_wait)


def _once(work: Callable[[], T], orphaned: Callable[[], None], stops: list[int]) -> T | KubedetError:
    """Do the work in a forked child process; return its result or error. `stops` receives stop signals."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_work, args=(work, sender, os.getpid(), orphaned))

    def pass_on(number: int, frame: object) -> None:
        stops.append(number)
        if child.is_alive():
            child.terminate()

    with handling(pass_on):
        child.start()
        sender.close()
        if stops:
            child.terminate()
        outcome = None
        is_alive = True
        while outcome is None and is_alive:  # The child's own children may hold the pipe open.
            is_alive = child.exitcode is None
            if receiver.poll(_LOOK_SECONDS if is_alive else 0):
                try:
                    outcome = (receiver.recv(),)
                except EOFError:
                    break
        child.join()
    receiver.close()
    if outcome is not None:
        return outcome[0]
    code = child.exitcode or 0
    if code >= 0:
        return Crashed(f"its process ended with exit code {code} and no message")
    name = signal.Signals(-code).name
    fix = "mostly memory ran out: raise the step's memory (step_memory), or set data.processes lower"
    return Killed(f"the process of the step was killed ({name})", fix=fix)


def _work(work: Callable[[], Any], sender: Connection, supervisor: int, orphaned: Callable[[], None]) -> None:
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL)
    threading.Thread(target=_watch_supervisor, args=(supervisor, orphaned), daemon=True).start()
    outcome: Any
    try:
        outcome = work()
    except KubedetError as error:
        outcome = error
    except Exception as error:
        traceback.print_exc()
        outcome = Crashed(f"{type(error).__name__}: {error}".strip().splitlines()[0])
    sender.send(outcome)
    sender.close()


def _watch_supervisor(supervisor: int, orphaned: Callable[[], None]) -> None:
    while os.getppid() == supervisor:
        time.sleep(_LOOK_SECONDS)
    orphaned()
    os._exit(EXIT_RETRY)
