"""Follows a run in a cluster to its end."""

import time
from typing import Any

from pipelines import ASSIST, CLEANUP, SEARCH, TITLES
from pipelines.failed_runs import raise_failure, stopped
from pipelines.kubeflow import ENDED, Server, Unavailable
from pipelines.pods import Pods
from trainer.base.log import clock

SECONDS = 5.0
"""Between two looks."""

PATIENCE = 900.0
"""How long Kubeflow Pipelines may be away before nobody waits any more, in seconds."""

_STEPS = TITLES | ASSIST | SEARCH | CLEANUP
_NAMES = _STEPS | {title: title for title in _STEPS.values()}
_ORDER = ("FAILED", "CANCELING", "RUNNING", "PENDING")
"""What is told of a step that several pods do: the first that any of them is."""


def follow(
    server: Server, run_id: str, *, deadline: int = 0, conditional: bool = False, secret: str = ""
) -> None:
    """Print how a run and its steps go on, and what holds them back, until it has ended.

    Args:
        server: where it runs.
        run_id: its id.
        deadline: seconds after which it is to be ended; 0 is never.
        conditional: whether it trains only where its source holds something new.
        secret: the Secret that it was asked to take the object store's keys from; empty is none.

    Raises:
        LaunchError: it failed, with the steps that did and what they said, or it was stopped.
        Unavailable: Kubeflow Pipelines was away for too long; the run may go on.
    """
    shown: dict[str, str] = {}
    reported: set[tuple[str, str]] = set()
    pods = Pods(run_id, server.namespace, _NAMES)
    start = seen = time.monotonic()
    away = False
    while True:
        try:
            run = server.run(run_id)
        except Unavailable as error:
            if time.monotonic() - seen > PATIENCE:
                raise
            if not away:
                _tell(start, f"no answer, trying again: {error.message}")
            away = True
        else:
            seen, away = time.monotonic(), False
            _show(run, shown, start)
            if run.state in ENDED:
                if left := _job_left(pods):
                    _tell(start, left)
                raise_failure(server, run, pods, _NAMES, deadline, secret)
                if conditional and TITLES["train"] not in shown:
                    _tell(start, "nothing new: nothing was trained; the step of the data says since when")
                return
            _show_waiting(pods, reported, start)
        time.sleep(SECONDS)


def _job_left(pods: Pods) -> str:
    """Describe a training job that outlives its run; one that is being deleted gets some seconds."""
    left = pods.job_left()
    for _ in range(3):
        if left:
            time.sleep(SECONDS)
            left = pods.job_left()
    return left


def _show(run: Any, shown: dict[str, str], start: float) -> None:
    for what, state in (_states(run) | {"run": run.state}).items():
        if state and state != shown.get(what):
            shown[what] = state
            # Who ends a run makes its steps fail.
            _tell(start, f"{what}: {'stopped' if state == 'FAILED' and stopped(run) else state.lower()}")


def _show_waiting(pods: Pods, reported: set[tuple[str, str]], start: float) -> None:
    """Tell what holds a step back, each reason once: Kubeflow Pipelines says `running` meanwhile."""
    for wait in pods.waiting():
        if (str(wait.step), wait.reason) not in reported:
            reported.add((str(wait.step), wait.reason))
            _tell(start, f"{wait.step} waits: {wait.reason}: {wait.text}")


def _states(run: Any) -> dict[str, str]:
    """Return the states of the pipeline's steps by title; drivers and inner graphs are no steps."""
    details = (run.run_details.task_details if run.run_details else None) or []
    states: dict[str, set[str]] = {}
    for item in details:
        if item.display_name in _NAMES and item.state:
            states.setdefault(_NAMES[item.display_name], set()).add(item.state)
    return {title: next((state for state in _ORDER if state in of), min(of)) for title, of in states.items()}


def _tell(start: float, text: str) -> None:
    print(f"{clock(time.monotonic() - start):>8}  {text}", flush=True)
