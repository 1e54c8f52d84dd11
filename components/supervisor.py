"""Runs the work of a step in a process of its own, with retries.

Kubeflow Pipelines restarts only pods that were deleted or evicted: since 2.17 a step whose process fails or
is killed ends the run. So work is retried inside the pod if its process was killed (mostly for want of
memory) or its error passes by itself (a store or an API server that is away). The process that waits stays
small: it is the last to be killed for memory.
"""

import logging
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, TypeVar

from trainer.base.errors import EXIT_RETRY, ConfigError, Interrupted, KubedetError, LaunchError
from trainer.base.safe_text import whole_number
from trainer.launching.stop_signals import ENDING, handling

T = TypeVar("T")
logger = logging.getLogger(__name__)

TRIES = "KUBEDET_STEP_TRIES"
"""Environment variable: how often a step's work is tried; by default 5 times in a cluster, once elsewhere."""

_IN_A_CLUSTER = 5
_LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class Patience:
    """How often work is tried, and the waits between, in seconds."""

    tries: int = 1
    """Tries in a row; 1 works in this very process, which nothing then starts again."""
    first_wait: float = 5.0
    """Wait after the first try; each further one is three times as long."""
    longest_wait: float = 120.0
    """Longest wait."""
    steady: float = 600.0
    """A try that lasted this long resets the count of tries."""

    @classmethod
    def here(cls) -> "Patience":
        """Return the settings for this process's environment.

        Raises:
            ConfigError: the variable is no number.
        """
        in_a_cluster = "KUBERNETES_SERVICE_HOST" in os.environ
        text = os.environ.get(TRIES) or str(_IN_A_CLUSTER if in_a_cluster else 1)
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
        work: does it; its result is pickled.
        patience: how often, and how long between.
        lasting: the work continues elsewhere when its process ends, and every attempt adopts it: a crash is
            then retried, too.
        orphaned: called in the work's process if this one is killed; then the work's process ends.

    Raises:
        KubedetError: what the last attempt raised; Killed or Crashed if its process ended otherwise.
        Interrupted: this process was asked to end.
    """
    if patience.tries == 1:
        return work()
    tries, wait = 0, patience.first_wait
    while True:
        began = time.monotonic()
        outcome, stopped_by = _once(work, orphaned)
        if not isinstance(outcome, KubedetError):
            return outcome
        if stopped_by:
            stopped = Interrupted(f"the step {step} was stopped", fix="run the same again: it goes on")
            raise outcome if isinstance(outcome, Interrupted) else stopped
        if time.monotonic() - began > patience.steady:
            tries, wait = 0, patience.first_wait
        tries += 1
        retry = outcome.passing or (lasting and isinstance(outcome, Crashed))
        if not retry or tries == patience.tries:
            raise outcome
        logger.warning("%s\n  trying again in %.0f s (%d of %d)", outcome, wait, tries + 1, patience.tries)
        if _stopped_while(wait):
            raise Interrupted(f"the step {step} was stopped")
        wait = min(3 * wait, patience.longest_wait)


def _once(work: Callable[[], T], orphaned: Callable[[], None]) -> tuple[T | KubedetError, bool]:
    """Do the work in a forked child process; returns its result or error, and whether a stop signal came."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_work, args=(work, sender, os.getpid(), orphaned))
    with _passing_on(child) as stopped_by:
        child.start()
        sender.close()
        if stopped_by:
            child.terminate()
        outcome = _received(receiver, child)
        child.join()
    receiver.close()
    if outcome is not None:
        return outcome[0], bool(stopped_by)
    code = child.exitcode or 0
    if code >= 0:
        return Crashed(f"its process ended with exit code {code} and said nothing"), bool(stopped_by)
    number = signal.Signals(-code).name
    fix = "mostly memory ran out: raise the step's memory (step_memory), or set data.processes lower"
    return Killed(f"the process of the step was killed ({number})", fix=fix), bool(stopped_by)


def _received(receiver: Connection, child: BaseProcess) -> tuple[Any] | None:
    """Receive the child's result; None if it sent none. Its own children may hold the pipe open."""
    while True:
        ended = child.exitcode is not None
        if receiver.poll(0 if ended else _LOOK_SECONDS):
            try:
                return (receiver.recv(),)
            except EOFError:
                return None
        if ended:
            return None


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


@contextmanager
def _passing_on(child: BaseProcess) -> Iterator[list[int]]:
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if child.is_alive():
            child.terminate()

    with handling(handle):
        yield received


def _stopped_while(seconds: float) -> bool:
    received: list[int] = []
    end = time.monotonic() + seconds
    with handling(lambda number, frame: received.append(number)):
        while not received and (remaining := end - time.monotonic()) > 0:
            time.sleep(min(remaining, _LOOK_SECONDS))
    return bool(received)
