"""Requests on jobs of any kind, and the kind of each job."""

import logging
import time
from contextlib import suppress
from functools import partial
from typing import Any

from kubernetes.client import V1DeleteOptions

from components.launchers.cluster import pods
from components.launchers.cluster.client import ApiError, Cluster, is_webhook_away
from components.launchers.cluster.kinds.kind import Body, Kind
from components.launchers.pod_template import LABEL_MANAGED, MANAGED_BY
from trainer.base.errors import ConfigError, LaunchError

logger = logging.getLogger(__name__)

_TRIES = 3  # To create an object while the cluster is deleting one of its name.


def create(cluster: Cluster, kind: Kind, body: Body, *, dry_run: bool = False) -> Body:
    """Create a job from its manifest; returns it as the cluster's webhooks changed it.

    Args:
        cluster: where.
        kind: what it is.
        body: the manifest.
        dry_run: have it checked, without creating it.

    Raises:
        ApiError: it was refused; status 409 if the name is taken.
    """
    options: dict[str, Any] = {"dry_run": "All"} if dry_run else {}
    created: Body = cluster.call(
        "create",
        kind.plural,
        lambda: cluster.custom.create_namespaced_custom_object(
            kind.group, kind.version, cluster.namespace, kind.plural, body, **options
        ),
        name=body["metadata"].get("name", ""),
        patience=0.0 if dry_run else None,
    )
    return created


def get(cluster: Cluster, kind: Kind, name: str, *, patience: float | None = None) -> Body | None:
    """Return a job; None if there is none.

    Args:
        cluster: where it is.
        kind: what it is.
        name: its name.
        patience: as of Cluster.call.

    Raises:
        ApiError: the cluster does not say, or does not know the kind.
    """
    return _get(cluster, kind, kind.plural, name, patience)


def _get(cluster: Cluster, kind: Kind, plural: str, name: str, patience: float | None) -> Body | None:
    try:
        body: Body = cluster.call(
            "get",
            plural,
            lambda: cluster.custom.get_namespaced_custom_object(
                kind.group, kind.version, cluster.namespace, plural, name
            ),
            name=name,
            patience=patience,
        )
    except ApiError as error:
        if error.absent:
            return None
        raise
    return body


def is_there(cluster: Cluster, kind: Kind, plural: str, name: str) -> bool:
    """Whether the namespace has an object of kubedet's that a job of a kind may refer to.

    One that may not be read is assumed to exist: else the cluster refuses the job.
    """
    try:
        body = _get(cluster, kind, plural, name, None)
    except ApiError as error:
        if error.status == 403:
            return True
        raise
    return body is not None and is_managed(body)


def is_managed(body: Body) -> bool:
    """Whether kubedet created an object, by its label."""
    return bool((body["metadata"].get("labels") or {}).get(LABEL_MANAGED) == MANAGED_BY)


def create_all(cluster: Cluster, kind: Kind, manifests: list[Body]) -> str:
    """Create a job and what it refers to, which the job then owns; returns the job's uid.

    Raises:
        ApiError: something was refused, and what was made before it is deleted; status 409 where the
            job's name is taken.
    """
    *dependencies, job = manifests
    timings = cluster.timings
    waits, end = timings.waits(), time.monotonic() + timings.patience
    while True:
        for dependency in dependencies:
            _create_or_orphan(cluster, kind, dependency, _name(job))
        try:
            uid = str(create(cluster, kind, job)["metadata"]["uid"])
            break
        except ApiError as error:
            # A controller's cache lags behind; and the deletion of an earlier job may have taken it along.
            unseen = any(
                f"{quote}{_name(dependency)}{quote} not found" in error.message
                for dependency in dependencies
                for quote in "\"'"  # Trainer's and Kueue's webhooks.
            )
            if unseen and time.monotonic() < end:
                time.sleep(next(waits))
                continue
            if not error.passing and error.status != 409:  # Else there may be a job that needs them.
                _discard(cluster, kind, dependencies)
            raise
    add_owner(cluster, kind, manifests, uid)
    return uid


def add_owner(cluster: Cluster, kind: Kind, manifests: list[Body], uid: str) -> None:
    """Add the job as owner reference of what it refers to, so that both are deleted together.

    Args:
        cluster: where they are.
        kind: the job's.
        manifests: as they were created, the job last.
        uid: the job's.
    """
    *dependencies, job = manifests
    # Without blockOwnerDeletion: some clusters forbid it, and with it a job could wait for ever for its end.
    owner = {**_type(job), "name": _name(job), "uid": uid}
    for dependency in dependencies:
        owned = {**_type(dependency), "metadata": {"ownerReferences": [owner]}}
        try:
            _send(cluster, kind, "patch", owned, _name(dependency))
        except ApiError as error:
            logger.warning(
                "the %s %s stays when its job goes: %s", dependency["kind"], _name(dependency), error.message
            )


def _create_or_orphan(cluster: Cluster, kind: Kind, dependency: Body, job: str) -> None:
    """Create what a job refers to; one of that name is left from an earlier attempt or job.

    The garbage collector may delete an earlier job's at any moment, so its owner references are removed.
    """
    orphaned = {**dependency, "metadata": {"ownerReferences": None, **dependency["metadata"]}}
    for _ in range(_TRIES):
        try:
            _send(cluster, kind, "create", dependency)
            return
        except ApiError as error:
            if error.status != 409 or get(cluster, kind, job) is not None:
                raise
        try:
            _send(cluster, kind, "patch", orphaned, _name(dependency))
            return
        except ApiError as error:
            if not error.absent:
                raise


def _discard(cluster: Cluster, kind: Kind, dependencies: list[Body]) -> None:
    for dependency in dependencies:
        with suppress(ApiError):  # The refusal of the job says more.
            _send(cluster, kind, "delete", dependency, _name(dependency))


def _send(cluster: Cluster, kind: Kind, verb: str, body: Body, name: str = "") -> None:
    """Create, patch or delete an object beside a job: of the same group and version."""
    plural = f"{body['kind'].lower()}s"
    place = (kind.group, kind.version, cluster.namespace, plural)
    custom = cluster.custom
    requests = {
        "create": partial(custom.create_namespaced_custom_object, *place, body),
        "patch": partial(custom.patch_namespaced_custom_object, *place, name, body),
        "delete": partial(custom.delete_namespaced_custom_object, *place, name),
    }
    cluster.call(verb, plural, requests[verb], name=name)


def _type(body: Body) -> Body:
    return {"apiVersion": body["apiVersion"], "kind": body["kind"]}


def _name(body: Body) -> str:
    return str(body["metadata"]["name"])


def managed(cluster: Cluster, kind: Kind) -> list[Body]:
    """Return the jobs of a kind that kubedet created."""
    body = cluster.call(
        "list",
        kind.plural,
        lambda: cluster.custom.list_namespaced_custom_object(
            kind.group, kind.version, cluster.namespace, kind.plural,
            label_selector=f"{LABEL_MANAGED}={MANAGED_BY}",
        ),
    )  # fmt: skip
    return list(body["items"])


def delete(cluster: Cluster, kind: Kind, name: str, *, uid: str = "", patience: float | None = None) -> None:
    """Delete a job, without waiting; one that is gone is no error.

    Args:
        cluster: where it is.
        kind: what it is.
        name: its name.
        uid: delete only the job of this uid, not a later one of the same name.
        patience: as of Cluster.call.
    """
    precondition = {"uid": uid} if uid else None
    options = V1DeleteOptions(propagation_policy="Background", preconditions=precondition)
    try:
        cluster.call(
            "delete",
            kind.plural,
            lambda: cluster.custom.delete_namespaced_custom_object(
                kind.group, kind.version, cluster.namespace, kind.plural, name, body=options
            ),
            name=name,
            patience=patience,
        )
    except ApiError as error:
        if not error.absent and not (uid and error.status == 409):
            raise


def await_absence(cluster: Cluster, kind: Kind, name: str, *, uid: str = "") -> None:
    """Wait until a job and its pods are gone.

    A job that is created while pods of an older one exist waits for their names: the operator
    creates its workers and Services only after long back-offs.

    Args:
        cluster: where it is.
        kind: what it is.
        name: its name.
        uid: only the job of this uid; a later one of the same name is not waited for.

    Raises:
        LaunchError: something is still there after Timings.removal.
    """
    timings = cluster.timings
    end = time.monotonic() + timings.removal
    waits = timings.waits()
    while True:
        job = get(cluster, kind, name)
        if job is not None and uid and job["metadata"]["uid"] != uid:
            return
        pod_names = [pod.metadata.name for pod in pods.of_job(cluster, kind, name)]
        if job is None and not pod_names:
            return
        if time.monotonic() > end:
            rest = ", ".join(pod_names) or f"the {kind.title} {name}, held by a finalizer"
            raise LaunchError(
                f"{kind.title} {name} was deleted, but after {timings.removal:.0f} s there is still: {rest}",
                fix="see whether its node answers; `kubectl delete pod --force` ends the pods of a dead node",
            )
        time.sleep(min(next(waits), timings.poll))


class Kinds:
    """The kinds of a cluster's jobs.

    Args:
        cluster: the cluster and namespace.
        possible: candidate kinds, the preferred one first.
    """

    def __init__(self, cluster: Cluster, possible: tuple[Kind, ...]) -> None:
        self._cluster, self.possible = cluster, possible
        self._kinds: dict[str, Kind] = {}
        self._chosen: Kind | None = None
        self._answering: Kind | None = None
        """The first kind whose resource the cluster has."""
        self._away: ApiError | None = None
        """Answer of a controller that does not answer."""

    def of_new(self) -> Kind:
        """Return the kind of a new job: the first that the cluster knows and whose controller answers.

        If no controller answers, it waits for one as for an API server that is away.

        Raises:
            ConfigError: there is none.
            ApiError: the cluster does not say, or forbids it.
        """
        timings = self._cluster.timings
        waits, end = timings.waits(), time.monotonic() + timings.outage
        while self._chosen is None:
            chosen = self._choose()
            if isinstance(chosen, ConfigError):
                if self._away is None or time.monotonic() > end:
                    raise chosen
                self._cluster.trouble.tell(self._away.message)
                time.sleep(next(waits))
            else:
                self._chosen = chosen
        return self._chosen

    def _choose(self) -> Kind | ConfigError:
        if len(self.possible) == 1:
            return self.possible[0]
        self._away = None
        problems: list[str] = []
        forbidden: ApiError | None = None
        for kind in self.possible:
            refusal = self._refusal(kind)
            if refusal is not None and refusal.forbidden:
                forbidden = forbidden or refusal
                problems.append(f"  {kind.title}: you may not create them")
                continue
            if problem := _problem(kind, refusal):
                if refusal is not None and is_webhook_away(refusal.message):
                    self._away = refusal
                problems.append(f"  {kind.title}: {problem}")
                continue
            others = "; ".join(line.strip() for line in problems)
            logger.info(
                "jobs are %ss here, of %s%s", kind.title, kind.controller, f" ({others})" if others else ""
            )
            return kind
        if forbidden is not None:
            raise forbidden
        return _nothing_here(problems)

    def trouble(self, kind: Kind) -> str:
        """Return why a job of a kind would not run; empty if it would.

        A dry run calls the controller's webhook and creates nothing.

        Raises:
            ApiError: the cluster does not say, or has no such namespace.
        """
        return _problem(kind, self._refusal(kind))

    def _refusal(self, kind: Kind) -> ApiError | None:
        try:
            create(self._cluster, kind, kind.probe(), dry_run=True)
        except ApiError as error:
            if not is_webhook_away(error.message) and (
                error.passing or (error.unknown and 'namespaces "' in error.message)
            ):
                raise
            return error
        return None

    def find(self, name: str, *, patience: float | None = None) -> tuple[Kind, Body | None]:
        """Return a job and its kind; if there is none, None and the kind that it had or would have.

        Args:
            name: its name.
            patience: as of Cluster.call.

        Raises:
            ApiError: the cluster does not say.
            ConfigError: it knows none of the kinds.
        """
        known_kind = self._kinds.get(name)
        refusal: ApiError | None = None
        answered: Kind | None = None
        for kind in (known_kind,) if known_kind else self.possible:
            try:
                job = get(self._cluster, kind, name, patience=patience)
            except ApiError as error:
                if len(self.possible) == 1 or not (error.unknown or error.status == 403):
                    raise
                if refusal is None or refusal.unknown:
                    refusal = error
                continue
            answered = answered or kind
            if job is not None:
                self._kinds[name] = kind
                return kind, job
        if refusal is not None and answered is None:
            raise self._error(refusal)
        self._answering = self._answering or answered
        return self.kind_of(name), None

    def _error(self, refusal: ApiError) -> ApiError | ConfigError:
        if not refusal.unknown:
            return refusal
        return _nothing_here([f"  {kind.title}: {_problem(kind, refusal)}" for kind in self.possible])

    def kind_of(self, name: str) -> Kind:
        """Return the kind of a job that this process read or created; of any other that of a new job."""
        return self._kinds.get(name) or self._chosen or self._answering or self.possible[0]

    def remember(self, name: str, kind: Kind) -> None:
        """Remember the kind of a job that was created."""
        self._kinds[name] = kind

    def jobs(self) -> list[tuple[Kind, list[Body]]]:
        """Return the jobs that kubedet made, by kind; kinds that the cluster does not know are left out.

        Raises:
            ApiError: the cluster does not say.
            ConfigError: it knows none of the kinds.
        """
        jobs: list[tuple[Kind, list[Body]]] = []
        refusal: ApiError | None = None
        for kind in self.possible:
            try:
                jobs.append((kind, managed(self._cluster, kind)))
            except ApiError as error:
                if len(self.possible) == 1 or not (error.unknown or error.status == 403):
                    raise
                if refusal is None or refusal.unknown:
                    refusal = error
        if refusal is not None and not jobs:
            raise self._error(refusal)
        return jobs


def _nothing_here(problems: list[str]) -> ConfigError:
    return ConfigError(
        "this cluster runs no training jobs:\n" + "\n".join(problems),
        fix="install Kubeflow Trainer (v2.3) or the Training Operator (v1.9), or start what is installed",
    )


def _problem(kind: Kind, refusal: ApiError | None) -> str:
    """Return why a job of a kind would not run, from the refusal of its dry run."""
    if refusal is None:
        return ""
    if is_webhook_away(refusal.message):
        return f"its controller does not answer ({kind.controller})"
    return "the cluster does not know them" if refusal.unknown else ""
