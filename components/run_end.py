"""The work of the clean-up step. It mounts no Secret or claim, so it runs even if these are missing."""

import logging
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from components import environment, hooks, jobs
from trainer.base.errors import KubedetError

logger = logging.getLogger(__name__)

_NODE_NAME = "workflows.argoproj.io/node-name"
"""Annotation of a pod with its path in the workflow: run.root(0).exit-handler-1(0).train(0).executor(0)."""
_SIGNAL_BASE = 128  # Higher exit codes mean that a signal ended the process.
_UNKNOWN_REASON = "The reason is unknown: the pods of the run do not exist or cannot be read."
_STOPPED_BY_USER = "The run was stopped by a user"


class Failure(NamedTuple):
    """A failed step. Failures are sorted by the time of their end."""

    when: str
    step: str
    message: str
    code: int  # Exit code, or 0.


def clean_up(launcher: str, run_id: str, state: str, path: str) -> dict[str, str]:
    """Delete the run's training job if it still exists, write how the run ended, call the hooks on failure.

    `launcher` is empty if the run trains nothing; `state` is COMPLETE in a cluster, SUCCEEDED in Kubeflow's
    local runner, FAILED, ...; `path` is a local file that receives the report, as Markdown. Returns the
    outcome as `state`, "succeeded" or one of `hooks.EVENTS`, and the `reason` if there is one.

    An outcome in a pod takes precedence over `state`: Kubeflow Pipelines 2.17 leaves the graph of a skipped
    step RUNNING (`UpdateDAGExecutionsState` in backend/src/v2/metadata/client.go).
    """
    pods = _list_pods(run_id)
    event, reason = _find_outcome(pods)
    failed, ended = [], ""
    if not event and state in ("COMPLETE", "SUCCEEDED"):
        event = "succeeded"
    elif not event:
        failed, ended = find_failures(pods), _termination_reason(state)
        if ended:  # Steps that a signal ended did not fail, but were stopped with the run.
            stopped = [failure.step for failure in failed if failure.code >= _SIGNAL_BASE]
            failed = [failure for failure in failed if failure.code < _SIGNAL_BASE]
            ended += f" during {', '.join(stopped)}" if stopped else ""
        event = hooks.STOPPED if ended.startswith(_STOPPED_BY_USER) else hooks.FAILED
        reason = ended or (f"{failed[-1].step}: {failed[-1].message}" if failed else _UNKNOWN_REASON)
    parts = [f"**{each.step}** failed:\n\n```\n{each.message}\n```\n" for each in failed]
    if reason and (ended or not failed):
        parts.insert(0, reason.replace("\n", "\n\n") + "\n")
    Path(path).write_text("\n".join([f"# Outcome: {event}\n", *parts]))
    logger.info("outcome: %s", f"{event}: {reason}" if reason else event)
    for failure in failed:
        logger.error("%s failed: %s", failure.step, failure.message)
    try:
        if launcher:
            jobs.delete_unfinished(launcher, run_id)
    finally:
        if event in (
            hooks.STOPPED,
            hooks.FAILED,
        ):  # Other outcomes were reported by their steps.
            outcome = hooks.Outcome(event, run_id, reason)
            # The folder is on this pod's disk: retries of the step send no second notice.
            hooks.on_step_end(hooks.StepEnd("cleanup", outcome, str(Path(path).parent)))
    return {"state": event, **({"reason": reason} if reason else {})}


def _termination_reason(state: str) -> str:
    """Return whether a user or the deadline ended the run, as a text; empty if its steps did.

    Kubeflow terminates a run by setting activeDeadlineSeconds of its Workflow to 0; Argo's own commands set
    `shutdown`. (`TerminateRun` and `patchWorkflow` in backend/src/apiserver of Kubeflow Pipelines 2.17.)
    """
    if state == "CANCELED":
        return _STOPPED_BY_USER
    if "KUBERNETES_SERVICE_HOST" not in os.environ:
        return ""
    from components.launchers.cluster import client, own_pod

    try:
        workflow = own_pod.read_workflow(client.connect())
    except KubedetError as error:
        logger.warning("the workflow of the run cannot be read: %s", error)
        return ""
    spec, status = (workflow.get(part) or {} for part in ("spec", "status"))
    deadline, began = spec.get("activeDeadlineSeconds"), status.get("startedAt")
    if spec.get("shutdown") or deadline == 0:
        return _STOPPED_BY_USER
    if deadline and began:
        seconds = (datetime.now(UTC) - datetime.fromisoformat(began)).total_seconds()
        if seconds >= deadline:
            return f"The run reached its deadline of {deadline} s"
    return ""


def _list_pods(run_id: str) -> list[Any]:
    """Return the pods (V1Pod) of a run; none, with a warning, if they cannot be read."""
    if "KUBERNETES_SERVICE_HOST" not in os.environ:
        return []
    from components.launchers.cluster import client
    from components.launchers.cluster.pods import list_pods

    try:
        return list_pods(client.connect(), f"{environment.RUN_LABEL}={run_id}")
    except KubedetError as error:
        logger.warning("the pods of the run cannot be read: %s", error)
        return []


def read_termination(pod: Any) -> Any:
    """Return how the container of a step's code ended (V1ContainerStateTerminated); None if unknown."""
    states = {item.name: item.state for item in pod.status.container_statuses or []}
    return states["main"].terminated if states.get("main") else None


def _find_outcome(pods: list[Any]) -> tuple[str, str]:
    """Return the outcome and the reason that a step recorded in its pod's status; both may be empty."""
    for ended in filter(None, map(read_termination, pods)):
        event, _, reason = (ended.message or "").partition("\n")
        if event in hooks.DECIDED_OUTCOMES and ended.exit_code == 0:
            return event, reason
    return "", ""


def find_failures(pods: list[Any]) -> list[Failure]:
    """Return the failed steps among a run's pods, sorted by their ends."""
    failed = []
    for pod in pods:
        ended = read_termination(pod)
        code = ended.exit_code if ended else 0
        if pod.status.phase != "Failed" and not code:
            continue
        text = (ended and ended.message) or pod.status.message or ""
        text = text.strip() or f"no message ({f'exit code {code}' if ended else 'no exit code'})"
        for reason in ("Evicted", "OOMKilled"):
            if reason in (pod.status.reason, ended and ended.reason):
                text = f"{reason}: {text}"
        when = ended.finished_at.isoformat() if ended and ended.finished_at else ""
        path = (pod.metadata.annotations or {}).get(_NODE_NAME, "").split(".")
        nodes = [name for part in path if (name := part.partition("(")[0]) not in ("", "executor")]
        failed.append(Failure(when, [pod.metadata.name, *nodes][-1], text, code))
    return sorted(failed)
