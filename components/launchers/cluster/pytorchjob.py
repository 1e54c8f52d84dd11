"""Training jobs as PyTorchJobs of the Training Operator."""

import logging
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from components.launchers.backend import Backend, JobStatus, LogLine, Phase
from components.launchers.cluster import client, conditions, objects, pods
from components.launchers.cluster.ends import Ends
from components.launchers.cluster.feed import Feed
from components.launchers.cluster.owner import Own, own
from components.launchers.cluster.refusals import ApiError
from components.launchers.cluster.timings import Timings
from components.launchers.render import check
from components.launchers.render.labels import LABEL_MANAGED, LABEL_SPEC, MANAGED_BY
from components.launchers.render.pytorchjob import manifest
from components.launchers.spec import JobSpec
from trainer.errors import ConfigError, LaunchError

logger = logging.getLogger(__name__)

TAIL = 100
"""Last lines that are shown of a failed pod other than rank 0's."""

_TRIES = 5  # To get hold of a name that others delete and take.


class PyTorchJobBackend(Backend):
    """Runs jobs through the Training Operator, in one namespace.

    Args:
        cluster: the cluster and namespace.
    """

    def __init__(self, cluster: client.Cluster) -> None:
        self.cluster = cluster
        self.own: Own | None = None
        """What the own pod gives to jobs; None before the first is submitted."""
        self._incarnations = conditions.Incarnations()
        self._hashes: dict[str, str] = {}
        self._uids: dict[str, str] = {}

    @classmethod
    def connect(cls, namespace: str = "", *, timings: Timings | None = None) -> "PyTorchJobBackend":
        """Return a backend for the cluster that this process means; nothing is sent.

        Args:
            namespace: the namespace; empty is the kubeconfig's or the own pod's.
            timings: how long things may take.

        Raises:
            ConfigError: there is none.
        """
        return cls(client.connect(namespace, timings=timings))

    def within(self, namespace: str) -> "PyTorchJobBackend":
        """Return the backend of a namespace; empty is this one's."""
        if namespace in ("", self.cluster.namespace):
            return self
        return PyTorchJobBackend(self.cluster.within(namespace))

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
        job, body = self._prepare(job)
        self._hashes[job.name] = job.fingerprint
        for _ in range(_TRIES):
            there = objects.get(self.cluster, job.name)
            if there is not None and self._adopts(there, job):
                self._uids[job.name] = there.metadata.uid
                return job.name
            self._clear(job.name, there)
            try:
                self._uids[job.name] = objects.create(self.cluster, job.name, body)
            except ApiError as error:
                if error.passing:
                    return self._found_after(error, job)
                if error.status != 409:
                    raise
                time.sleep(next(self.cluster.timings.waits()))
            else:
                logger.info("created PyTorchJob %s in namespace %s", job.name, self.cluster.namespace)
                return job.name
        raise LaunchError(
            f"cannot create PyTorchJob {job.name}: others create jobs of that name again and again",
            fix="end the other launcher, or give the job another name",
        )

    def _found_after(self, error: ApiError, job: JobSpec) -> str:
        """Look whether a creation that got no answer was done; returns the job's name if so.

        Raises:
            ApiError: it was not, or nobody knows.
        """
        try:
            there = objects.get(self.cluster, job.name)
        except ApiError:
            error.message += f"; whether the PyTorchJob {job.name} was created is not known"
            error.fix = f"look with `kubedet job status {job.name}`; `kubedet job stop {job.name}` ends it"
            raise error from None
        if there is None or _label(there, LABEL_SPEC) != job.fingerprint:
            raise error
        self._uids[job.name] = there.metadata.uid
        logger.warning(
            "PyTorchJob %s exists: only the answer to its creation was lost; `kubedet job stop %s` ends it",
            job.name, job.name,
        )  # fmt: skip
        return job.name

    def status(self, name: str) -> JobStatus:
        """Tell how a job is.

        Raises:
            ApiError: the cluster does not say.
        """
        return self._look(name, None)

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
        timings = self.cluster.timings
        waits, answered = timings.waits(), time.monotonic()
        with Feed(self.cluster, follow=not once) as feed, Ends(self.cluster, name) as ends:
            while True:
                try:
                    status = ends.remembered(self._look(name, 0.0))
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
        there = objects.get(self.cluster, name)
        if there is not None:
            self._check_ours(there)
        self._clear(name, there, wait=wait)

    def withdraw(self, name: str, *, wait: bool = True) -> None:
        """Delete a job that was submitted here; one that another launcher made since is left alone.

        Args:
            name: its name.
            wait: until all is gone.

        Raises:
            LaunchError: as of `stop`.
        """
        there = objects.get(self.cluster, name)
        mine, uid = self.submitted(name)
        if there is None or _label(there, LABEL_SPEC) != mine or uid not in ("", there.metadata.uid):
            return
        self._clear(name, there, wait=wait)

    def abandon(self, name: str) -> None:
        """Delete a job that this process submitted: one request, within Timings.stop.

        Raises:
            ApiError: it could not be deleted.
        """
        objects.delete(self.cluster, name, uid=self._uids.get(name, ""), patience=self.cluster.timings.stop)

    def list_jobs(self) -> list[JobStatus]:
        """Return how kubedet's jobs of the namespace are, the newest first.

        Raises:
            ApiError: the cluster does not say.
        """
        by_job: dict[str, list[Any]] = {}
        for pod in pods.of_all(self.cluster):
            by_job.setdefault(pod.metadata.labels.get(pods.LABEL_JOB, ""), []).append(pod)
        ours = objects.labelled(self.cluster, f"{LABEL_MANAGED}={MANAGED_BY}")
        told = [conditions.status(job, by_job.get(job.metadata.name, [])) for job in ours]
        return sorted(told, key=lambda status: status.created, reverse=True)

    def explain(self, status: JobStatus) -> list[str]:
        """Say why the pods of a job do not run: what holds them back, and the cluster's events."""
        return pods.explain(self.cluster, status)

    def last_exit(self, name: str, pod: str) -> str:
        """Return how the pod before one of the same name ended; nothing if that is not known."""
        return pods.last_exit(self.cluster, name, pod)

    def _prepare(self, job: JobSpec) -> tuple[JobSpec, dict[str, Any]]:
        """Fill in what the own pod gives; returns the job and its manifest."""
        here = self.cluster.namespace
        if job.namespace not in ("", here):
            raise ConfigError(
                f"the job's namespace is {job.namespace}, and this launcher works in {here}",
                fix="name the same one twice, or only once",
            )
        self.own = mine = own(self.cluster)
        queue = job.kueue_queue or mine.queue
        job = replace(job, namespace=here, image=job.image or mine.image, kueue_queue=queue)
        if not job.image:
            raise ConfigError("the job names no container image", fix="set image")
        body = manifest(job)
        if problems := check.problems(body):
            told = "\n".join(f"  {problem}" for problem in problems)
            raise ConfigError(f"the cluster would not take the job as it is meant:\n{told}")
        if mine.workflow and mine.namespace == here:
            body["metadata"]["ownerReferences"] = [mine.workflow]
        return job, body

    def _adopts(self, there: Any, job: JobSpec) -> bool:
        """Decide on a job that has the name already: True is to take it up, False to replace it."""
        self._check_ours(there)
        name = job.name
        if there.metadata.deletion_timestamp:
            logger.info("PyTorchJob %s is being deleted: waiting until it is gone", name)
        elif _label(there, LABEL_SPEC) != job.fingerprint:
            logger.info("PyTorchJob %s is there with another specification: deleting it", name)
        elif conditions.failed(there):
            logger.info("PyTorchJob %s failed: deleting it, to start anew", name)
        else:
            logger.info("PyTorchJob %s is there already: taking it up", name)
            return True
        return False

    def _clear(self, name: str, there: Any, *, wait: bool = True) -> None:
        """Delete the job of that name, if there is one, and wait until its or older pods are gone."""
        uid = there.metadata.uid if there is not None else ""
        if there is not None:
            objects.delete(self.cluster, name, uid=uid)
        if wait:
            objects.await_absence(self.cluster, name, uid=uid)

    def _check_ours(self, there: Any) -> None:
        if _label(there, LABEL_MANAGED) != MANAGED_BY:
            raise LaunchError(
                f"the PyTorchJob {there.metadata.name} in namespace {self.cluster.namespace} was not made by "
                "kubedet, which leaves it alone",
                fix="give the job another name, or have its owner delete that one",
            )

    def _look(self, name: str, patience: float | None) -> JobStatus:
        job = objects.get(self.cluster, name, patience=patience)
        if job is None:
            return JobStatus(name, Phase.GONE)
        found = pods.of_job(self.cluster, name, patience=patience)
        return self._incarnations.count(conditions.status(job, found))


def _choose(feed: Feed, status: JobStatus) -> None:
    """Read the logs of rank 0 (of an elastic job any pod may be that) and of pods that failed."""
    for pod in status.pods:
        if pod.rank == 0 or status.elastic:
            feed.follow(pod.name, pod.uid)
        elif pod.phase == "Failed" or pod.exit_code:
            feed.follow(pod.name, pod.uid, tail=TAIL)


def _label(job: Any, name: str) -> str:
    return (job.metadata.labels or {}).get(name, "")
