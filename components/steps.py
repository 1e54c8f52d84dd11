"""Runs the work of a step in a child process, and reports how the work ended.

Kubeflow Pipelines (since 2.17) restarts only pods that were deleted or evicted. So work is done in a child
process, and retried inside the pod if that process was killed (mostly for lack of memory) or its error is
temporary (a store or an API server is down). The waiting process stays small, so that it is the last to be
killed for memory.
"""

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, wraps
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from components import environment
from trainer.base import events, log
from trainer.base.errors import EXIT_RETRY, ConfigError, Interrupted, KubedetError, LaunchError
from trainer.base.os_errors import translate_named_oserrors
from trainer.base.safe_text import parse_digits
from trainer.launching.stop_signals import STOP_SIGNALS, signal_handler

P = ParamSpec("P")
T = TypeVar("T")
logger = logging.getLogger(__name__)

TERMINATION_LOG = Path("/dev/termination-log")
"""The content of this file becomes part of the pod's status, and of the workflow's message in Kubeflow."""

_MESSAGE_BYTES = 4096  # Maximum length that Kubernetes keeps.
_DELETION_SECONDS = 60.0  # Maximum time from the deletion of this pod until it is killed.
TRIES_VARIABLE = "KUBEDET_STEP_TRIES"
"""Environment variable with the number of tries (default: 5 in a cluster, otherwise 1)."""

_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class RetryPolicy:
    """Maximum number of attempts, and the waits between them in seconds."""

    tries: int = 1  # 1: do the work in this process.
    first_wait: float = 5.0  # Wait after the first try; it triples after each further try.
    longest_wait: float = 120.0
    steady: float = 600.0  # A try that lasts this long resets the count.

    @classmethod
    def from_environment(cls) -> "RetryPolicy":
        """Return the settings for this process's environment."""
        text = os.environ.get(TRIES_VARIABLE) or ("5" if "KUBERNETES_SERVICE_HOST" in os.environ else "1")
        tries = parse_digits(text)
        if not tries:
            raise ConfigError(
                f"{TRIES_VARIABLE} is {text!r}, not a number of 1 or more",
                fix=f"unset {TRIES_VARIABLE}, or set it to 5",
            )
        return cls(tries)


class ProcessCrashed(LaunchError):
    """The work raised an exception without a user message; its traceback is in the log."""


class ProcessKilled(LaunchError):
    """The process that did the work was killed."""

    transient = True


def run_step(step: str, work: Callable[[], T], *, secret: str = "", adopts: bool = False) -> T:
    """Do the work of a step in a child process, with retries; exit with an error's code if it fails.

    The message of a KubedetError is the end of the log, without a traceback; in a pod it is also the pod's
    termination message. `work` should import what it needs: this process stays small. `secret` names the
    Secret with the object store's keys, for messages. For `adopts` see `supervise`.
    """
    log.setup()
    environment.set_minio_endpoint()
    logger = logging.getLogger(f"kubedet.{step}")
    start = time.monotonic()

    def do_work() -> T:
        try:
            with translate_named_oserrors():
                return work()
        except KubedetError as error:
            environment.add_hint(error, secret)
            raise

    try:
        policy, on_orphaned = RetryPolicy.from_environment(), partial(_restart_orphaned_step, step)
        result = supervise(step, do_work, policy, adopts=adopts, on_orphaned=on_orphaned)
    except KubedetError as error:
        _report(error)
        raise SystemExit(error.exit_code) from None
    logger.info("step finished, %.1f s", time.monotonic() - start)
    return result


def retry_publishing(publish: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that publishes a step's result: retry it, and report its errors as the step's.

    The function runs in the parent process, whose artifacts Kubeflow reads.
    """

    @wraps(publish)
    def repeat(*args: P.args, **kwargs: P.kwargs) -> T:
        policy = RetryPolicy.from_environment()
        tries, wait = 1, policy.first_wait
        while True:
            try:
                with translate_named_oserrors():
                    return publish(*args, **kwargs)
            except KubedetError as error:
                if not error.transient or tries >= policy.tries:
                    _report(error)
                    raise SystemExit(error.exit_code) from None
                logger.warning("%s\n  trying again in %.0f s", error, wait)
            time.sleep(wait)
            tries, wait = tries + 1, min(3 * wait, policy.longest_wait)

    return repeat


def _restart_orphaned_step(step: str) -> None:
    """Report that the parent process was killed, and delete this pod: Kubeflow then repeats the step."""
    _report(
        ProcessKilled(
            f"the main process of the step {step} was killed",
            fix="if the step ran out of memory, raise step_memory; Retry in Kubeflow continues the run",
        )
    )
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        from components.launchers.cluster import client, own_pod

        with suppress(KubedetError):
            own_pod.delete(client.connect())
            time.sleep(_DELETION_SECONDS)


def record_outcome(text: str) -> None:
    """Write an error or the outcome of the run to the pod's status, where the clean-up step reads it."""
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        with suppress(OSError):
            TERMINATION_LOG.write_text(text.encode()[:_MESSAGE_BYTES].decode(errors="ignore"))


def _report(error: KubedetError) -> None:
    """Print an error, and write it to the pod's status."""
    record_outcome(str(error))
    events.emit(events.ProcessFailed(message=str(error), exit_code=error.exit_code))
    # Print it last, so that it ends the log.
    print(f"error: {error}", file=sys.stderr, flush=True)


def supervise(
    step: str,
    work: Callable[[], T],
    policy: RetryPolicy,
    *,
    adopts: bool = False,
    on_orphaned: Callable[[], None] = lambda: None,
) -> T:
    """Run work in child processes until an attempt succeeds, and return its result, which is pickled.

    SIGTERM and SIGINT are forwarded to the child process, and nothing is retried after them. With
    `adopts`, an attempt can continue a job that an earlier one started, so crashes are retried too.
    `on_orphaned` is called in the child process if this process is killed; then the child ends.
    """
    if policy.tries == 1:
        return work()
    tries, wait = 0, policy.first_wait
    stops: list[int] = []
    while True:
        began = time.monotonic()
        outcome = _run_once(work, on_orphaned, stops)
        if not isinstance(outcome, KubedetError):
            return outcome
        if stops:
            stopped = Interrupted(
                f"the step {step} was stopped", fix="run the same command again to continue"
            )
            raise outcome if isinstance(outcome, Interrupted) else stopped
        if time.monotonic() - began > policy.steady:
            tries, wait = 0, policy.first_wait
        tries += 1
        retry = outcome.transient or (adopts and isinstance(outcome, ProcessCrashed))
        if not retry or tries == policy.tries:
            raise outcome
        logger.warning("%s\n  trying again in %.0f s (%d of %d)", outcome, wait, tries + 1, policy.tries)
        end = time.monotonic() + wait
        with signal_handler(lambda number, frame: stops.append(number)):
            while not stops and (remaining := end - time.monotonic()) > 0:
                time.sleep(min(remaining, _POLL_SECONDS))
        if stops:
            raise Interrupted(f"the step {step} was stopped")
        wait = min(3 * wait, policy.longest_wait)


def _run_once(work: Callable[[], T], on_orphaned: Callable[[], None], stops: list[int]) -> T | KubedetError:
    """Do the work in a forked child process; return its result or error. `stops` receives stop signals."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child_main, args=(work, sender, os.getpid(), on_orphaned))

    def forward_signal(number: int, frame: object) -> None:
        stops.append(number)
        if child.is_alive():
            child.terminate()

    with signal_handler(forward_signal):
        child.start()
        sender.close()
        if stops:
            child.terminate()
        outcome: tuple[T | KubedetError] | None = None
        is_alive = True
        while outcome is None and is_alive:  # Child processes of the child may keep the pipe open.
            is_alive = child.exitcode is None
            if receiver.poll(_POLL_SECONDS if is_alive else 0):
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
        return ProcessCrashed(f"the process of the step ended with exit code {code} and without a message")
    name = signal.Signals(-code).name
    fix = "the step probably ran out of memory: raise step_memory, or lower data.processes"
    return ProcessKilled(f"the process of the step was killed ({name})", fix=fix)


def _child_main(
    work: Callable[[], Any], sender: Connection, supervisor: int, on_orphaned: Callable[[], None]
) -> None:
    def watch() -> None:
        while os.getppid() == supervisor:
            time.sleep(_POLL_SECONDS)
        on_orphaned()
        os._exit(EXIT_RETRY)

    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    threading.Thread(target=watch, daemon=True).start()
    outcome: Any
    try:
        outcome = work()
    except KubedetError as error:
        outcome = error
    except Exception as error:
        traceback.print_exc()
        outcome = ProcessCrashed(f"{type(error).__name__}: {error}".strip().splitlines()[0])
    sender.send(outcome)
    sender.close()
