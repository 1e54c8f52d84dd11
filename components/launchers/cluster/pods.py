"""Status of a job's pods, and the cluster's events about them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from components.launchers.backend import Ending, JobStatus, PodStatus
from components.launchers.cluster.client import ApiError, Cluster
from components.launchers.cluster.kinds.kind import Kind
from components.launchers.pod_template import MAIN

Rank = Callable[[Mapping[str, str]], int]
"""Returns the rank of a pod's node, from 0, from the pod's labels."""

_SHOWN = 5  # Events of one object that are worth reading.
_WORDS = 400  # Characters of one event.
_USUAL = (None, "PodInitializing", "ContainerCreating")  # On the way of every pod.


def of_job(cluster: Cluster, kind: Kind, job: str, *, patience: float | None = None) -> list[Any]:
    """Return the pods (V1Pod) of a job."""
    return _select(cluster, selector(kind, job), patience)


def of_all(cluster: Cluster, kind: Kind) -> list[Any]:
    """Return the pods (V1Pod) of all jobs of a kind in a namespace."""
    return _select(cluster, kind.pod_label, None)


def selector(kind: Kind, job: str) -> str:
    """Return the label selector of a job's pods."""
    return f"{kind.pod_label}={job}"


def _select(cluster: Cluster, labels: str, patience: float | None) -> list[Any]:
    return cluster.call(
        "list",
        "pods",
        lambda: cluster.core.list_namespaced_pod(cluster.namespace, label_selector=labels),
        patience=patience,
    ).items


def statuses(pods: Iterable[Any], rank: Rank, attempt: str = "") -> tuple[PodStatus, ...]:
    """Return the status of pods, by rank; of several of one rank the newest, and how the previous one ended.

    Args:
        pods: V1Pods of one job.
        rank: returns the rank of each.
        attempt: label that counts the pods before one in its place.
    """
    pod_statuses = [status(pod, rank(pod.metadata.labels or {}), attempt) for pod in pods]
    newest: dict[int, PodStatus] = {}
    for pod in sorted(pod_statuses, key=_age):
        last = newest.get(pod.rank)
        ended = last and (last.phase == "Failed" or last.exit_code)
        ending = Ending(last.reason, last.message, last.exit_code) if last and ended else None
        newest[pod.rank] = replace(pod, before=pod.before or ending)
    return tuple(newest.values())


def _age(pod: PodStatus) -> tuple[int, str, bool]:
    """Sort key by age; of two pods of the same second the deleted or failed one is the older."""
    return pod.rank, pod.created, pod.phase != "Failed" and not pod.leaving


def status(pod: Any, rank: int, attempt: str = "") -> PodStatus:
    """Return the status of one pod (V1Pod) of a rank; see `statuses`."""
    container = main_container(pod)
    earlier_pods = int((pod.metadata.labels or {}).get(attempt) or 0)
    end = container and container.state and container.state.terminated
    reason, message, container_name = _why(pod)
    last_end = container and container.last_state and container.last_state.terminated
    return PodStatus(
        name=pod.metadata.name,
        phase=pod.status.phase or "Unknown",
        rank=rank,
        reason=reason,
        message=message,
        exit_code=end.exit_code if end else None,
        restarts=earlier_pods + (container.restart_count if container else 0),
        attempt=earlier_pods,
        node=pod.spec.node_name or "",
        uid=pod.metadata.uid,
        created=rfc3339(pod.metadata.creation_timestamp),
        ended=rfc3339(end.finished_at) if end else "",
        image=_image(pod, container_name),
        image_id=image_id(container),
        container=main_name(pod),
        before=Ending(last_end.reason or "", last_end.message or "", last_end.exit_code)
        if last_end
        else None,
        leaving=bool(pod.metadata.deletion_timestamp) and pod.status.phase not in ("Succeeded", "Failed"),
    )


def main_name(pod: Any) -> str:
    """Return the name of the container that trains: the one in the pod's annotation, or the first."""
    name = (pod.metadata.annotations or {}).get(MAIN)
    return str(name or pod.spec.containers[0].name)


def main_container(pod: Any) -> Any:
    """Return the status of the container that trains (V1ContainerStatus), if it has one yet."""
    container_statuses, name = pod.status.container_statuses or [], main_name(pod)
    return next((item for item in container_statuses if item.name == name), None)


def image_id(container: Any) -> str:
    """Return what a container runs, given its status (V1ContainerStatus): `registry/name@sha256:...`.

    Docker put a scheme before it. Where an image was never in a registry it is a digest alone.
    """
    return str((container and container.image_id) or "").rpartition("://")[2]


def _why(pod: Any) -> tuple[str, str, str]:
    """Return reason and message of a pod that waits or failed, and the container they are about."""
    if pod.status.reason:  # Evicted, NodeLost, ...: the pod as a whole.
        return pod.status.reason, pod.status.message or "", main_name(pod)
    containers = [*(pod.status.init_container_statuses or []), *(pod.status.container_statuses or [])]
    for container in containers:
        state = container.state
        terminated = state and state.terminated
        if state and state.waiting and state.waiting.reason not in _USUAL:
            return state.waiting.reason, state.waiting.message or "", container.name
        if terminated and terminated.exit_code != 0:
            return terminated.reason or "Error", terminated.message or "", container.name
    for condition in pod.status.conditions or []:
        if condition.type == "PodScheduled" and condition.status == "False":
            return condition.reason or "Unschedulable", condition.message or "", main_name(pod)
    return "", "", main_name(pod)


def _image(pod: Any, container: str) -> str:
    """Return the image of a container as the pod asks for it."""
    containers = [*(pod.spec.init_containers or []), *(pod.spec.containers or [])]
    return next((item.image or "" for item in containers if item.name == container), "")


def explain(cluster: Cluster, kind: Kind, status: JobStatus) -> list[str]:
    """Explain why the pods of a job do not run: their waiting reasons and events.

    Args:
        cluster: where they are.
        kind: what the job is.
        status: how the job is.
    """
    lines = []
    if not status.pods:
        lines.append(f"no pod was made: see that {kind.controller} runs, and the quota of the namespace")
    elif len(status.pods) < status.nodes:
        lines.append(f"of {status.nodes} pods there are {len(status.pods)}")
    for pod in status.pods:
        if pod.phase not in ("Running", "Succeeded"):
            lines.append(f"pod {pod.name} is {pod.phase}{describe(pod)}")
            lines += [f"  the one before it ended: {pod.before}"] if pod.before else []
            lines += [f"  {line}" for line in events(cluster, "Pod", pod.name)]
    return lines + [
        line for involved in kind.event_objects(status.name) for line in events(cluster, *involved)
    ]


def describe(pod: PodStatus) -> str:
    """Return a pod's reason and message, to be appended to its name."""
    words = ": ".join(filter(None, [pod.reason, " ".join(pod.message.split())]))
    return f": {words}" if words else ""


def events(cluster: Cluster, kind: str, name: str) -> list[str]:
    """Return the newest events of an object, one line each; or one line on why they cannot be read."""
    try:
        core_events = _events(cluster, kind, name)
    except ApiError as error:
        return [f"its events are not known: {error.message}"]
    lines = dict.fromkeys(_event(event) for event in core_events)  # Each once, in their order.
    return list(lines)[-_SHOWN:]


def _events(cluster: Cluster, kind: str, name: str) -> list[Any]:
    """Return the events (CoreV1Event) of an object, the newest last."""
    selector = f"involvedObject.kind={kind},involvedObject.name={name}"
    core_events = cluster.call(
        "list",
        "events",
        lambda: cluster.core.list_namespaced_event(cluster.namespace, field_selector=selector),
        patience=min(5.0, cluster.timings.patience),
    ).items
    return sorted(
        core_events, key=lambda event: rfc3339(event.last_timestamp or event.metadata.creation_timestamp)
    )


def _event(event: Any) -> str:
    often = f" (x{event.count})" if (event.count or 1) > 1 else ""
    return f"{event.reason}{often}: {' '.join((event.message or '').split())[:_WORDS]}"


def rfc3339(moment: Any) -> str:
    """Return a time as RFC 3339, which sorts."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ") if moment else ""
