"""Requests on jobs of any kind, and the kind of each job."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

from kubernetes.client import V1DeleteOptions

from components.launchers.cluster import pods
from components.launchers.cluster.client import ApiError, Cluster
from components.launchers.cluster.kinds import Kind, Resource
from components.launchers.kubernetes_names import LABEL_MANAGED, MANAGED_BY
from components.launchers.pod_template import Body
from trainer.base.errors import ConfigError, LaunchError

logger = logging.getLogger(__name__)
T = TypeVar("T")

_MAX_TRIES = 3  # Attempts to create an object while another of its name is being deleted.
_INSTALL = "install Kubeflow Trainer (v2.3) or the Training Operator (v1.9), or start what is installed"


def read_label(body: Body, name: str) -> str:
    """Return a label of an object; "" if it has none."""
    return str((body["metadata"].get("labels") or {}).get(name, ""))


def is_managed(body: Body) -> bool:
    """Whether kubedet created an object."""
    return read_label(body, LABEL_MANAGED) == MANAGED_BY


def create_all(cluster: Cluster, manifests: list[Body]) -> str:
    """Create a job and the objects it refers to, owned by the job; returns the job's uid."""
    *dependencies, job = manifests
    timings, clock = cluster.timings, cluster.clock
    waits, end = timings.retry_delays(), clock.monotonic() + timings.patience
    while True:
        for dependency in dependencies:
            _create_or_orphan(cluster, dependency, job)
        try:
            uid = str(_request_object(cluster, "create", job, body=job)["metadata"]["uid"])
            break
        except ApiError as error:
            # A controller's cache may be stale, or the deletion of an earlier job deleted the object.
            names = [dependency["metadata"]["name"] for dependency in dependencies]
            message = error.message.replace("'", '"')  # Trainer's and Kueue's webhooks quote differently.
            unseen = any(f'"{name}" not found' in message for name in names)
            if unseen and clock.monotonic() < end:
                clock.sleep(next(waits))
                continue
            if not error.transient and error.status != 409:  # Otherwise a job may exist that needs them.
                for dependency in dependencies:
                    with suppress(ApiError):  # The error of the job itself is more useful.
                        _request_object(cluster, "delete", dependency)
            raise
    add_owner(cluster, manifests, uid)
    return uid


def add_owner(cluster: Cluster, manifests: list[Body], uid: str) -> None:
    """Make the job of this uid own the objects it refers to, so that they are deleted together."""
    *dependencies, job = manifests
    # Without blockOwnerDeletion, which some clusters forbid, and which could block the deletion of the job.
    owner = {**_type(job), "name": job["metadata"]["name"], "uid": uid}
    for dependency in dependencies:
        try:
            body = {**_type(dependency), "metadata": {"ownerReferences": [owner]}}
            _request_object(cluster, "patch", dependency, body=body)
        except ApiError as error:
            kind, name = dependency["kind"], dependency["metadata"]["name"]
            logger.warning("the %s %s stays when its job is deleted: %s", kind, name, error.message)


def _create_or_orphan(cluster: Cluster, dependency: Body, job: Body) -> None:
    """Create an object that a job refers to; if it exists, remove its owner, an earlier job."""
    for _ in range(_MAX_TRIES):
        try:
            _request_object(cluster, "create", dependency, body=dependency)
            return
        except ApiError as error:
            if error.status != 409 or cluster.find(_resource(job), job["metadata"]["name"]) is not None:
                raise
        try:
            metadata = {"ownerReferences": None, **dependency["metadata"]}
            _request_object(cluster, "patch", dependency, body={**_type(dependency), "metadata": metadata})
            return
        except ApiError as error:
            if not error.absent:
                raise


def _type(body: Body) -> Body:
    return {"apiVersion": body["apiVersion"], "kind": body["kind"]}


def _resource(body: Body) -> Resource:
    group, _, version = body["apiVersion"].partition("/")
    return Resource(group, version, f"{body['kind'].lower()}s")


def _request_object(cluster: Cluster, verb: str, about: Body, **options: Any) -> Any:
    return cluster.request(verb, _resource(about), about["metadata"]["name"], **options)


def delete_job(
    cluster: Cluster, kind: Kind, name: str, uid: str, *, wait: bool = True, patience: float | None = None
) -> None:
    """Delete a job (only the one of `uid`, if given), and wait until it and its pods are gone."""
    if uid:
        options = V1DeleteOptions(propagation_policy="Background", preconditions={"uid": uid})
        try:
            cluster.request("delete", kind.resource, name, body=options, patience=patience)
        except ApiError as error:
            if not error.absent and error.status != 409:
                raise
    timings, clock = cluster.timings, cluster.clock
    waits, end = timings.retry_delays(), clock.monotonic() + timings.removal
    while wait:
        job = cluster.find(kind.resource, name)
        if job is not None and uid and job["metadata"]["uid"] != uid:
            return
        pod_names = [pod.metadata.name for pod in pods.list_pods_of_job(cluster, kind, name)]
        if job is None and not pod_names:
            return
        if clock.monotonic() > end:
            rest = ", ".join(pod_names) or f"the {kind.title} {name}, held by a finalizer"
            raise LaunchError(
                f"{kind.title} {name} was deleted, but this exists after {timings.removal:.0f} s: {rest}",
                fix="check whether its node responds; `kubectl delete pod --force` removes pods of a "
                "dead node",
            )
        clock.sleep(min(next(waits), timings.poll))


class Kinds:
    """Finds which of the `possible` kinds of jobs a cluster has; the preferred kind comes first."""

    def __init__(self, cluster: Cluster, possible: tuple[Kind, ...]) -> None:
        self._cluster, self.possible = cluster, possible
        self.by_name: dict[str, Kind] = {}  # The kinds of jobs that this process read or created.
        self._chosen: Kind | None = possible[0] if len(possible) == 1 else None
        self._answering: Kind | None = None  # The first kind that the cluster has.

    def kind_of_new_job(self) -> Kind:
        """Return the kind for a new job: the first whose controller responds; retry if none does."""
        timings, clock = self._cluster.timings, self._cluster.clock
        waits, end = timings.retry_delays(), clock.monotonic() + timings.outage
        while self._chosen is None:
            refusals: dict[Kind, ApiError] = {}
            for kind in self.possible:
                if refusal := _probe_error(self._cluster, kind):
                    refusals[kind] = refusal
                    continue
                self._chosen = kind
                others = "; ".join(_problem(*item) for item in refusals.items())
                suffix = f" ({others})" if others else ""
                logger.info("jobs are %ss here, of %s%s", kind.title, kind.controller, suffix)
                return kind
            if forbidden := next((error for error in refusals.values() if error.forbidden), None):
                raise forbidden
            away = next((error for error in refusals.values() if error.webhook_away), None)
            if away is None or clock.monotonic() > end:
                raise _no_kind_error(refusals)
            self._cluster.report_trouble(away.message)
            clock.sleep(next(waits))
        return self._chosen

    def find(self, name: str, *, patience: float | None = None) -> tuple[Kind, Body | None]:
        """Return a job and its kind; if the job does not exist, its last or future kind and None."""
        kinds = [self.by_name[name]] if name in self.by_name else self.possible
        get = self._cluster.find
        for kind, job in self._request_each(kinds, lambda kind: get(kind.resource, name, patience=patience)):
            self._answering = self._answering or kind
            if job is not None:
                self.by_name[name] = kind
                return kind, job
        return self.kind_of(name), None

    def list_jobs(self) -> list[tuple[Kind, list[Body]]]:
        """Return the jobs that kubedet created, for each kind that the cluster has."""
        selector, request = f"{LABEL_MANAGED}={MANAGED_BY}", self._cluster.request
        answers = self._request_each(
            self.possible, lambda kind: request("list", kind.resource, label_selector=selector)
        )
        return [(kind, answer["items"]) for kind, answer in answers]

    def _request_each(self, kinds: Iterable[Kind], request: Callable[[Kind], T]) -> Iterator[tuple[Kind, T]]:
        """Yield the response for each kind; skip absent and forbidden kinds unless all are."""
        refusals: dict[Kind, ApiError] = {}
        answered = False
        for kind in kinds:
            try:
                answer = request(kind)
            except ApiError as error:
                if len(self.possible) == 1 or not (error.unknown or error.status == 403):
                    raise
                refusals[kind] = error
                continue
            answered = True
            yield kind, answer
        if refusals and not answered:
            raise next((error for error in refusals.values() if not error.unknown), _no_kind_error(refusals))

    def kind_of(self, name: str) -> Kind:
        """Return the kind of a job that this process read or created; otherwise the kind of a new job."""
        return self.by_name.get(name) or self._chosen or self._answering or self.possible[0]


def dry_run_problem(cluster: Cluster, kind: Kind) -> str:
    """Return why a dry run of a job of a kind fails; empty if it succeeds, or if that is unknown."""
    refusal = _probe_error(cluster, kind)
    return "" if refusal is None or refusal.forbidden else _problem(kind, refusal).partition(": ")[2]


def _probe_error(cluster: Cluster, kind: Kind) -> ApiError | None:
    """Return the error if jobs of a kind cannot be created; None if the controller responded."""
    try:
        cluster.request("create", kind.resource, body=kind.probe(), dry_run="All", patience=0.0)
    except ApiError as error:
        if error.webhook_away or error.forbidden:
            return error
        if error.transient or (error.unknown and 'namespaces "' in error.message):
            raise
        return error if error.unknown else None
    return None


def _no_kind_error(refusals: dict[Kind, ApiError]) -> ConfigError:
    problems = "\n".join(f"  {_problem(*item)}" for item in refusals.items())
    return ConfigError(f"this cluster runs no training jobs:\n{problems}", fix=_INSTALL)


def _problem(kind: Kind, refusal: ApiError) -> str:
    if refusal.webhook_away:
        return f"{kind.title}: its controller does not answer ({kind.controller})"
    if refusal.forbidden:
        return f"{kind.title}: you may not create them"
    return f"{kind.title}: the cluster does not know them"
