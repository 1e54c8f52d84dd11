"""What the clean-up step does: ends what a run has left, and gathers why its steps failed.

It is given neither Secret nor claim, for it must run where just these are wrong. What a step said at its end
stands in its pod's status, where Kubernetes keeps it (see `steps.TERMINATION_LOG`).
"""

import logging
import os
from pathlib import Path
from typing import Any

from components import jobs
from trainer.errors import KubedetError

logger = logging.getLogger(__name__)

LABEL_RUN = "pipeline/runid"
"""Label of a run's pods; its value is the run's id."""

_NODE = "workflows.argoproj.io/node-name"
"""Annotation of a pod: its way in the workflow, e.g. run.root(0).exit-handler-1(0).train(0).executor(0)."""

_MAIN = "main"
"""Argo's name of the container that runs a step."""

_WELL = ("COMPLETE", "SUCCEEDED")

_HELD_BACK = ("OOMKilled", "Evicted")


def end(launcher: str, run_id: str, state: str, path: str) -> dict[str, str]:
    """Delete the run's training job if it is still there, and write how the run ended.

    Args:
        launcher: what started the training; empty where the run trains nothing.
        run_id: the run's id.
        state: how the steps ended: COMPLETE in a cluster, SUCCEEDED in Kubeflow's local runner, FAILED, ...
        path: local file that receives it, as Markdown.

    Returns:
        What is shown: state and, where steps failed, the last one's message.

    Raises:
        KubedetError: nobody could tell whether the job is there, or it could not be deleted.
    """
    well = state in _WELL
    failed = [] if well else failures(run_id)
    # As it is: of what stands free, Markdown takes the underscores.
    parts = [f"**{step}** failed:\n\n```\n{message}\n```\n" for step, message in failed]
    if not parts and not well:
        parts = ["No pod of the run says why: it was terminated, or its pods are gone.\n"]
    Path(path).write_text("\n".join([f"# The steps ended as {state.lower()}\n", *parts]))
    for step, message in failed:
        logger.error("%s failed: %s", step, message)
    if launcher:
        jobs.remove(launcher, run_id)
    return {"state": state, **({"reason": failed[-1][1]} if failed else {})}


def failures(run_id: str) -> list[tuple[str, str]]:
    """Return the steps of a run that failed, in the order of their ends, each with what it said.

    That they cannot be read is no error: it is said in the log.
    """
    if "KUBERNETES_SERVICE_HOST" not in os.environ:
        return []
    from components.launchers.cluster import client

    try:
        cluster = client.connect()
        pods = cluster.call(
            "list",
            "pods",
            lambda: cluster.core.list_namespaced_pod(
                cluster.namespace, label_selector=f"{LABEL_RUN}={run_id}"
            ),
        ).items
    except KubedetError as error:
        logger.warning("the pods of the run cannot be read: %s", error)
        return []
    found = [told for pod in pods if (told := _failure(pod)) is not None]
    return [(name, message) for _, name, message in sorted(found)]


def _failure(pod: Any) -> tuple[str, str, str] | None:
    """Return when a pod's step failed, the step, and what it said; None where it did not."""
    states = {item.name: item.state for item in pod.status.container_statuses or []}
    ended = states[_MAIN].terminated if states.get(_MAIN) else None
    if pod.status.phase != "Failed" and not (ended and ended.exit_code):
        return None
    words = (ended and ended.message) or pod.status.message or ""
    reasons = [pod.status.reason, ended and ended.reason]
    reason = next((word for word in reasons if word in _HELD_BACK), "")
    code = f"exit code {ended.exit_code}" if ended else "no exit code"
    message = ": ".join(filter(None, [reason, words.strip() or f"it said nothing ({code})"]))
    when = ended.finished_at.isoformat() if ended and ended.finished_at else ""
    return when, _step(pod), message


def _step(pod: Any) -> str:
    """Return a pod's place in the workflow, e.g. train or train-driver; its own name where it has none."""
    way = [part.partition("(")[0] for part in (pod.metadata.annotations or {}).get(_NODE, "").split(".")]
    return next((part for part in reversed(way) if part not in ("", "executor")), pod.metadata.name)
