"""Training jobs of a cluster, of whatever kind, in one namespace."""

import itertools
import json
import random
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from kubeflow.training.utils.utils import FakeResponse
from kubernetes.client import ApiException
from urllib3.exceptions import HTTPError

from components.launchers.backend import (
    Backend,
    Ending,
    JobStatus,
    Launcher,
    LogLine,
    Look,
    Phase,
    PodStatus,
    ignore,
)
from components.launchers.cluster import client, kueue, own_pod, pod_exec, pods, watch
from components.launchers.cluster.client import ApiError, Cluster
from components.launchers.cluster.job_objects import Kinds
from components.launchers.cluster.kinds import KINDS
from components.launchers.cluster.kinds.kind import Body, Kind, Standing
from components.launchers.cluster.logs import MergedLogs, PodLog, Readings
from components.launchers.cluster.submissions import Submissions
from components.launchers.pod_template import LABEL_QUEUE, LABEL_SPEC
from components.launchers.spec import JobSpec
from components.launchers.timings import Timings


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
    own_pods = [pod for pod in job_pods if pods.rfc3339(pod.metadata.creation_timestamp) >= created]
    pod_statuses = pods.statuses(own_pods, lambda labels: kind.rank(job, labels), kind.attempt_label)
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


class Incarnations:
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


class PodEndings:
    """A watch of a job's pods in a thread of its own; a context manager.

    If RBAC forbids watching, nothing is remembered.

    Args:
        cluster: where the job is.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._selector = ""
        self._rank: pods.Rank = lambda labels: 0
        self._endings: dict[int, dict[str, Ending | None]] = {}
        """How pods ended, by rank and uid; None for a pod whose end was not observed."""
        self._news = threading.Condition()
        self._stopped = threading.Event()
        self._blind = False
        self._version = ""
        """resourceVersion of the last change that was received."""

    def __enter__(self) -> "PodEndings":
        return self

    def watch(self, selector: str, rank: pods.Rank) -> None:
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

    def _receive(self, event_type: str, body: dict[str, Any]) -> None:
        if event_type == "ERROR":  # What has happened since is not kept any more: begin with what is there.
            self._version = ""
            return
        self._version = body["metadata"]["resourceVersion"]
        if event_type == "BOOKMARK":
            return
        v1_pod = self._pod(body)
        pod = pods.status(v1_pod, self._rank(v1_pod.metadata.labels or {}))
        self._note(pod)
        if event_type == "DELETED":
            with self._news:  # By somebody, or with its node, before it could end.
                self._endings[pod.rank][pod.uid] = self._endings[pod.rank][pod.uid] or Ending("deleted")
                self._news.notify_all()

    def _changes(self) -> Iterator[dict[str, Any]]:
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

    def _pod(self, body: dict[str, Any]) -> Any:
        return self._cluster.api.deserialize(FakeResponse(body), "V1Pod")


TAIL = 100
"""Last lines that are shown of a failed pod other than rank 0's."""


class ClusterBackend(Backend):
    """Runs jobs in one namespace of a cluster.

    Args:
        cluster: the cluster and namespace.
        kinds: what the jobs may be; of several a new job is the first that the cluster can run.
    """

    def __init__(self, cluster: client.Cluster, kinds: Iterable[Kind] = tuple(KINDS.values())) -> None:
        self.cluster, self.timings = cluster, cluster.timings
        self.kinds = Kinds(cluster, tuple(kinds))
        """The candidate kinds of jobs, and the kind of each job."""
        self._queues = kueue.Queues(cluster)
        self._submissions = Submissions(cluster, self.kinds)
        self._incarnations = Incarnations()
        self._readings = Readings(cluster)

    @classmethod
    def connect(
        cls,
        namespace: str = "",
        *,
        kinds: Iterable[Kind] = tuple(KINDS.values()),
        timings: Timings | None = None,
    ) -> "ClusterBackend":
        """Return a backend for the cluster of the kubeconfig or the own pod; sends no request.

        Args:
            namespace: the namespace; empty is the kubeconfig's or the own pod's.
            kinds: see the class.
            timings: how long things may take.

        Raises:
            ConfigError: there is none.
        """
        return cls(client.connect(namespace, timings=timings), kinds)

    @property
    def place(self) -> str:
        """Where the jobs are, for messages."""
        return f"namespace {self.cluster.namespace}"

    @property
    def options(self) -> str:
        """Options of `kubedet job` that choose this place, for messages."""
        return f" -n {self.cluster.namespace}"

    def within(self, namespace: str) -> "ClusterBackend":
        """Return the backend of a namespace; empty is this one's."""
        if namespace in ("", self.cluster.namespace):
            return self
        return ClusterBackend(self.cluster.within(namespace), self.kinds.possible)

    def submit(self, job: JobSpec) -> str:
        """Start a job, or adopt the same one if it exists already; see `Submissions.submit`."""
        return self._submissions.submit(job)

    def submitted(self, name: str) -> tuple[str, str]:
        """Return the specification's hash and the uid of a job that was submitted here; empty if unknown."""
        return self._submissions.submitted(name)

    def stop(self, name: str, *, wait: bool = True) -> None:
        """Delete a job of kubedet's and its pods; see `Submissions.stop`."""
        self._submissions.stop(name, wait=wait)

    def withdraw(self, name: str, *, wait: bool = True) -> None:
        """Delete a job that was submitted here; see `Submissions.withdraw`."""
        self._submissions.withdraw(name, wait=wait)

    def abandon(self, name: str) -> None:
        """Delete a job that this process submitted, by one request; see `Submissions.abandon`."""
        self._submissions.abandon(name)

    def ends_with_the_run(self) -> bool:
        """Whether a job ends too where this process is asked to end; see `own_pod.ends_with_the_run`."""
        return self._submissions.end_with_the_run()

    def status(self, name: str) -> JobStatus:
        """Return a job's status.

        Raises:
            ApiError: the cluster does not say.
        """
        return self._status(name, *self.kinds.find(name), None)

    def logs(self, name: str, *, follow: bool = True) -> Iterator[LogLine]:
        """Yield the lines of rank 0 (of an elastic job: of every pod), and the last ones of pods that fail.

        Args:
            name: the job's name.
            follow: go on until the job has ended; else only what is there now.

        Raises:
            ApiError: the cluster does not say.
        """
        events = self.follow(name, once=not follow)
        return (event for event in events if isinstance(event, LogLine))

    def follow(self, name: str, *, once: bool = False) -> Iterator[LogLine | JobStatus]:
        """Yield a job's lines as they come and, every few seconds, its status, until it has ended.

        An API server that does not answer for a while is waited for.

        Args:
            name: the job's name.
            once: look once, and read what the logs hold now.

        Raises:
            ApiError: the cluster does not say, for longer than Timings.outage.
        """
        timings = self.timings
        waits, answered = timings.waits(), time.monotonic()
        with MergedLogs(self.cluster, follow=not once) as logs, PodEndings(self.cluster) as endings:
            while True:
                try:
                    kind, job = self.kinds.find(name, patience=0.0)
                    if job is not None:
                        endings.watch(pods.selector(kind, name), partial(kind.rank, job))
                    status = endings.remembered(self._status(name, kind, job, 0.0))
                except ApiError as error:
                    if not error.passing or time.monotonic() - answered > timings.outage:
                        raise
                    self.cluster.trouble.tell(error.message)
                    wait = next(waits)
                else:
                    yield status
                    _choose(logs, status)
                    if status.phase.final or once:
                        ended = {pod.uid for pod in status.pods if pod.phase in ("Succeeded", "Failed")}
                        yield from logs.rest(timings.drain, ended=None if once or not ended else ended)
                        return
                    waits, answered = timings.waits(), time.monotonic()
                    wait = timings.poll * random.uniform(0.75, 1.25)
                yield from logs.lines(wait)

    def pod_lines(self, name: str, pod: PodStatus, *, follow: bool, tail: int = 0) -> Iterator[str]:
        """Yield the lines of one pod of a job; of those that are there, only the last `tail` unless it is 0.

        Raises:
            ApiError: the log cannot be read.
        """
        return PodLog(self.cluster, pod.name, pod.uid, threading.Event(), tail=tail).lines(follow=follow)

    def execute(self, name: str, pod: PodStatus, arguments: list[str]) -> int:
        """Run a command in a pod with this process's output, and its terminal; returns the exit code."""
        return pod_exec.interactive(self.cluster.core, self.cluster.namespace, pod, arguments)

    def list_jobs(self) -> list[JobStatus]:
        """Return the status of kubedet's jobs in the namespace, the newest first.

        Raises:
            ApiError: the cluster does not say.
        """
        statuses = []
        for kind, jobs in self.kinds.jobs():
            by_job: dict[str, list[Any]] = {}
            for pod in pods.of_all(self.cluster, kind) if jobs else ():
                by_job.setdefault(pod.metadata.labels[kind.pod_label], []).append(pod)
            statuses += [job_status(kind, job, by_job.get(_name(job), [])) for job in jobs]
        statuses = self._with_orphans(statuses)
        return sorted(self._queues.with_positions(statuses), key=lambda status: status.created, reverse=True)

    def _with_orphans(self, statuses: list[JobStatus]) -> list[JobStatus]:
        """Mark the jobs that continue although their run has ended."""
        ended: dict[str, bool] = {}
        for name in {status.workflow for status in statuses if status.workflow and not status.phase.final}:
            with suppress(ApiError):
                ended[name] = own_pod.run_has_ended(self.cluster, name)
        return [
            replace(status, orphaned=True, reason="RunEnded")
            if ended.get(status.workflow) and not status.phase.final
            else status
            for status in statuses
        ]

    def with_progress(self, status: JobStatus) -> JobStatus:
        """Return a job's status with its progress, if the job or its log reports it."""
        return self._readings.completed(status)

    def explain(self, status: JobStatus) -> list[str]:
        """Explain why the pods of a job do not run: their waiting reasons and events."""
        if status.phase is Phase.SUSPENDED:
            return kueue.explain(self.cluster, status)
        return pods.explain(self.cluster, self.kinds.kind_of(status.name), status)

    def _status(self, name: str, kind: Kind, job: Body | None, patience: float | None) -> JobStatus:
        """Return a job's status from its pods."""
        if job is None:
            return JobStatus(name, Phase.GONE, kind=kind.title)
        job_pods = pods.of_job(self.cluster, kind, name, patience=patience)
        status = self._incarnations.count(job_status(kind, job, job_pods))
        return self._queues.with_positions([status], patience=patience)[0]


def _choose(logs: MergedLogs, status: JobStatus) -> None:
    """Read the logs of rank 0 (of an elastic job any pod may be that) and of pods that failed."""
    for pod in status.pods:
        if pod.rank == 0 or status.elastic:
            logs.follow(pod.name, pod.uid)
        elif pod.phase == "Failed" or pod.exit_code:
            logs.follow(pod.name, pod.uid, tail=TAIL)


def _name(job: Body) -> str:
    return str(job["metadata"]["name"])


class ClusterLauncher(Launcher):
    """Runs a job in the cluster.

    Args:
        kinds: names of what the job may become; empty is whatever the cluster has.
    """

    def __init__(self, *kinds: str) -> None:
        self._kinds = [KINDS[name] for name in kinds or KINDS]

    def run(self, job: JobSpec, look: Look = ignore) -> None:
        """Run a job to its end, its output on stdout; see `watch.run`."""
        watch.run(ClusterBackend.connect(kinds=self._kinds), job, look=look)

    def remove(self, name: str, *, finished: bool = False) -> JobStatus:
        """Delete a job that is not finished, or any if `finished`; returns its last status."""
        backend = ClusterBackend.connect(kinds=self._kinds)
        status = backend.status(name)
        if finished or not status.phase.final:
            backend.stop(name)
        return status
