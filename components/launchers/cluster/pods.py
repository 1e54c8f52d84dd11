"""The status of a job and its pods, the ends of replaced pods, and events about them."""

import itertools
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import Any

from kubernetes.client import ApiException
from kubernetes.watch import Watch
from urllib3.exceptions import HTTPError

from components.launchers.backend import Ending, JobStatus, Phase, PodStatus
from components.launchers.cluster.client import ApiError, Cluster
from components.launchers.cluster.kinds import Kind
from components.launchers.kubernetes_names import LABEL_QUEUE, LABEL_SPEC
from components.launchers.pod_template import MAIN_CONTAINER_KEY, Body

_MAX_EVENTS = 5  # Maximum number of events to show for an object.
_EVENT_LENGTH = 400  # Maximum length of an event.
SLOW_SECONDS = 15.0  # Time after which the events of a starting pod, or of a job without its pods, are read.
_NORMAL_REASONS = (None, "PodInitializing", "ContainerCreating")  # Normal states of a starting pod.
_WATCH_LAG = 1.0  # Maximum delay of the watch in seconds.
_WATCH_SECONDS = 300  # The server ends a watch after this time, and the next one continues it.


def list_pods_of_job(cluster: Cluster, kind: Kind, job: str, *, patience: float | None = None) -> list[Any]:
    """Return the pods (V1Pod) of a job; of all jobs of the kind if its name is empty."""
    labels = f"{kind.pod_label}={job}" if job else kind.pod_label
    return list_pods(cluster, labels, patience=patience)


def list_pods(cluster: Cluster, labels: str, *, patience: float | None = None) -> list[Any]:
    """Return the pods (V1Pod) that match a label selector."""
    call, listing = cluster.call, cluster.core.list_namespaced_pod
    return list(
        call("list", "pods", listing, cluster.namespace, label_selector=labels, patience=patience).items
    )


def _ending(pod: PodStatus) -> Ending | None:
    ended = pod.phase == "Failed" or pod.exit_code
    return Ending(pod.reason, pod.message, pod.exit_code) if ended else None


def _to_status(pod: Any, kind: Kind, job: Body) -> PodStatus:
    labels = pod.metadata.labels or {}
    earlier_pods = int(labels.get(kind.attempt_label) or 0)
    main, container = find_main_container(pod)
    end = container and container.state and container.state.terminated
    last_end = container and container.last_state and container.last_state.terminated
    reason, message, culprit = find_reason(pod, main)
    containers = [*(pod.spec.init_containers or []), *(pod.spec.containers or [])]
    return PodStatus(
        pod.metadata.name,
        phase=pod.status.phase or "Unknown",
        rank=kind.rank(job, labels),
        reason=reason,
        message=message,
        exit_code=end.exit_code if end else None,
        restarts=earlier_pods + (container.restart_count if container else 0),
        attempt=earlier_pods,
        node=pod.spec.node_name or "",
        uid=pod.metadata.uid,
        created=_rfc3339(pod.metadata.creation_timestamp),
        ended=_rfc3339(end.finished_at) if end else "",
        image=next((item.image or "" for item in containers if item.name == culprit), ""),
        container=main,
        before=last_end and Ending(last_end.reason or "", last_end.message or "", last_end.exit_code),
        leaving=bool(pod.metadata.deletion_timestamp) and pod.status.phase not in ("Succeeded", "Failed"),
    )


def find_main_container(pod: Any) -> tuple[str, Any]:
    """Return name and status (None if there is none yet) of the annotated container, or of the first."""
    name = str((pod.metadata.annotations or {}).get(MAIN_CONTAINER_KEY) or pod.spec.containers[0].name)
    statuses = pod.status.container_statuses or []
    return name, next((item for item in statuses if item.name == name), None)


def find_reason(pod: Any, main: str = "") -> tuple[str, str, str]:
    """Return the reason why a pod waits or failed, the message, and the container concerned."""
    if pod.status.reason:  # Evicted, NodeLost, ...: the pod as a whole.
        return pod.status.reason, pod.status.message or "", main
    for container in [*(pod.status.init_container_statuses or []), *(pod.status.container_statuses or [])]:
        state = container.state
        terminated = state and state.terminated
        if state and state.waiting and state.waiting.reason not in _NORMAL_REASONS:
            return state.waiting.reason, state.waiting.message or "", container.name
        if terminated and terminated.exit_code != 0:
            return terminated.reason or "Error", terminated.message or "", container.name
    for condition in pod.status.conditions or []:
        if condition.type == "PodScheduled" and condition.status == "False":
            return condition.reason or "Unschedulable", condition.message or "", main
    return "", "", main


def describe_reason(pod: PodStatus) -> str:
    """Return a pod's reason and message, to be appended to its name."""
    text = ": ".join(filter(None, [pod.reason, " ".join(pod.message.split())]))
    return f": {text}" if text else ""


def describe_events(cluster: Cluster, kind: str, name: str) -> list[str]:
    """Return the newest events of an object, or the reason why they cannot be read, as lines."""
    try:
        found = _list_events(cluster, kind, name)
    except ApiError as error:
        return [f"its events are not known: {error.message}"]
    lines = []
    for event in found:
        times = f" (x{event.count})" if (event.count or 1) > 1 else ""
        lines.append(f"{event.reason}{times}: {_shorten_message(event)}")
    return list(dict.fromkeys(lines))[-_MAX_EVENTS:]


def newest_failure(cluster: Cluster, objects: Iterable[tuple[str, str]], about: str = "") -> tuple[str, str]:
    """Return reason and message of the newest event of these objects (kind, name) whose reason contains
    `about`; empty if that event reports no failure, or if events cannot be read.
    """
    for kind, name in objects:
        with suppress(ApiError):
            found = [event for event in _list_events(cluster, kind, name) if about in (event.reason or "")]
            if found and "Fail" in found[-1].reason:
                return found[-1].reason, _shorten_message(found[-1])
    return "", ""


def _list_events(cluster: Cluster, kind: str, name: str) -> list[Any]:
    """Return the events (CoreV1Event) of an object, the newest last."""
    selector = f"involvedObject.kind={kind},involvedObject.name={name}"
    options: Any = {"field_selector": selector, "patience": min(5.0, cluster.timings.patience)}
    listing = cluster.core.list_namespaced_event
    found = cluster.call("list", "events", listing, cluster.namespace, **options).items

    def last_seen(event: Any) -> str:
        seen = event.series and event.series.last_observed_time
        return _rfc3339(seen or event.last_timestamp or event.metadata.creation_timestamp)

    return sorted(found, key=last_seen)


def _shorten_message(event: Any) -> str:
    return " ".join((event.message or "").split())[:_EVENT_LENGTH]


def has_waited(created: Any, now: datetime) -> bool:
    """Whether an object created at this time (datetime or RFC 3339) should have started."""
    moment = datetime.fromisoformat(created) if isinstance(created, str) else created
    return (now - moment).total_seconds() > SLOW_SECONDS


def _rfc3339(moment: Any) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ") if moment else ""


def job_status(kind: Kind, job: Body, job_pods: Iterable[Any]) -> JobStatus:
    """Return the status of a job from its body and its pods (V1Pod)."""
    meta = job["metadata"]
    created = meta.get("creationTimestamp") or ""

    def sort_key(pod: PodStatus) -> tuple[int, str, bool]:
        # Of two pods created in the same second, the deleted or failed one is the older.
        return pod.rank, pod.created, pod.phase != "Failed" and not pod.leaving

    # A recently deleted job of the same name leaves pods with the same labels.
    statuses = [
        status for status in (_to_status(pod, kind, job) for pod in job_pods) if status.created >= created
    ]
    newest: dict[int, PodStatus] = {}
    for pod in sorted(statuses, key=sort_key):
        last = newest.get(pod.rank)
        newest[pod.rank] = replace(pod, before=pod.before or (_ending(last) if last else None))
    state = kind.state(job)
    # The job's conditions decide the final phases, its pods the others.
    phase, reason, message = state.phase, state.reason, state.message
    if phase is None:
        if sum(pod.is_healthy for pod in newest.values()) >= state.needed:
            phase, reason, message = Phase.RUNNING, "", ""
        elif state.restarting:
            phase = Phase.RESTARTING
        else:
            waiting = [pod for pod in newest.values() if pod.phase == "Pending" and pod.reason]
            phase = Phase.PENDING
            reason, message = (waiting[0].reason, waiting[0].message) if waiting else ("", "")
    labels, owners = meta.get("labels") or {}, meta.get("ownerReferences") or ()
    return JobStatus(
        meta["name"],
        phase=phase,
        reason=reason,
        message=message,
        pods=tuple(newest.values()),
        created=created,
        nodes=state.nodes,
        elastic=state.elastic,
        uid=meta.get("uid") or "",
        spec=labels.get(LABEL_SPEC, ""),
        kind=kind.title,
        queue=labels.get(LABEL_QUEUE, ""),
        workflow=next((owner["name"] for owner in owners if owner["kind"] == "Workflow"), ""),
    )


class PodHistory:
    """Records how many pods of a job were replaced, and how each ended; controllers do not record it.

    Each reading of a job's status adds its pods. A thread watches for the ends of pods that are deleted
    immediately; if RBAC forbids the watch, only the ends of pods that were read are known.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._endings: dict[int, dict[str, Ending | None]] = {}
        """How pods ended, by rank and uid; None for a pod whose end was not observed."""
        self._suspended: set[str] = set()
        """Pods from before a suspension, which may take a while to terminate."""
        self._observed: set[str] = set()  # Observed pods since the last suspension.
        self._news = cluster.clock.condition()
        self._stopped = False
        self._watching = False

    def watch(self, kind: Kind, job: Body) -> None:
        """Start the watch, unless it was started."""
        if not self._watching:
            self._watching = True
            self._cluster.clock.start(self._watch, kind, job)

    def stop(self) -> None:
        """End the watch."""
        self._stopped = True

    def with_restarts(self, status: JobStatus) -> JobStatus:
        """Return a status whose pods count replaced pods as restarts, with the end of the last one."""
        with self._news:
            for pod in status.pods:
                self._record(pod)
            if status.phase is Phase.SUSPENDED:  # Pods that a queue deletes have not failed.
                self._suspended.update(uid for endings in self._endings.values() for uid in endings)
                self._observed.clear()
                return status
            # The status may be slightly newer than the watch.
            self._news.wait_for(lambda: not self._watching or not self._missing_endings(status), _WATCH_LAG)
            for rank, uid in self._missing_endings(status):
                self._endings[rank][uid] = Ending()
            had_pods = bool(self._observed)
            self._observed.update({pod.uid for pod in status.pods} - self._suspended)
            pods = []
            for pod in status.pods:
                earlier = self._predecessors(pod)
                # `attempt`, the controller's own count, includes some of these.
                uncounted = max(0, len(self._observed & earlier.keys()) - pod.attempt)
                last = next((end for end in reversed(earlier.values()) if end), None)
                before = pod.before or (last if last != Ending() else None)
                pods.append(replace(pod, restarts=pod.restarts + uncounted, before=before))
        lost = not pods or any(pod.leaving or pod.phase == "Failed" for pod in pods)
        restarted = any(pod.restarts for pod in pods) or (had_pods and lost)
        restarting = status.phase is Phase.PENDING and restarted
        return replace(status, pods=tuple(pods), phase=Phase.RESTARTING if restarting else status.phase)

    def _missing_endings(self, status: JobStatus) -> list[tuple[int, str]]:
        """Return rank and uid of each replaced pod whose end was not observed."""
        return [
            (pod.rank, uid)
            for pod in status.pods
            for uid, end in self._predecessors(pod).items()
            if end is None
        ]

    def _predecessors(self, pod: PodStatus) -> dict[str, Ending | None]:
        """Return the earlier pods of a pod's rank by uid, and how they ended. The watch may be ahead."""
        if pod.uid in self._suspended:
            return {}
        before = itertools.takewhile(lambda item: item[0] != pod.uid, self._endings[pod.rank].items())
        return {uid: end for uid, end in before if uid not in self._suspended}

    def _record(self, pod: PodStatus, *, deleted: bool = False) -> None:
        with self._news:
            endings = self._endings.setdefault(pod.rank, {})
            if endings.get(pod.uid) in (None, Ending()):
                endings[pod.uid] = _ending(pod) or endings.get(pod.uid)
            if deleted:  # Deleted by a user or with its node while it ran.
                endings[pod.uid] = endings[pod.uid] or Ending("deleted")
            self._news.notify_all()

    def _watch(self, kind: Kind, job: Body) -> None:
        cluster, timings = self._cluster, self._cluster.timings
        options = {
            "label_selector": f"{kind.pod_label}={job['metadata']['name']}",
            "timeout_seconds": _WATCH_SECONDS,
            "_request_timeout": (timings.connect, timings.quiet),
        }
        watch, waits = Watch(), timings.retry_delays()
        while not self._stopped:
            begin = {"resource_version": watch.resource_version} if watch.resource_version else {}
            try:
                for change in watch.stream(
                    cluster.core.list_namespaced_pod, cluster.namespace, **options, **begin
                ):
                    waits = timings.retry_delays()
                    self._record(_to_status(change["object"], kind, job), deleted=change["type"] == "DELETED")
                    if self._stopped:
                        return
            except ApiException as error:
                if error.status in (403, 405):
                    self._watching = False
                    return
                if error.status == 401:
                    cluster.refresh()
                if error.status == 410:  # 410 Gone, the version has expired: list the pods again.
                    watch = Watch()
            except (HTTPError, OSError, ValueError, LookupError):
                pass  # The stream broke or timed out; the next one continues.
            cluster.clock.sleep(next(waits))
