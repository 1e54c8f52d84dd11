"""The work of the clean-up step: deletes the run's training job, and reports why its steps failed.

It gets neither Secret nor claim: it must run if these are wrong. A failed step's message is in its pod's
status (see `steps.TERMINATION_LOG`).
"""

import logging
import os
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from components import environment, hooks, jobs
from trainer.base.errors import KubedetError

logger = logging.getLogger(__name__)

_NODE_NAME = "workflows.argoproj.io/node-name"
"""Annotation of a pod: its path in the workflow, e.g. run.root(0).exit-handler-1(0).train(0).executor(0)."""
_MAIN = "main"  # Argo's name of the container that runs a step.
_SUCCEEDED = ("COMPLETE", "SUCCEEDED")
_SHOWN_REASONS = ("OOMKilled", "Evicted")
_SIGNALS = 128  # Exit codes from here on are those of processes that a signal ended.
_UNKNOWN = "No pod of the run says why: its pods are gone, or cannot be read."
_STOPPED, _BY_USER = "STOPPED", "The run was stopped by a user"
"""State of a run that a user ended, and its reason."""


def end(launcher: str, run_id: str, state: str, path: str) -> dict[str, str]:
    """Delete the run's training job if it still exists, write how the run ended, report a failure to the
    hooks.

    Args:
        launcher: what started the training; empty if the run trains nothing.
        run_id: the run's id.
        state: how the steps ended: COMPLETE in a cluster, SUCCEEDED in Kubeflow's local runner, FAILED, ...
        path: local file that receives it, as Markdown.

    Returns:
        state (STOPPED if a user ended the run), and reason: the last message of a failed step, or what ended
        the run.

    Raises:
        KubedetError: whether the job exists is not known, or it could not be deleted.
    """
    succeeded = state in _SUCCEEDED
    failed, ended = ([], "") if succeeded else (failures(run_id), _ended_from_outside(state))
    if ended:
        # What a signal ended did not fail: the end of the run did that.
        stopped = [step for step, _, code in failed if code >= _SIGNALS]
        failed = [failure for failure in failed if failure[2] < _SIGNALS]
        ended += f" during {', '.join(stopped)}" if stopped else ""
    state = _STOPPED if ended.startswith(_BY_USER) else state
    # As it is: of what stands free, Markdown takes the underscores.
    parts = [f"**{step}** failed:\n\n```\n{message}\n```\n" for step, message, _ in failed]
    if ended or not (parts or succeeded):
        parts.insert(0, f"{ended or _UNKNOWN}\n")
    Path(path).write_text("\n".join([f"# The steps ended as {state.lower()}\n", *parts]))
    for step, message, _ in failed:
        logger.error("%s failed: %s", step, message)
    reason = ended or (": ".join(failed[-1][:2]) if failed else _UNKNOWN)
    try:
        if launcher:
            jobs.remove(launcher, run_id)
    finally:
        if not succeeded:
            # This pod's disk keeps that it was told: the rest of this may be tried again.
            outcome = hooks.Outcome(hooks.STOPPED if state == _STOPPED else hooks.FAILED, run_id, reason)
            hooks.at_end(hooks.End("cleanup", outcome=outcome, folder=str(Path(path).parent)))
    shown = ended or (failed[-1][1] if failed else "")
    return {"state": state, **({"reason": shown} if shown else {})}


def _ended_from_outside(state: str) -> str:
    """Return what ended the run other than its steps: a user, or its deadline; empty if nothing did.

    Kubeflow terminates a run by setting activeDeadlineSeconds of its Workflow to 0; Argo's own commands set
    `shutdown`. (`TerminateRun` and `patchWorkflow` in backend/src/apiserver of Kubeflow Pipelines 2.17.)
    """
    if state == "CANCELED":
        return _BY_USER
    if "KUBERNETES_SERVICE_HOST" not in os.environ:
        return ""
    from components.launchers.cluster import client, own_pod

    try:
        workflow = own_pod.read_workflow(client.connect())
    except KubedetError as error:
        logger.warning("the workflow of the run cannot be read: %s", error)
        return ""
    spec, status = (workflow.get(part) or {} for part in ("spec", "status"))
    deadline = spec.get("activeDeadlineSeconds")
    if spec.get("shutdown") or deadline == 0:
        return _BY_USER
    if deadline and (began := status.get("startedAt")):
        seconds = (datetime.now(UTC) - datetime.fromisoformat(began)).total_seconds()
        if seconds >= deadline:
            return f"The run was ended at its deadline of {deadline} s"
    return ""


def failures(run_id: str) -> list[tuple[str, str, int]]:
    """Return the steps of a run that failed, in the order of their ends, with message and exit code (or 0).

    If the pods cannot be read, that is only logged.
    """
    if "KUBERNETES_SERVICE_HOST" not in os.environ:
        return []
    from components.launchers.cluster import client

    try:
        cluster = client.connect()
        label = f"{environment.RUN_LABEL}={run_id}"
        request = partial(cluster.core.list_namespaced_pod, cluster.namespace, label_selector=label)
        pods = cluster.call("list", "pods", request).items
    except KubedetError as error:
        logger.warning("the pods of the run cannot be read: %s", error)
        return []
    failed = [failure for pod in pods if (failure := _failure(pod)) is not None]
    return [failure[1:] for failure in sorted(failed)]


def _failure(pod: Any) -> tuple[str, str, str, int] | None:
    states = {item.name: item.state for item in pod.status.container_statuses or []}
    termination = states[_MAIN].terminated if states.get(_MAIN) else None
    if pod.status.phase != "Failed" and not (termination and termination.exit_code):
        return None
    text = (termination and termination.message) or pod.status.message or ""
    reasons = [pod.status.reason, termination and termination.reason]
    reason = next((word for word in reasons if word in _SHOWN_REASONS), "")
    code = f"exit code {termination.exit_code}" if termination else "no exit code"
    message = ": ".join(filter(None, [reason, text.strip() or f"it said nothing ({code})"]))
    when = termination.finished_at.isoformat() if termination and termination.finished_at else ""
    return when, _step(pod), message, termination.exit_code if termination else 0


def _step(pod: Any) -> str:
    nodes = [
        part.partition("(")[0] for part in (pod.metadata.annotations or {}).get(_NODE_NAME, "").split(".")
    ]
    return next((part for part in reversed(nodes) if part not in ("", "executor")), pod.metadata.name)
