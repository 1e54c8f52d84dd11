"""What the pods of a job say of themselves, and what the cluster says of them."""

import re
from collections.abc import Iterable
from typing import Any

from components.launchers.backend import Ending, JobStatus, PodStatus
from components.launchers.cluster.client import Cluster
from components.launchers.cluster.refusals import ApiError
from components.launchers.render.pod import CONTAINER

LABEL_JOB = "training.kubeflow.org/job-name"
LABEL_TYPE = "training.kubeflow.org/replica-type"
LABEL_INDEX = "training.kubeflow.org/replica-index"

_SHOWN = 5  # Events of one object that are worth reading.
_WORDS = 400  # Characters of one event.
_USUAL = (None, "PodInitializing", "ContainerCreating")  # On the way of every pod.


def of_job(cluster: Cluster, job: str, *, patience: float | None = None) -> list[Any]:
    """Return the pods (V1Pod) of a job."""
    return _select(cluster, f"{LABEL_JOB}={job}", patience)


def of_all(cluster: Cluster) -> list[Any]:
    """Return the pods (V1Pod) of all PyTorchJobs of a namespace."""
    return _select(cluster, LABEL_JOB, None)


def _select(cluster: Cluster, labels: str, patience: float | None) -> list[Any]:
    return cluster.call(
        "list",
        "pods",
        lambda: cluster.core.list_namespaced_pod(cluster.namespace, label_selector=labels),
        patience=patience,
    ).items


def statuses(pods: Iterable[Any], *, master: bool) -> tuple[PodStatus, ...]:
    """Tell how pods are, by rank.

    Args:
        pods: V1Pods of one job.
        master: whether the job has a master, which is rank 0; without one it is the first worker.
    """
    told = [status(pod, master) for pod in pods]
    return tuple(sorted(told, key=lambda pod: (pod.rank, pod.created)))


def status(pod: Any, master: bool) -> PodStatus:
    """Tell how one pod is; see `statuses`."""
    labels = pod.metadata.labels or {}
    index = int(labels.get(LABEL_INDEX, 0))
    container = main_container(pod)
    ended = container and container.state and container.state.terminated
    reason, message, about = _why(pod)
    last = container and container.last_state and container.last_state.terminated
    return PodStatus(
        name=pod.metadata.name,
        phase=pod.status.phase or "Unknown",
        rank=index + (master and labels.get(LABEL_TYPE) == "worker"),
        reason=reason,
        message=message,
        exit_code=ended.exit_code if ended else None,
        restarts=container.restart_count if container else 0,
        node=pod.spec.node_name or "",
        uid=pod.metadata.uid,
        created=rfc3339(pod.metadata.creation_timestamp),
        ended=rfc3339(ended.finished_at) if ended else "",
        image=_image(pod, about),
        before=Ending(last.reason or "", last.message or "", last.exit_code) if last else None,
    )


def main_container(pod: Any) -> Any:
    """Return the status of the container that trains (V1ContainerStatus), if it has one yet."""
    told = pod.status.container_statuses or []
    return next((item for item in told if item.name == CONTAINER), None)


def _why(pod: Any) -> tuple[str, str, str]:
    """Return reason and message of what holds a pod back or ended it, and the container they are about."""
    if pod.status.reason:  # Evicted, NodeLost, ...: the pod as a whole.
        return pod.status.reason, pod.status.message or "", CONTAINER
    containers = [*(pod.status.init_container_statuses or []), *(pod.status.container_statuses or [])]
    for container in containers:
        state = container.state
        ended = state and state.terminated
        if state and state.waiting and state.waiting.reason not in _USUAL:
            return state.waiting.reason, state.waiting.message or "", container.name
        if ended and ended.exit_code != 0:
            return ended.reason or "Error", ended.message or "", container.name
    for condition in pod.status.conditions or []:
        if condition.type == "PodScheduled" and condition.status == "False":
            return condition.reason or "Unschedulable", condition.message or "", CONTAINER
    return "", "", CONTAINER


def _image(pod: Any, container: str) -> str:
    """Return the image of a container as the pod asks for it."""
    there = [*(pod.spec.init_containers or []), *(pod.spec.containers or [])]
    return next((item.image or "" for item in there if item.name == container), "")


def explain(cluster: Cluster, status: JobStatus) -> list[str]:
    """Say why the pods of a job do not run: what holds them back, and the cluster's events.

    Args:
        cluster: where they are.
        status: how the job is.
    """
    lines = []
    if not status.pods:
        lines.append("no pod was made: see that the Training Operator runs, and the quota of the namespace")
    elif len(status.pods) < status.nodes:
        lines.append(f"of {status.nodes} pods there are {len(status.pods)}")
    for pod in status.pods:
        if pod.phase not in ("Running", "Succeeded"):
            lines.append(f"pod {pod.name} is {pod.phase}{describe(pod)}")
            lines += [f"  the one before it ended: {pod.before}"] if pod.before else []
            lines += [f"  {line}" for line in events(cluster, "Pod", pod.name)]
    return lines + events(cluster, "PyTorchJob", status.name)


def describe(pod: PodStatus) -> str:
    """Return what is said of a pod's reason, to stand behind its name."""
    words = ": ".join(filter(None, [pod.reason, " ".join(pod.message.split())]))
    return f": {words}" if words else ""


def events(cluster: Cluster, kind: str, name: str) -> list[str]:
    """Return the newest events of an object, a line for each; that they are forbidden is told too."""
    try:
        found = _events(cluster, kind, name)
    except ApiError as error:
        return [f"its events are not known: {error.message}"]
    lines = dict.fromkeys(_event(event) for event in found)  # Each once, in their order.
    return list(lines)[-_SHOWN:]


def last_exit(cluster: Cluster, job: str, pod: str) -> str:
    """Return how the pod before one of the same name ended, in the operator's words; nothing if unknown.

    The operator deletes a pod that is to be made anew as soon as it has ended.
    """
    try:
        found = _events(cluster, "PyTorchJob", job)
    except ApiError:
        return ""
    ends = [
        re.search(r"exited with code [1-9]\d*", event.message or "")
        for event in found
        if pod in (event.message or "")
    ]
    told = [end.group() for end in ends if end]
    return told[-1] if told else ""


def _events(cluster: Cluster, kind: str, name: str) -> list[Any]:
    """Return the events (CoreV1Event) of an object, the newest last."""
    selector = f"involvedObject.kind={kind},involvedObject.name={name}"
    found = cluster.call(
        "list",
        "events",
        lambda: cluster.core.list_namespaced_event(cluster.namespace, field_selector=selector),
        patience=min(5.0, cluster.timings.patience),
    ).items
    return sorted(found, key=lambda event: rfc3339(event.last_timestamp or event.metadata.creation_timestamp))


def _event(event: Any) -> str:
    often = f" (x{event.count})" if (event.count or 1) > 1 else ""
    return f"{event.reason}{often}: {' '.join((event.message or '').split())[:_WORDS]}"


def rfc3339(moment: Any) -> str:
    """Return a time as RFC 3339, which sorts."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ") if moment else ""
