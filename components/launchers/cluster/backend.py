"""Training jobs of a cluster, of whatever kind, in one namespace."""

import random
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from components.launchers.backend import Backend, JobStatus, LogLine, Phase, PodStatus
from components.launchers.cluster import client, job_kinds, job_state, kueue_setup, own_pod, pod_exec, pods
from components.launchers.cluster.api_errors import ApiError
from components.launchers.cluster.kinds import KINDS
from components.launchers.cluster.kinds.kind import Body, Kind
from components.launchers.cluster.kueue import Queues
from components.launchers.cluster.log_progress import Readings
from components.launchers.cluster.merged_logs import MergedLogs
from components.launchers.cluster.pod_endings import PodEndings
from components.launchers.cluster.pod_log import PodLog
from components.launchers.cluster.submissions import Submissions
from components.launchers.spec import JobSpec
from components.launchers.timings import Timings

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
        self.kinds = job_kinds.Kinds(cluster, tuple(kinds))
        """The candidate kinds of jobs, and the kind of each job."""
        self._queues = Queues(cluster)
        self._submissions = Submissions(cluster, self.kinds)
        self._incarnations = job_state.Incarnations()
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
            statuses += [job_state.status(kind, job, by_job.get(_name(job), [])) for job in jobs]
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
            return kueue_setup.explain(self.cluster, status)
        return pods.explain(self.cluster, self.kinds.kind_of(status.name), status)

    def last_exit(self, name: str, pod: str) -> str:
        """Return how the previous pod of the same rank ended; nothing if that is not known."""
        return pods.last_exit(self.cluster, self.kinds.kind_of(name), name, pod)

    def _status(self, name: str, kind: Kind, job: Body | None, patience: float | None) -> JobStatus:
        """Return a job's status from its pods."""
        if job is None:
            return JobStatus(name, Phase.GONE, kind=kind.title)
        job_pods = pods.of_job(self.cluster, kind, name, patience=patience)
        status = self._incarnations.count(job_state.status(kind, job, job_pods))
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
