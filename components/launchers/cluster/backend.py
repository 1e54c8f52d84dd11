"""Training jobs of a cluster, of whatever kind, in one namespace."""

import random
import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from components.launchers.backend import Backend, JobStatus, LogLine, Phase
from components.launchers.cluster import client, conditions, found, kueue_setup, pods
from components.launchers.cluster.ends import Ends
from components.launchers.cluster.feed import Feed
from components.launchers.cluster.kinds import KINDS
from components.launchers.cluster.kinds.kind import Body, Kind
from components.launchers.cluster.kueue import Queues
from components.launchers.cluster.progress import Readings
from components.launchers.cluster.refusals import ApiError
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
        self.kinds = found.Kinds(cluster, tuple(kinds))
        """What the jobs may be, and which of them are which."""
        self._queues = Queues(cluster)
        self._submissions = Submissions(cluster, self.kinds)
        self._incarnations = conditions.Incarnations()
        self._readings = Readings(cluster)

    @classmethod
    def connect(
        cls,
        namespace: str = "",
        *,
        kinds: Iterable[Kind] = tuple(KINDS.values()),
        timings: Timings | None = None,
    ) -> "ClusterBackend":
        """Return a backend for the cluster that this process means; nothing is sent.

        Args:
            namespace: the namespace; empty is the kubeconfig's or the own pod's.
            kinds: see the class.
            timings: how long things may take.

        Raises:
            ConfigError: there is none.
        """
        return cls(client.connect(namespace, timings=timings), kinds)

    def within(self, namespace: str) -> "ClusterBackend":
        """Return the backend of a namespace; empty is this one's."""
        if namespace in ("", self.cluster.namespace):
            return self
        return ClusterBackend(self.cluster.within(namespace), self.kinds.possible)

    def submit(self, job: JobSpec) -> str:
        """Start a job, or take up the same one where it is already; see `Submissions.submit`."""
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
        """Whether a job ends too where this process is asked to end; see `owner.ends_with_the_run`."""
        return self._submissions.end_with_the_run()

    def status(self, name: str) -> JobStatus:
        """Tell how a job is.

        Raises:
            ApiError: the cluster does not say.
        """
        return self._told(name, *self.kinds.find(name), None)

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

        An API server that is away for a while is waited for.

        Args:
            name: the job's name.
            once: look once, and read what the logs hold now.

        Raises:
            ApiError: the cluster does not say, for longer than Timings.outage.
        """
        timings = self.timings
        waits, answered = timings.waits(), time.monotonic()
        with Feed(self.cluster, follow=not once) as feed, Ends(self.cluster) as ends:
            while True:
                try:
                    kind, job = self.kinds.find(name, patience=0.0)
                    if job is not None:
                        ends.watch(pods.selector(kind, name), partial(kind.rank, job))
                    status = ends.remembered(self._told(name, kind, job, 0.0))
                except ApiError as error:
                    if not error.passing or time.monotonic() - answered > timings.outage:
                        raise
                    self.cluster.trouble.tell(error.message)
                    wait = next(waits)
                else:
                    yield status
                    _choose(feed, status)
                    if status.phase.final or once:
                        ended = {pod.uid for pod in status.pods if pod.phase in ("Succeeded", "Failed")}
                        yield from feed.rest(timings.drain, of=None if once or not ended else ended)
                        return
                    waits, answered = timings.waits(), time.monotonic()
                    wait = timings.poll * random.uniform(0.75, 1.25)
                yield from feed.lines(wait)

    def list_jobs(self) -> list[JobStatus]:
        """Return how kubedet's jobs of the namespace are, the newest first.

        Raises:
            ApiError: the cluster does not say.
        """
        told = []
        for kind, ours in self.kinds.known():
            by_job: dict[str, list[Any]] = {}
            for pod in pods.of_all(self.cluster, kind) if ours else ():
                by_job.setdefault(pod.metadata.labels[kind.pod_label], []).append(pod)
            told += [conditions.status(kind, job, by_job.get(_name(job), [])) for job in ours]
        return sorted(self._queues.told(told), key=lambda status: status.created, reverse=True)

    def with_progress(self, status: JobStatus) -> JobStatus:
        """Return how a job is with how far it is, where its own status or its log tells."""
        return self._readings.completed(status)

    def explain(self, status: JobStatus) -> list[str]:
        """Say why the pods of a job do not run: what holds them back, and the cluster's events."""
        if status.phase is Phase.SUSPENDED:
            return kueue_setup.explain(self.cluster, status)
        return pods.explain(self.cluster, self.kinds.kind_of(status.name), status)

    def last_exit(self, name: str, pod: str) -> str:
        """Return how the pod before one of the same place ended; nothing if that is not known."""
        return pods.last_exit(self.cluster, self.kinds.kind_of(name), name, pod)

    def _told(self, name: str, kind: Kind, job: Body | None, patience: float | None) -> JobStatus:
        """Look at the pods of a job, and tell how it is."""
        if job is None:
            return JobStatus(name, Phase.GONE, kind=kind.title)
        there = pods.of_job(self.cluster, kind, name, patience=patience)
        status = self._incarnations.count(conditions.status(kind, job, there))
        return self._queues.told([status], patience=patience)[0]


def _choose(feed: Feed, status: JobStatus) -> None:
    """Read the logs of rank 0 (of an elastic job any pod may be that) and of pods that failed."""
    for pod in status.pods:
        if pod.rank == 0 or status.elastic:
            feed.follow(pod.name, pod.uid)
        elif pod.phase == "Failed" or pod.exit_code:
            feed.follow(pod.name, pod.uid, tail=TAIL)


def _name(job: Body) -> str:
    return str(job["metadata"]["name"])
