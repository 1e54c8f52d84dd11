"""Creates, reads and deletes the job objects of a namespace and the objects that they refer to."""

import logging
import time
from contextlib import suppress
from functools import partial
from typing import Any

from kubernetes.client import V1DeleteOptions

from components.launchers.cluster import pods
from components.launchers.cluster.api_errors import ApiError
from components.launchers.cluster.client import Cluster
from components.launchers.cluster.kinds.kind import Body, Kind
from components.launchers.render.labels import LABEL_MANAGED, MANAGED_BY
from trainer.errors import LaunchError

logger = logging.getLogger(__name__)

_TRIES = 3  # To create an object while the cluster is deleting one of its name.


def create(cluster: Cluster, kind: Kind, body: Body, *, dry_run: bool = False) -> str:
    """Create a job from its manifest; returns its uid.

    Args:
        cluster: where.
        kind: what it is.
        body: the manifest.
        dry_run: have it checked, without creating it.

    Raises:
        ApiError: it was refused; status 409 where the name is taken.
    """
    created = _create(cluster, kind, body, dry_run)
    return str(created["metadata"]["uid"])


def rehearse(cluster: Cluster, kind: Kind, body: Body) -> Body:
    """Return a job as the cluster's webhooks would change it, by a dry run.

    Raises:
        ApiError: it was refused.
    """
    return _create(cluster, kind, body, True)


def _create(cluster: Cluster, kind: Kind, body: Body, dry_run: bool) -> Body:
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
            uid = create(cluster, kind, job)
            break
        except ApiError as error:
            # The controller's cache lags behind; and the deletion of an earlier job may have taken it along.
            unseen = any(f'"{_name(dependency)}" not found' in error.message for dependency in dependencies)
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
