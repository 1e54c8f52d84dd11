"""Status of a job and its pods, how replaced pods ended, and the cluster's events about them."""

import itertools
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from kubeflow.training.utils.utils import FakeResponse
from kubernetes.client import ApiException
from urllib3.exceptions import HTTPError

from components.launchers.backend import Ending, JobStatus, Phase, PodStatus
from components.launchers.cluster.client import ApiError, Cluster
from components.launchers.cluster.kinds.kind import Body, Kind, Standing
from components.launchers.pod_template import LABEL_QUEUE, LABEL_SPEC, MAIN

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


def job_status(kind: Kind, job: Body, job_pods: Iterable[Any]) -> JobStatus:
    """Return a job's status.

    Args:
        kind: what it is.
        job: the job.
        job_pods: its pods (V1Pod).
    """
    meta = job["metadata"]
    created = meta.get("creationTimestamp") or ""
    # A job of this name that was deleted a moment ago leaves pods of the same labels.
    own_pods = [pod for pod in job_pods if rfc3339(pod.metadata.creation_timestamp) >= created]
    pod_statuses = statuses(own_pods, lambda labels: kind.rank(job, labels), kind.attempt_label)
    nodes, bounds = kind.nodes(job), kind.bounds(job)
    phase, reason, message = _phase(kind.standing(job), bounds[0] if bounds else nodes, pod_statuses)
    labels = meta.get("labels") or {}
    return JobStatus(
        name=meta["name"],
        phase=phase,
        reason=reason,
        message=message,
        pods=pod_statuses,
        created=created,
        nodes=nodes,
        elastic=bounds is not None,
        uid=meta.get("uid") or "",
        spec=labels.get(LABEL_SPEC, ""),
        kind=kind.title,
        queue=labels.get(LABEL_QUEUE, ""),
        workflow=next(
            (owner["name"] for owner in meta.get("ownerReferences") or () if owner["kind"] == "Workflow"), ""
        ),
        progress=kind.progress(job),
    )


class RestartCounter:
    """Counts replaced pods: controllers replace them and keep no count."""

    def __init__(self) -> None:
        self._uids: dict[str, dict[int, list[str]]] = {}
        self._before: dict[str, set[str]] = {}
        """Pods from before a suspension, which may take a while to terminate."""

    def count(self, status: JobStatus) -> JobStatus:
        """Return a status whose pods' restarts include the pods of their ranks before them."""
        if status.phase is Phase.SUSPENDED:  # By a queue, which is no fault of the pods.
            self._uids.pop(status.name, None)
            self._before.setdefault(status.name, set()).update(pod.uid for pod in status.pods)
            return status
        uids = self._uids.setdefault(status.name, {})
        had_pods = any(uids.values())
        old = self._before.get(status.name, set())
        pods = tuple(
            pod if pod.uid in old else _counted(uids.setdefault(pod.rank, []), pod) for pod in status.pods
        )
        lost = not pods or any(pod.leaving or pod.phase == "Failed" for pod in pods)
        restarted = any(pod.restarts for pod in pods) or (had_pods and lost)
        restarting = status.phase is Phase.PENDING and restarted
        return replace(status, pods=pods, phase=Phase.RESTARTING if restarting else status.phase)


def _counted(uids: list[str], pod: PodStatus) -> PodStatus:
    if pod.uid not in uids:
        uids.append(pod.uid)
    unknown = max(0, uids.index(pod.uid) - pod.attempt)  # The controller's own count is of those, too.
    return replace(pod, restarts=pod.restarts + unknown)


def _phase(standing: Standing, needed: int, pod_statuses: tuple[PodStatus, ...]) -> tuple[Phase, str, str]:
    """Return phase, reason and message: the end by the job's conditions, the rest by the pods."""
    if standing.phase is not None:
        return standing.phase, standing.reason, standing.message
    if sum(pod.counts for pod in pod_statuses) >= needed:
        return Phase.RUNNING, "", ""
    if standing.restarting:
        return Phase.RESTARTING, standing.reason, standing.message
    waiting = next((pod for pod in pod_statuses if pod.phase == "Pending" and pod.reason), None)
    return Phase.PENDING, waiting.reason if waiting else "", waiting.message if waiting else ""


_WATCH_LAG = 1.0  # Seconds that the watch may be behind.


class PodExitHistory:
    """A watch of a job's pods in a thread of its own; a context manager.

    If RBAC forbids watching, nothing is remembered.

    Args:
        cluster: where the job is.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._selector = ""
        self._rank: Rank = lambda labels: 0
        self._endings: dict[int, dict[str, Ending | None]] = {}
        """How pods ended, by rank and uid; None for a pod whose end was not observed."""
        self._news = threading.Condition()
        self._stopped = threading.Event()
        self._blind = False
        self._version = ""
        """resourceVersion of the last change that was received."""

    def __enter__(self) -> "PodExitHistory":
        return self

    def watch(self, selector: str, rank: Rank) -> None:
        """Start the watch, unless it is running.

        Args:
            selector: chooses the job's pods, by their labels.
            rank: tells the number of a pod's node.
        """
        if not self._selector:
            self._selector, self._rank = selector, rank
            threading.Thread(target=self._watch, daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self._stopped.set()

    def remembered(self, status: JobStatus) -> JobStatus:
        """Return a status whose pods say in `before` how the previous pod of their rank ended."""
        for pod in status.pods:
            self._note(pod)
        with self._news:
            # The polled status may be a moment ahead of the watch.
            self._news.wait_for(lambda: self._blind or not self._awaited(status), _WATCH_LAG)
            for rank, uid in self._awaited(status):
                self._endings[rank][uid] = Ending()
        return replace(status, pods=tuple(self._with_ending(pod) for pod in status.pods))

    def _awaited(self, status: JobStatus) -> list[tuple[int, str]]:
        """Rank and uid of each replaced pod whose end was not observed."""
        return [(pod.rank, uid) for pod in status.pods for uid, end in self._earlier(pod) if end is None]

    def _earlier(self, pod: PodStatus) -> list[tuple[str, Ending | None]]:
        """Return the earlier pods of a pod's rank, and how they ended. The watch may know later ones."""
        endings = self._endings.get(pod.rank, {})
        return list(itertools.takewhile(lambda item: item[0] != pod.uid, endings.items()))

    def _with_ending(self, pod: PodStatus) -> PodStatus:
        with self._news:
            endings = [ending for _, ending in self._earlier(pod) if ending]
        last = endings[-1] if endings and endings[-1] != Ending() else None
        return replace(pod, before=pod.before or last)

    def _note(self, pod: PodStatus) -> None:
        ended = pod.phase == "Failed" or pod.exit_code
        ending = Ending(pod.reason, pod.message, pod.exit_code) if ended else None
        with self._news:
            endings = self._endings.setdefault(pod.rank, {})
            if endings.get(pod.uid) in (None, Ending()):
                endings[pod.uid] = ending or endings.get(pod.uid)
                self._news.notify_all()

    def _watch(self) -> None:
        waits = self._cluster.timings.waits()
        while not self._stopped.is_set():
            try:
                for change in self._changes():
                    waits = self._cluster.timings.waits()
                    self._receive(change["type"], change["object"])
                    if self._stopped.is_set():
                        return
            except ApiException as error:
                if error.status in (403, 405):
                    self._blind = True
                    return
                if error.status == 401:
                    self._cluster.refresh()
                if error.status == 410:
                    self._version = ""
            except (HTTPError, OSError, ValueError, LookupError):
                pass  # A stream that broke, or was silent for long: the next one goes on where it was.
            self._stopped.wait(next(waits))

    def _receive(self, event_type: str, body: Body) -> None:
        if event_type == "ERROR":  # What has happened since is not kept any more: begin with what is there.
            self._version = ""
            return
        self._version = body["metadata"]["resourceVersion"]
        if event_type == "BOOKMARK":
            return
        v1_pod = self._pod(body)
        pod = status(v1_pod, self._rank(v1_pod.metadata.labels or {}))
        self._note(pod)
        if event_type == "DELETED":
            with self._news:  # By somebody, or with its node, before it could end.
                self._endings[pod.rank][pod.uid] = self._endings[pod.rank][pod.uid] or Ending("deleted")
                self._news.notify_all()

    def _changes(self) -> Iterator[Body]:
        """Yield the watch events since the last one, or first the existing pods, until the stream ends."""
        timings = self._cluster.timings
        query = {"labelSelector": self._selector, "watch": "true"}
        query["allowWatchBookmarks"] = "true"  # Or the number grows old while nothing happens.
        if self._version:
            query["resourceVersion"] = self._version
        response = self._cluster.api.call_api(
            "/api/v1/namespaces/{namespace}/pods",
            "GET",
            {"namespace": self._cluster.namespace},
            list(query.items()),
            auth_settings=["BearerToken"],
            _return_http_data_only=True,
            _preload_content=False,
            _request_timeout=(timings.connect, timings.quiet),
        )
        rest = b""
        try:
            for chunk in response.stream(1 << 16):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    yield json.loads(line)
        finally:
            response.close()

    def _pod(self, body: Body) -> Any:
        return self._cluster.api.deserialize(FakeResponse(body), "V1Pod")
