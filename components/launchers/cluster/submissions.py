"""Jobs put into a namespace, taken up, replaced and taken out again."""

import logging
import time
from dataclasses import replace
from functools import partial

from components.launchers.backend import Phase
from components.launchers.cluster import objects
from components.launchers.cluster.client import Cluster
from components.launchers.cluster.found import Kinds
from components.launchers.cluster.kinds.kind import Body, Kind
from components.launchers.cluster.owner import Own, ends_with_the_run, own
from components.launchers.cluster.refusals import ApiError
from components.launchers.render.labels import LABEL_MANAGED, LABEL_SPEC, MANAGED_BY
from components.launchers.spec import JobSpec
from trainer.errors import ConfigError, LaunchError

logger = logging.getLogger(__name__)

_TRIES = 5  # To get hold of a name that others delete and take.


class Submissions:
    """The jobs of one process: what it submitted, and how that is ended.

    Args:
        cluster: the cluster and namespace.
        kinds: what the jobs may be.
    """

    def __init__(self, cluster: Cluster, kinds: Kinds) -> None:
        self._cluster, self._kinds = cluster, kinds
        self._own: Own | None = None
        self._hashes: dict[str, str] = {}
        self._uids: dict[str, str] = {}

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
        self._own = own(self._cluster)
        job = self._completed(job, self._own)
        self._hashes[job.name] = job.fingerprint
        manifests: list[Body] = []
        for _ in range(_TRIES):
            kind, there = self._kinds.find(job.name)
            if there is not None and self._adopts(kind, there, job):
                self._uids[job.name] = there["metadata"]["uid"]
                if manifests:  # It is our own: the answer to its creation was lost.
                    objects.give(self._cluster, kind, manifests, self._uids[job.name])
                return job.name
            old = kind
            kind, manifests = self._manifests(job)
            self._clear(kind if there is None else old, job.name, there)
            try:
                self._uids[job.name] = objects.create_all(self._cluster, kind, manifests)
            except ApiError as error:
                if error.passing:
                    return self._found_after(error, kind, job, manifests)
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

    def _found_after(self, error: ApiError, kind: Kind, job: JobSpec, manifests: list[Body]) -> str:
        """Look whether a creation that got no answer was done; returns the job's name if so.

        Raises:
            ApiError: it was not, or nobody knows.
        """
        try:
            there = objects.get(self._cluster, kind, job.name)
        except ApiError:
            error.message += f"; whether the {kind.title} {job.name} was created is not known"
            error.fix = f"look with `kubedet job status {job.name}`; `kubedet job stop {job.name}` ends it"
            raise error from None
        if there is None or _label(there, LABEL_SPEC) != job.fingerprint:
            raise error
        self._uids[job.name] = there["metadata"]["uid"]
        objects.give(self._cluster, kind, manifests, self._uids[job.name])
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
        kind, there = self._kinds.find(name)
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
        kind, there = self._kinds.find(name)
        mine, uid = self.submitted(name)
        if there is None or _label(there, LABEL_SPEC) != mine or uid not in ("", there["metadata"]["uid"]):
            return
        self._clear(kind, name, there, wait=wait)

    def abandon(self, name: str) -> None:
        """Delete a job that this process submitted: one request, within Timings.stop.

        Raises:
            ApiError: it could not be deleted.
        """
        kind, _ = self._kinds.find(name) if name not in self._uids else (self._kinds.kind_of(name), None)
        objects.delete(
            self._cluster, kind, name, uid=self._uids.get(name, ""), patience=self._cluster.timings.stop
        )  # fmt: skip

    def end_with_the_run(self) -> bool:
        """Whether they end too where this process is asked to end; see `owner.ends_with_the_run`."""
        return ends_with_the_run(self._cluster, self._own)

    def _completed(self, job: JobSpec, mine: Own) -> JobSpec:
        """Fill in what the own pod gives."""
        here = self._cluster.namespace
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
        kind = self._kinds.of_new()
        manifests = kind.manifests(job, partial(objects.is_there, self._cluster, kind))
        if problems := kind.problems(manifests):
            told = "\n".join(f"  {problem}" for problem in problems)
            raise ConfigError(f"the cluster would not take the job as it is meant:\n{told}")
        if lost := kind.left_out(job):
            logger.warning("a %s knows nothing of: %s", kind.title, ", ".join(lost))
        mine = self._own or Own()
        if mine.workflow and mine.namespace == self._cluster.namespace:
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
            objects.delete(self._cluster, kind, name, uid=uid)
        if wait:
            objects.await_absence(self._cluster, kind, name, uid=uid)

    def _check_ours(self, kind: Kind, there: Body) -> None:
        if _label(there, LABEL_MANAGED) != MANAGED_BY:
            raise LaunchError(
                f"the {kind.title} {_name(there)} in namespace {self._cluster.namespace} was not made by "
                "kubedet, which leaves it alone",
                fix="give the job another name, or have its owner delete that one",
            )


def _label(job: Body, name: str) -> str:
    return str((job["metadata"].get("labels") or {}).get(name, ""))


def _name(job: Body) -> str:
    return str(job["metadata"]["name"])
