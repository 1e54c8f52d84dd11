"""Submits, adopts, replaces and deletes the jobs of a namespace."""

import logging
import time
from dataclasses import replace
from functools import partial
from subprocess import Popen

from components.launchers.backend import Phase
from components.launchers.cluster import job_objects
from components.launchers.cluster.client import ApiError, Cluster
from components.launchers.cluster.job_objects import Kinds
from components.launchers.cluster.kinds.kind import Body, Kind
from components.launchers.cluster.own_pod import OwnPod, ends_with_the_run, read_own_pod
from components.launchers.cluster.termination import delete_with_run
from components.launchers.pod_template import LABEL_MANAGED, LABEL_SPEC, MANAGED_BY
from components.launchers.spec import JobSpec
from trainer.base.errors import ConfigError, LaunchError

logger = logging.getLogger(__name__)

_TRIES = 5  # To create a job whose name others delete and take.


class Submissions:
    """The jobs that this process submitted.

    Args:
        cluster: the cluster and namespace.
        kinds: what the jobs may be.
    """

    def __init__(self, cluster: Cluster, kinds: Kinds) -> None:
        self._cluster, self._kinds = cluster, kinds
        self._own: OwnPod | None = None
        self._guard: Popen[bytes] | None = None
        self._hashes: dict[str, str] = {}
        self._uids: dict[str, str] = {}

    def submit(self, job: JobSpec) -> str:
        """Start a job, or adopt the same one if it exists already; returns its name.

        A job of that name may exist: the same job is adopted unless it failed; a failed or different one is
        deleted first; one that kubedet did not create is not touched.

        Args:
            job: the job; namespace and image may be left to the own pod.

        Raises:
            ConfigError: it names no image, or another namespace than this backend's.
            LaunchError: it was refused, or the name is taken.
        """
        self._own = read_own_pod(self._cluster)
        job = self._completed(job, self._own)
        if self._own.workflow and self._own.namespace == self._cluster.namespace:
            self._guard = delete_with_run(
                self._cluster.api.configuration,
                self._cluster.namespace,
                self._own.workflow["name"],
                self._own.name,
                [(kind.group, kind.version, kind.plural) for kind in self._kinds.possible],
                job.name,
            )
        self._hashes[job.name] = job.fingerprint
        manifests: list[Body] = []
        for _ in range(_TRIES):
            kind, existing = self._kinds.find(job.name)
            if existing is not None and self._adopts(kind, existing, job):
                self._uids[job.name] = existing["metadata"]["uid"]
                if manifests:  # It is our own: the answer to its creation was lost.
                    job_objects.add_owner(self._cluster, kind, manifests, self._uids[job.name])
                return job.name
            old = kind
            kind, manifests = self._manifests(job)
            self._clear(kind if existing is None else old, job.name, existing)
            try:
                self._uids[job.name] = job_objects.create_all(self._cluster, kind, manifests)
            except ApiError as error:
                if error.passing:
                    return self._after_lost_answer(error, kind, job, manifests)
                if error.status != 409:
                    raise
                time.sleep(next(self._cluster.timings.waits()))
            else:
                self._kinds.remember(job.name, kind)
                logger.info("created %s %s in namespace %s", kind.title, job.name, self._cluster.namespace)
                return job.name
        raise LaunchError(
            f"cannot create the job {job.name}: others create jobs of that name again and again",
            fix="end the other launcher, or give the job another name",
        )

    def _after_lost_answer(self, error: ApiError, kind: Kind, job: JobSpec, manifests: list[Body]) -> str:
        """Check whether a creation that got no response succeeded; returns the job's name if so.

        Raises:
            ApiError: it was not, or nobody knows.
        """
        try:
            existing = job_objects.get(self._cluster, kind, job.name)
        except ApiError:
            error.message += f"; whether the {kind.title} {job.name} was created is not known"
            error.fix = f"look with `kubedet job status {job.name}`; `kubedet job stop {job.name}` ends it"
            raise error from None
        if existing is None or _label(existing, LABEL_SPEC) != job.fingerprint:
            raise error
        self._uids[job.name] = existing["metadata"]["uid"]
        job_objects.add_owner(self._cluster, kind, manifests, self._uids[job.name])
        self._kinds.remember(job.name, kind)
        logger.warning(
            "%s %s exists: only the answer to its creation was lost; `kubedet job stop %s` ends it",
            kind.title, job.name, job.name,
        )  # fmt: skip
        return job.name

    def submitted(self, name: str) -> tuple[str, str]:
        """Return the specification's hash and the uid of a job that was submitted here; empty if unknown."""
        return self._hashes.get(name, ""), self._uids.get(name, "")

    def stop(self, name: str, *, wait: bool = True) -> None:
        """Delete a job of kubedet's and its pods; one that is gone already is no error.

        Args:
            name: its name.
            wait: until all is gone.

        Raises:
            LaunchError: somebody else made it, or it is not gone after Timings.removal.
        """
        kind, existing = self._kinds.find(name)
        if existing is not None:
            self._check_managed(kind, existing)
        self._clear(kind, name, existing, wait=wait)

    def withdraw(self, name: str, *, wait: bool = True) -> None:
        """Delete a job that was submitted here; one that another launcher made since is left alone.

        Args:
            name: its name.
            wait: until all is gone.

        Raises:
            LaunchError: as of `stop`.
        """
        kind, existing = self._kinds.find(name)
        fingerprint, uid = self.submitted(name)
        if (
            existing is None
            or _label(existing, LABEL_SPEC) != fingerprint
            or uid not in ("", existing["metadata"]["uid"])
        ):
            return
        self._clear(kind, name, existing, wait=wait)

    def abandon(self, name: str) -> None:
        """Delete a job that this process submitted: one request, within Timings.stop.

        Raises:
            ApiError: it could not be deleted.
        """
        kind, _ = self._kinds.find(name) if name not in self._uids else (self._kinds.kind_of(name), None)
        job_objects.delete(
            self._cluster, kind, name, uid=self._uids.get(name, ""), patience=self._cluster.timings.stop
        )  # fmt: skip

    def end_with_the_run(self) -> bool:
        """Whether they end too where this process is asked to end; see `own_pod.ends_with_the_run`."""
        return ends_with_the_run(self._cluster, self._own)

    def _completed(self, job: JobSpec, own_pod: OwnPod) -> JobSpec:
        """Fill in what the job inherits from the own pod."""
        namespace = self._cluster.namespace
        if job.namespace not in ("", namespace):
            raise ConfigError(
                f"the job's namespace is {job.namespace}, and this launcher works in {namespace}",
                fix="name the same one twice, or only once",
            )
        queue = job.kueue_queue or own_pod.queue
        job = replace(job, namespace=namespace, image=job.image or own_pod.image, kueue_queue=queue)
        if not job.image:
            raise ConfigError("the job names no container image", fix="set image")
        return job

    def _manifests(self, job: JobSpec) -> tuple[Kind, list[Body]]:
        """Return what is to be created, and the job's kind."""
        kind = self._kinds.of_new()
        manifests = kind.manifests(job, partial(job_objects.is_there, self._cluster, kind))
        if problems := kind.problems(manifests):
            lines = "\n".join(f"  {problem}" for problem in problems)
            raise ConfigError(f"the cluster would not take the job as it is meant:\n{lines}")
        if ignored := kind.left_out(job):
            logger.warning("a %s knows nothing of: %s", kind.title, ", ".join(ignored))
        own_pod = self._own or OwnPod()
        if own_pod.workflow and own_pod.namespace == self._cluster.namespace:
            for manifest in manifests:
                manifest["metadata"]["ownerReferences"] = [own_pod.workflow]
        return kind, manifests

    def _adopts(self, kind: Kind, existing: Body, job: JobSpec) -> bool:
        """Decide on an existing job of that name: True adopts it, False replaces it."""
        self._check_managed(kind, existing)
        title, name = kind.title, job.name
        if existing["metadata"].get("deletionTimestamp"):
            logger.info("%s %s is being deleted: waiting until it is gone", title, name)
        elif _label(existing, LABEL_SPEC) != job.fingerprint:
            logger.info("%s %s is there with another specification: deleting it", title, name)
        elif kind.standing(existing).phase is Phase.FAILED:
            logger.info("%s %s failed: deleting it, to start anew", title, name)
        else:
            logger.info("%s %s is there already: taking it up", title, name)
            return True
        return False

    def _clear(self, kind: Kind, name: str, existing: Body | None, *, wait: bool = True) -> None:
        """Delete the job of that name, if there is one, and wait until its or older pods are gone."""
        uid = existing["metadata"]["uid"] if existing is not None else ""
        if existing is not None:
            job_objects.delete(self._cluster, kind, name, uid=uid)
        if wait:
            job_objects.await_absence(self._cluster, kind, name, uid=uid)

    def _check_managed(self, kind: Kind, existing: Body) -> None:
        if _label(existing, LABEL_MANAGED) != MANAGED_BY:
            raise LaunchError(
                f"the {kind.title} {_name(existing)} in namespace {self._cluster.namespace} was not made by "
                "kubedet, which leaves it alone",
                fix="give the job another name, or have its owner delete that one",
            )


def _label(job: Body, name: str) -> str:
    return str((job["metadata"].get("labels") or {}).get(name, ""))


def _name(job: Body) -> str:
    return str(job["metadata"]["name"])
