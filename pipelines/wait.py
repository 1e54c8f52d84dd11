"""Follows a run in a cluster to its end, and explains a failure.

Kubeflow Pipelines 2.17 leaves the `error` of runs and steps empty. So the pods' state is read, or if the
cluster's API cannot be reached the logs in Kubeflow's API; else the message names the log.
"""

import textwrap
import time
from typing import Any

from pipelines import ASSIST, CLEANUP, SEARCH, TITLES
from pipelines.kubeflow import ENDED, Server, Unavailable, stopped
from pipelines.pods import LABEL, MAIN, Cause, Pods, Step, error_of_log
from trainer.base.errors import LaunchError
from trainer.base.log import clock

SECONDS = 5.0
"""Between two requests."""

PATIENCE = 900.0
"""Seconds of an outage of Kubeflow Pipelines after which `follow` gives up."""

_STEPS = TITLES | ASSIST | SEARCH | CLEANUP
_NAMES = _STEPS | {title: title for title in _STEPS.values()}
_ORDER = ("FAILED", "CANCELING", "RUNNING", "PENDING")
"""The state of a step with several pods is the first that any of them has."""

_IMPLEMENTATIONS = ("retry-system-container-impl", "system-container-impl")
_DRIVERS = ("system-container-driver", "system-dag-driver")
"""Templates of Kubeflow's workflows, which are part of the names of their pods."""

_AGAIN = "finished work is reused by a new run, and by this one after `Retry` in the UI"


def follow(
    server: Server, run_id: str, *, deadline: int = 0, conditional: bool = False, secret: str = ""
) -> None:
    """Print the states of a run and its steps, and reasons for waiting, until it has ended.

    `deadline` is in seconds (0 is none); a `conditional` run may skip training; `secret` is the Secret with
    its object store's keys, if one was named.

    Raises:
        LaunchError: it failed, with the errors of its steps, or it was stopped.
        Unavailable: Kubeflow Pipelines did not answer for too long; the run may continue.
    """
    shown: dict[str, str] = {}
    reported: set[tuple[str, str]] = set()
    pods = Pods(run_id, server.namespace, _NAMES)
    start = last_answer = time.monotonic()
    away = False

    def show(text: str) -> None:
        print(f"{clock(time.monotonic() - start):>8}  {text}", flush=True)

    while True:
        try:
            run = server.run(run_id)
        except Unavailable as error:
            if time.monotonic() - last_answer > PATIENCE:
                raise
            if not away:
                show(f"no answer, trying again: {error.message}")
            away = True
            time.sleep(SECONDS)
            continue
        last_answer, away = time.monotonic(), False
        for name, state in (_states(run) | {"run": run.state}).items():
            if state and state != shown.get(name):
                shown[name] = state
                # The steps of a stopped run fail.
                show(f"{name}: {'stopped' if state == 'FAILED' and stopped(run) else state.lower()}")
        if run.state in ENDED:
            raise_failure(server, run, pods, _NAMES, deadline, secret)
            if conditional and TITLES["train"] not in shown:
                show("nothing new: nothing was trained; see the step that prepares the data")
            return
        for wait in pods.waiting():
            if (str(wait.step), wait.reason) not in reported:
                reported.add((str(wait.step), wait.reason))
                show(f"{wait.step} waits: {wait.reason}: {wait.text}")
        time.sleep(SECONDS)


def _states(run: Any) -> dict[str, str]:
    """Return the states of the pipeline's steps by title, without drivers and inner graphs."""
    states: dict[str, set[str]] = {}
    for item in _tasks(run):
        if item.display_name in _NAMES and item.state:
            states.setdefault(_NAMES[item.display_name], set()).add(item.state)
    return {title: next((state for state in _ORDER if state in of), min(of)) for title, of in states.items()}


def _tasks(run: Any) -> list[Any]:
    return (run.run_details.task_details if run.run_details else None) or []


def raise_failure(
    server: Server, run: Any, pods: Pods, titles: dict[str, str], deadline: int, secret: str = ""
) -> None:
    """Raise an error unless a run, which has ended, succeeded; `titles` are those of the steps, by name.

    Raises:
        LaunchError: it failed, with the errors of its steps, or it was stopped.
    """
    if run.state == "SUCCEEDED":
        return
    name = f"the run {run.display_name or run.run_id}"
    if stopped(run):
        raise LaunchError(f"{name} was stopped", fix=f"start it again: {_AGAIN}")
    if run.state != "FAILED":
        raise LaunchError(f"{name} ended as {run.state.lower()}")
    took = (run.finished_at - run.created_at).total_seconds() if run.created_at and run.finished_at else 0.0
    if deadline and took >= deadline:
        raise LaunchError(
            f"{name} was ended at its deadline of {deadline} s",
            fix="raise --deadline: a new run reuses finished work",
        )
    causes = _causes(server, run, pods, titles)
    lines = [line for cause in causes for line in _lines(cause, alone=len(causes) == 1)]
    remedy = _remedy(server, run, causes, pods)
    # After the causes, whose search finds the namespace. Without keys a step blames region or network.
    if secret and (namespace := pods.without_secret(secret)):
        missing = f"there is no Secret {secret} in namespace {namespace}: its steps had no keys from it"
        lines.insert(0, f"  {missing}")
        remedy = f"create the Secret {secret} there, or name another with --credentials; else {remedy}"
    raise LaunchError("\n".join([f"{name} failed", *lines]), fix=remedy)


def _causes(server: Server, run: Any, pods: Pods, titles: dict[str, str]) -> list[Cause]:
    failed = [item for item in _tasks(run) if item.state == "FAILED"]
    steps = {step: item for item in failed if (step := _step(item.display_name or "", titles))}
    causes = {cause.step: cause for cause in pods.failed()}
    for step, task in steps.items():
        if message := _message(task.error):
            causes[step] = Cause.of(step, message)
    missing = {step: item for step, item in steps.items() if step not in causes}
    # In the API a step's pods are children of tasks `executor`, which do not name the step.
    executors = [item for item in failed if item.display_name == "executor"]
    if sum(not step.driver for step in missing) != 1:
        executors = []
    for step, task in missing.items():
        for item in [task] if step.driver else executors:
            for child in item.child_tasks or []:
                if child.pod_name and (text := _log(server, run, child.pod_name, driver=step.driver)):
                    causes[step] = Cause.of(step, text)
    if message := _message(run.error):
        causes[Step("run")] = Cause(Step("run"), message)
    causes |= {step: Cause(step, "failed") for step in steps if step not in causes}
    return list(causes.values())


def _step(name: str, titles: dict[str, str]) -> Step | None:
    """Return the step of a task; None for graphs around steps, and for attempts."""
    if name.endswith("-driver"):
        plain = name.removesuffix("-driver")
        return Step(titles.get(plain, plain), driver=True)
    return Step(titles[name]) if name in titles else None


def _log(server: Server, run: Any, node: str, *, driver: bool) -> str:
    """Return the end of the log of a workflow node's pod; empty if it cannot be read."""
    workflow, _, number = node.rpartition("-")
    for template in _DRIVERS if driver else _IMPLEMENTATIONS:
        if log := server.pod_log(f"{workflow}-{template}-{number}", run.run_id):
            return error_of_log(log)
    return ""


def _lines(cause: Cause, *, alone: bool) -> list[str]:
    """Return the lines of a cause; the fix of a single cause is that of the whole error."""
    first, *rest = f"{cause.step}: {cause.text.strip()}".splitlines()
    fix = [f"fix: {cause.fix}"] if cause.fix and not alone else []
    return [f"  {first}", *(f"    {line}" for line in [*textwrap.dedent("\n".join(rest)).splitlines(), *fix])]


def _remedy(server: Server, run: Any, causes: list[Cause], pods: Pods) -> str:
    if len(causes) == 1 and causes[0].fix:
        return causes[0].fix
    if causes and all(cause.fix for cause in causes):
        return "see the steps above"
    steps = " and ".join(dict.fromkeys(str(cause.step) for cause in causes)) or "the step that failed"
    namespace = pods.namespace() or server.namespace or "kubeflow"
    return (
        f"look at the log of {steps}: in the UI at {server.link('runs', run.run_id)}, or "
        f"`kubectl -n {namespace} logs -l {LABEL}={run.run_id} -c {MAIN} --prefix --tail 50`"
    )


def _message(error: Any) -> str:
    return (getattr(error, "message", None) or "").strip()
