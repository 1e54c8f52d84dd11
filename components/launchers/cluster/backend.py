"""Training jobs of a cluster, of whatever kind, in one namespace."""

import logging
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from components.launchers.backend import Backend, JobStatus, LogLine, Phase
from components.launchers.cluster import client, conditions, found, kueue_setup, objects, pods
from components.launchers.cluster.ends import Ends
from components.launchers.cluster.feed import Feed
from components.launchers.cluster.kinds import KINDS
from components.launchers.cluster.kinds.kind import Body, Kind
from components.launchers.cluster.kueue import Queues
from components.launchers.cluster.owner import Own, ends_with_the_run, own
from components.launchers.cluster.progress import Readings
from components.launchers.cluster.refusals import ApiError
from components.launchers.render.labels import LABEL_MANAGED, LABEL_SPEC, MANAGED_BY
from components.launchers.spec import JobSpec
from components.launchers.timings import Timings
from trainer.errors import ConfigError, LaunchError

logger = logging.getLogger(__name__)

TAIL = 100
"""Last lines that are shown of a failed pod other than rank 0's."""

_TRIES = 5  # To get hold of a name that others delete and take.


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
        self._own: Own | None = None
        self._incarnations = conditions.Incarnations()
        self._readings = Readings(cluster)
        self._hashes: dict[str, str] = {}
        self._uids: dict[str, str] = {}

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

    def submitted(self, name: str) -> tuple[str, str]:
        """Return the specification's hash and the uid of a job that was submitted here; empty if unknown."""
        return self._hashes.get(name, ""), self._uids.get(name, "")

    def submit(self, job: JobSpec) -> str:
        """Start a job, or take up the same one where it is already; returns its name.

        Under its name there may be: the same job, which is taken up unless it failed; one that
        failed or is another, which is deleted first; or somebody else's, which is not touched.

        Args:
            job: the job; namespace and image may be left to the own pod.

        Raises:
            ConfigError: it names no image, or another namespace than this backend's.
            LaunchError: it was refused, or the name is taken.
        """
        self._own = own(self.cluster)
        job = self._completed(job, self._own)
        self._hashes[job.name] = job.fingerprint
        manifests: list[Body] = []
        for _ in range(_TRIES):
            kind, there = self.kinds.find(job.name)
            if there is not None and self._adopts(kind, there, job):
                self._uids[job.name] = there["metadata"]["uid"]
                if manifests:  # It is our own: the answer to its creation was lost.
                    objects.give(self.cluster, kind, manifests, self._uids[job.name])
                return job.name
            old = kind
            kind, manifests = self._manifests(job)
            self._clear(kind if there is None else old, job.name, there)
            try:
                self._uids[job.name] = objects.create_all(self.cluster, kind, manifests)
            except ApiError as error:
                if error.passing:
                    return self._found_after(error, kind, job, manifests)
                if error.status != 409:
                    raise
                time.sleep(next(self.timings.waits()))
            else:
                self.kinds.remember(job.name, kind)
                logger.info("created %s %s in namespace %s", kind.title, job.name, self.cluster.namespace)
                return job.name
        raise LaunchError(
            f"cannot create the job {job.name}: others create jobs of that name again and again",
            fix="end the other launcher, or give the job another name",
        )

    def _found_after(self, error: ApiError, kind: Kind, job: JobSpec, manifests: list[Body]) -> str:
        """Look whether a creation that got no answer was done; returns the job's name if so.

        Raises:
            ApiError: it was not, or nobody knows.
        """
        try:
            there = objects.get(self.cluster, kind, job.name)
        except ApiError:
            error.message += f"; whether the {kind.title} {job.name} was created is not known"
            error.fix = f"look with `kubedet job status {job.name}`; `kubedet job stop {job.name}` ends it"
            raise error from None
        if there is None or _label(there, LABEL_SPEC) != job.fingerprint:
            raise error
        self._uids[job.name] = there["metadata"]["uid"]
        objects.give(self.cluster, kind, manifests, self._uids[job.name])
        self.kinds.remember(job.name, kind)
        logger.warning(
            "%s %s exists: only the answer to its creation was lost; `kubedet job stop %s` ends it",
            kind.title, job.name, job.name,
        )  # fmt: skip
        return job.name

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

    def stop(self, name: str, *, wait: bool = True) -> None:
        """Delete a job of kubedet's and its pods; one that is gone already is no error.

        Args:
            name: its name.
            wait: until all is gone.

        Raises:
            LaunchError: somebody else made it, or it is not gone after Timings.removal.
        """
        kind, there = self.kinds.find(name)
        if there is not None:
            self._check_ours(kind, there)
        self._clear(kind, name, there, wait=wait)

    def withdraw(self, name: str, *, wait: bool = True) -> None:
        """Delete a job that was submitted here; one that another launcher made since is left alone.

        Args:
            name: its name.
            wait: until all is gone.

        Raises:
            LaunchError: as of `stop`.
        """
        kind, there = self.kinds.find(name)
        mine, uid = self.submitted(name)
        if there is None or _label(there, LABEL_SPEC) != mine or uid not in ("", there["metadata"]["uid"]):
            return
        self._clear(kind, name, there, wait=wait)

    def abandon(self, name: str) -> None:
        """Delete a job that this process submitted: one request, within Timings.stop.

        Raises:
            ApiError: it could not be deleted.
        """
        kind, _ = self.kinds.find(name) if name not in self._uids else (self.kinds.kind_of(name), None)
        objects.delete(
            self.cluster, kind, name, uid=self._uids.get(name, ""), patience=self.timings.stop
        )  # fmt: skip

    def ends_with_the_run(self) -> bool:
        """Whether a job ends too where this process is asked to end; see `owner.ends_with_the_run`."""
        return ends_with_the_run(self.cluster, self._own)

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

    def _completed(self, job: JobSpec, mine: Own) -> JobSpec:
        """Fill in what the own pod gives."""
        here = self.cluster.namespace
        if job.namespace not in ("", here):
            raise ConfigError(
                f"the job's namespace is {job.namespace}, and this launcher works in {here}",
                fix="name the same one twice, or only once",
            )
        queue = job.kueue_queue or mine.queue
        job = replace(job, namespace=here, image=job.image or mine.image, kueue_queue=queue)
        if not job.image:
            raise ConfigError("the job names no container image", fix="set image")
        return job

    def _manifests(self, job: JobSpec) -> tuple[Kind, list[Body]]:
        """Return what is to be created, and the job's kind."""
        kind = self.kinds.of_new()
        manifests = kind.manifests(job, partial(objects.is_there, self.cluster, kind))
        if problems := kind.problems(manifests):
            told = "\n".join(f"  {problem}" for problem in problems)
            raise ConfigError(f"the cluster would not take the job as it is meant:\n{told}")
        if lost := kind.left_out(job):
            logger.warning("a %s knows nothing of: %s", kind.title, ", ".join(lost))
        mine = self._own or Own()
        if mine.workflow and mine.namespace == self.cluster.namespace:
            for manifest in manifests:
                manifest["metadata"]["ownerReferences"] = [mine.workflow]
        return kind, manifests

    def _adopts(self, kind: Kind, there: Body, job: JobSpec) -> bool:
        """Decide on a job that has the name already: True is to take it up, False to replace it."""
        self._check_ours(kind, there)
        title, name = kind.title, job.name
        if there["metadata"].get("deletionTimestamp"):
            logger.info("%s %s is being deleted: waiting until it is gone", title, name)
        elif _label(there, LABEL_SPEC) != job.fingerprint:
            logger.info("%s %s is there with another specification: deleting it", title, name)
        elif kind.standing(there).phase is Phase.FAILED:
            logger.info("%s %s failed: deleting it, to start anew", title, name)
        else:
            logger.info("%s %s is there already: taking it up", title, name)
            return True
        return False

    def _clear(self, kind: Kind, name: str, there: Body | None, *, wait: bool = True) -> None:
        """Delete the job of that name, if there is one, and wait until its or older pods are gone."""
        uid = there["metadata"]["uid"] if there is not None else ""
        if there is not None:
            objects.delete(self.cluster, kind, name, uid=uid)
        if wait:
            objects.await_absence(self.cluster, kind, name, uid=uid)

    def _check_ours(self, kind: Kind, there: Body) -> None:
        if _label(there, LABEL_MANAGED) != MANAGED_BY:
            raise LaunchError(
                f"the {kind.title} {_name(there)} in namespace {self.cluster.namespace} was not made by "
                "kubedet, which leaves it alone",
                fix="give the job another name, or have its owner delete that one",
            )

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


def _label(job: Body, name: str) -> str:
    return str((job["metadata"].get("labels") or {}).get(name, ""))


def _name(job: Body) -> str:
    return str(job["metadata"]["name"])
