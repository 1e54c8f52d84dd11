"""Follows a run in a cluster to its end."""

import time
from typing import Any

from pipelines import OPTIONAL, SHARED, TITLES
from pipelines.kubeflow import Server, Unavailable
from trainer.errors import LaunchError
from trainer.log import clock

SECONDS = 5.0
"""Between two looks."""

PATIENCE = 900.0
"""How long Kubeflow Pipelines may be away before nobody waits any more, in seconds."""

_ENDED = ("SUCCEEDED", "FAILED", "CANCELED", "SKIPPED")
_STEPS = SHARED | TITLES | OPTIONAL
_NAMES = _STEPS | {title: title for title in _STEPS.values()} | {"cleanup": "Clean up"}


def follow(server: Server, run_id: str) -> None:
    """Print how a run and its steps go on, until it has ended.

    Args:
        server: where it runs.
        run_id: its id.

    Raises:
        LaunchError: it failed, with the steps that did and what they said, or it was stopped.
        Unavailable: Kubeflow Pipelines was away for too long; the run may go on.
    """
    shown: dict[str, str] = {}
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
            if run.state in _ENDED:
                _judge(run)
                return
        time.sleep(SECONDS)


def _show(run: Any, shown: dict[str, str], start: float) -> None:
    states = {title: detail.state for title, detail in _steps(run).items()} | {"run": run.state}
    for what, state in states.items():
        if state and state != shown.get(what):
            shown[what] = state
            _tell(start, f"{what}: {state.lower()}")


def _steps(run: Any) -> dict[str, Any]:
    """Return the details of the pipeline's steps by title; drivers and inner graphs are no steps."""
    details = (run.run_details.task_details if run.run_details else None) or []
    return {_NAMES[item.display_name]: item for item in details if item.display_name in _NAMES}


def _judge(run: Any) -> None:
    """Raise an error unless the run ended well."""
    if run.state == "SUCCEEDED":
        return
    failed = {title: item for title, item in _steps(run).items() if item.state == "FAILED"}
    said = [f"  {title}: {_words(item.error)}" for title, item in failed.items()]
    said += [f"  {_words(run.error)}"] if run.error else []
    ended = {"FAILED": "failed", "CANCELED": "was stopped"}.get(run.state, f"ended as {run.state.lower()}")
    raise LaunchError(
        "\n".join([f"the run {run.display_name or run.run_id} {ended}", *said]),
        fix="look at the log of the failed step in the UI" if failed or run.error else "",
    )


def _words(error: Any) -> str:
    return (getattr(error, "message", None) or "failed").strip()


def _tell(start: float, text: str) -> None:
    print(f"{clock(time.monotonic() - start):>8}  {text}", flush=True)
