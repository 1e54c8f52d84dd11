"""Why a run in a cluster failed: from Kubeflow's API, from its pods, or from the logs that Kubeflow shows.

Kubeflow Pipelines 2.17 leaves the `error` of runs and steps empty. So the state of the pods is read, and
where the cluster's API cannot be reached the logs in Kubeflow's API or UI; else the message names the log.
"""

import textwrap
from typing import Any

from pipelines.kubeflow import Server
from pipelines.pods import LABEL, MAIN, Cause, Pods, Step, error_of_log, message_and_fix
from trainer.base.errors import LaunchError

_IMPLEMENTATIONS = ("retry-system-container-impl", "system-container-impl")
_DRIVERS = ("system-container-driver", "system-dag-driver")
"""Templates of Kubeflow's workflows, whose names are in the names of their pods."""

_AGAIN = "what it had finished is found by a new one, and by this one after `Retry` in the UI"


def raise_failure(
    server: Server, run: Any, pods: Pods, titles: dict[str, str], deadline: int, secret: str = ""
) -> None:
    """Raise an error unless a run succeeded.

    Args:
        server: where it ran.
        run: the run, which has ended.
        pods: its pods.
        titles: of the steps, by name.
        deadline: seconds after which it was to be ended; 0 is never.
        secret: the Secret that the run was asked to take the object store's keys from; empty is none.

    Raises:
        LaunchError: it failed, with the steps that did and what they said; or it was stopped.
    """
    if run.state == "SUCCEEDED":
        return
    name = f"the run {run.display_name or run.run_id}"
    if stopped(run):
        raise LaunchError(f"{name} was stopped", fix=f"start it again: {_AGAIN}")
    if run.state != "FAILED":
        raise LaunchError(f"{name} ended as {run.state.lower()}")
    if deadline and _seconds(run) >= deadline:
        raise LaunchError(
            f"{name} was ended at its deadline of {deadline} s",
            fix="raise --deadline: a new run finds what this one had finished",
        )
    causes = _causes(server, run, pods, titles)
    lines = [line for cause in causes for line in _lines(cause, alone=len(causes) == 1)]
    remedy = _remedy(server, run, causes, pods)
    # Last, for the search of the causes finds the namespace. Without keys a step blames region or network.
    if secret and (namespace := pods.without_secret(secret)):
        lines.insert(
            0, f"  there is no Secret {secret} in namespace {namespace}: its steps had no keys from it"
        )
        remedy = f"create the Secret {secret} there, or name another with --credentials; else {remedy}"
    raise LaunchError("\n".join([f"{name} failed", *lines]), fix=remedy)


def stopped(run: Any) -> bool:
    """Whether a run was or is being cancelled: such a run is CANCELING first, and FAILED at the end."""
    states = [item.state for item in run.state_history or []]
    while states and states[-1] == "FAILED":
        states.pop()
    return run.state == "CANCELED" or states[-1:] in (["CANCELING"], ["CANCELED"])


def _seconds(run: Any) -> float:
    if not (run.created_at and run.finished_at):
        return 0.0
    return (run.finished_at - run.created_at).total_seconds()


def _causes(server: Server, run: Any, pods: Pods, titles: dict[str, str]) -> list[Cause]:
    """Return what is known of each step that failed, and of the run as a whole."""
    tasks = (run.run_details.task_details if run.run_details else None) or []
    failed = [item for item in tasks if item.state == "FAILED"]
    steps = {step: item for item in failed if (step := _step(item.display_name or "", titles))}
    causes = {cause.step: cause for cause in pods.failed()}
    for step, task in steps.items():
        if message := _message(task.error):
            causes[step] = Cause(step, *message_and_fix(message))
    missing = {step: item for step, item in steps.items() if step not in causes}
    for step, task in missing.items():
        alone = sum(not other.driver for other in missing) == 1
        for node in _nodes(step, task, failed if alone else []):
            if text := _log(server, run, node, driver=step.driver):
                causes[step] = Cause(step, *message_and_fix(text))
    if message := _message(run.error):
        causes[Step("run")] = Cause(Step("run"), message)
    causes |= {step: Cause(step, "failed") for step in steps if step not in causes}
    return list(causes.values())


def _step(name: str, titles: dict[str, str]) -> Step | None:
    """Return the step of a task; the graphs around steps, and attempts, are none."""
    if name.endswith("-driver"):
        plain = name.removesuffix("-driver")
        return Step(titles.get(plain, plain), driver=True)
    return Step(titles[name]) if name in titles else None


def _nodes(step: Step, task: Any, failed: list[Any]) -> list[str]:
    """Return the nodes of the workflow whose pods did a step.

    The API names none for a step itself: its nodes are children of tasks `executor`, which name no step.

    Args:
        step: the step.
        task: the API's record of the step, or of its driver.
        failed: all tasks that failed, where this step alone did.
    """
    tasks = [task] if step.driver else [item for item in failed if item.display_name == "executor"]
    return [child.pod_name for item in tasks for child in item.child_tasks or [] if child.pod_name]


def _log(server: Server, run: Any, node: str, *, driver: bool) -> str:
    """Return the end of the log of a node's pod; empty where it cannot be read."""
    workflow, _, number = node.rpartition("-")
    for template in _DRIVERS if driver else _IMPLEMENTATIONS:
        if log := server.pod_log(f"{workflow}-{template}-{number}", run.run_id):
            return error_of_log(log)
    return ""


def _lines(cause: Cause, *, alone: bool) -> list[str]:
    """Return the lines of a cause in the message; the fix of a single cause becomes that of the error."""
    first, *rest = f"{cause.step}: {cause.text.strip()}".splitlines()
    fix = [f"fix: {cause.fix}"] if cause.fix and not alone else []
    return [f"  {first}", *(f"    {line}" for line in [*textwrap.dedent("\n".join(rest)).splitlines(), *fix])]


def _remedy(server: Server, run: Any, causes: list[Cause], pods: Pods) -> str:
    if len(causes) == 1 and causes[0].fix:
        return causes[0].fix
    if causes and all(cause.fix for cause in causes):
        return "see the steps above"
    which = " and ".join(dict.fromkeys(str(cause.step) for cause in causes)) or "the step that failed"
    namespace = pods.namespace() or server.namespace or "kubeflow"
    return (
        f"look at the log of {which}: in the UI at {server.link('runs', run.run_id)}, or "
        f"`kubectl -n {namespace} logs -l {LABEL}={run.run_id} -c {MAIN} --prefix --tail 50`"
    )


def _message(error: Any) -> str:
    return (getattr(error, "message", None) or "").strip()
