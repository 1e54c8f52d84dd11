"""Runs the work of a step in a process of its own, and again where that may help.

Kubeflow Pipelines starts a pod again that was deleted or evicted, and no other: since 2.17 a step whose
process fails or is killed ends the run. So what may go well at the second try is tried again inside the
pod: work whose process was killed (mostly for want of memory), and errors that pass by themselves (a store
or an API server that is away). The process that waits here stays small, and is the last to be killed for
memory.
"""

import logging
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, TypeVar

from trainer.errors import ConfigError, Interrupted, KubedetError, LaunchError
from trainer.stop_signals import ENDING, handling

T = TypeVar("T")
logger = logging.getLogger(__name__)

TRIES = "KUBEDET_STEP_TRIES"
"""Environment variable: how often a step's work is tried; by default 5 times in a cluster, once elsewhere."""

_IN_A_CLUSTER = 5
_LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class Patience:
    """How often work is tried, and how long is waited between; all in seconds."""

    tries: int = 1
    """Tries in a row; 1 works in this very process, which nothing then starts again."""
    first_wait: float = 5.0
    """Wait after the first try; each further one is three times as long."""
    longest_wait: float = 120.0
    """Longest wait."""
    steady: float = 600.0
    """A try that lasted as long as this was well for a while: counting begins anew."""

    @classmethod
    def here(cls) -> "Patience":
        """Return that of this process.

        Raises:
            ConfigError: the environment names no number.
        """
        in_a_cluster = "KUBERNETES_SERVICE_HOST" in os.environ
        text = os.environ.get(TRIES) or str(_IN_A_CLUSTER if in_a_cluster else 1)
        if not text.isdecimal() or int(text) < 1:
            raise ConfigError(
                f"{TRIES} is {text!r}, not a number from 1", fix=f"unset {TRIES}, or set it to 5"
            )
        return cls(int(text))


class Crashed(LaunchError):
    """Work that raised what is no message for a user; its traceback was printed where it happened."""


class Killed(LaunchError):
    """Work whose process was killed."""

    passing = True


def run(step: str, work: Callable[[], T], patience: Patience, *, lasting: bool = False) -> T:
    """Return what work returns.

    SIGTERM and SIGINT reach the work's process, and nothing is tried again after them.

    Args:
        step: name of the step, for what is said.
        work: does it; what it returns is pickled.
        patience: how often, and how long between.
        lasting: what the work has begun goes on elsewhere when its process ends, so that every other
            try takes it up: then a crash is tried again, too.

    Raises:
        KubedetError: what the last try raised; Killed or Crashed where its process ended otherwise.
        Interrupted: this process was asked to end.
    """
    if patience.tries == 1:
        return work()
    tried, wait = 0, patience.first_wait
    while True:
        began = time.monotonic()
        outcome, asked = _once(work)
        if not isinstance(outcome, KubedetError):
            return outcome
        if asked:
            stopped = Interrupted(f"the step {step} was stopped", fix="run the same again: it goes on")
            raise outcome if isinstance(outcome, Interrupted) else stopped
        if time.monotonic() - began > patience.steady:
            tried, wait = 0, patience.first_wait
        tried += 1
        again = outcome.passing or (lasting and isinstance(outcome, Crashed))
        if not again or tried == patience.tries:
            raise outcome
        logger.warning("%s\n  trying again in %.0f s (%d of %d)", outcome, wait, tried + 1, patience.tries)
        if _stopped_while(wait):
            raise Interrupted(f"the step {step} was stopped")
        wait = min(3 * wait, patience.longest_wait)


def _once(work: Callable[[], T]) -> tuple[T | KubedetError, bool]:
    """Do the work in a process of its own; returns what came of it, and whether we were asked to end.

    Forked, not spawned: this process has imported next to nothing, and has no other thread.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_work, args=(work, sender))
    with _passing_on(child) as asked:
        child.start()
        sender.close()
        if asked:
            child.terminate()
        outcome = _received(receiver, child)
        child.join()
    receiver.close()
    if outcome is not None:
        return outcome[0], bool(asked)
    code = child.exitcode or 0
    if code >= 0:
        return Crashed(f"its process ended with exit code {code} and said nothing"), bool(asked)
    number = signal.Signals(-code).name
    fix = "mostly memory ran out: raise the step's memory (step_memory), or set data.processes lower"
    return Killed(f"the process of the step was killed ({number})", fix=fix), bool(asked)


def _received(receiver: Connection, child: BaseProcess) -> tuple[Any] | None:
    """Wait for what the child sends; None where it ended without. Its own children may hold the pipe open."""
    while True:
        ended = child.exitcode is not None
        if receiver.poll(0 if ended else _LOOK_SECONDS):
            try:
                return (receiver.recv(),)
            except EOFError:
                return None
        if ended:
            return None


def _work(work: Callable[[], Any], sender: Connection) -> None:
    """What the child does: its result or error goes into the pipe."""
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL)
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


@contextmanager
def _passing_on(child: BaseProcess) -> Iterator[list[int]]:
    """Pass SIGTERM and SIGINT on to the child; yields the list that takes their numbers."""
    asked: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if child.is_alive():
            child.terminate()

    with handling(handle):
        yield asked


def _stopped_while(seconds: float) -> bool:
    """Wait; returns at once, and True, when this process is asked to end meanwhile."""
    asked: list[int] = []
    end = time.monotonic() + seconds
    with handling(lambda number, frame: asked.append(number)):
        while not asked and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK_SECONDS))
    return bool(asked)
