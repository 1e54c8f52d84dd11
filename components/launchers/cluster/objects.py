"""The job objects of a namespace, and what they refer to: made, read and deleted."""

import logging
import time
from contextlib import suppress
from functools import partial
from typing import Any

from kubernetes.client import V1DeleteOptions

from components.launchers.cluster import pods
from components.launchers.cluster.client import Cluster
from components.launchers.cluster.kinds.kind import Body, Kind
from components.launchers.cluster.refusals import ApiError
from components.launchers.render.labels import LABEL_MANAGED, MANAGED_BY
from trainer.errors import LaunchError

logger = logging.getLogger(__name__)

_TRIES = 3  # To make what the cluster is deleting at this moment.


def create(cluster: Cluster, kind: Kind, body: Body, *, dry_run: bool = False) -> str:
    """Create a job from its manifest; returns its uid.

    Args:
        cluster: where.
        kind: what it is.
        body: the manifest.
        dry_run: have it checked, and nothing made.

    Raises:
        ApiError: it was refused; status 409 where the name is taken.
    """
    made = _create(cluster, kind, body, dry_run)
    return str(made["metadata"]["uid"])


def rehearse(cluster: Cluster, kind: Kind, body: Body) -> Body:
    """Return what the cluster's webhooks would make of a job; nothing is created.

    Raises:
        ApiError: it was refused.
    """
    return _create(cluster, kind, body, True)


def _create(cluster: Cluster, kind: Kind, body: Body, dry_run: bool) -> Body:
    options: dict[str, Any] = {"dry_run": "All"} if dry_run else {}
    made: Body = cluster.call(
        "create",
        kind.plural,
        lambda: cluster.custom.create_namespaced_custom_object(
            kind.group, kind.version, cluster.namespace, kind.plural, body, **options
        ),
        name=body["metadata"].get("name", ""),
        patience=0.0 if dry_run else None,
    )
    return made


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
        found: Body = cluster.call(
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
    return found


def is_there(cluster: Cluster, kind: Kind, plural: str, name: str) -> bool:
    """Whether the namespace has an object of kubedet's that a job of a kind may refer to.

    Where it may not be read it is taken for there: the cluster says so where it is not.
    """
    try:
        found = _get(cluster, kind, plural, name, None)
    except ApiError as error:
        if error.status == 403:
            return True
        raise
    return found is not None and is_ours(found)


def is_ours(body: Body) -> bool:
    """Whether kubedet made an object: by its label."""
    return bool((body["metadata"].get("labels") or {}).get(LABEL_MANAGED) == MANAGED_BY)


def create_all(cluster: Cluster, kind: Kind, manifests: list[Body]) -> str:
    """Create a job and what it refers to, which is the job's then; returns the job's uid.

    Raises:
        ApiError: something was refused, and what was made before it is deleted; status 409 where the
            job's name is taken.
    """
    *others, job = manifests
    timings = cluster.timings
    waits, end = timings.waits(), time.monotonic() + timings.patience
    while True:
        for other in others:
            _put(cluster, kind, other, _name(job))
        try:
            uid = create(cluster, kind, job)
            break
        except ApiError as error:
            # The controller sees what is made a moment later; and an earlier job may have taken it along.
            unseen = any(f'"{_name(other)}" not found' in error.message for other in others)
            if unseen and time.monotonic() < end:
                time.sleep(next(waits))
                continue
            if not error.passing and error.status != 409:  # Else there may be a job that needs them.
                _discard(cluster, kind, others)
            raise
    give(cluster, kind, manifests, uid)
    return uid


def give(cluster: Cluster, kind: Kind, manifests: list[Body], uid: str) -> None:
    """Make what a job refers to the job's own, so that it goes when the job does.

    Args:
        cluster: where they are.
        kind: the job's.
        manifests: as they were created, the job last.
        uid: the job's.
    """
    *others, job = manifests
    # Without blockOwnerDeletion: some clusters forbid it, and with it a job could wait for ever for its end.
    owner = {**_head(job), "name": _name(job), "uid": uid}
    for other in others:
        owned = {**_head(other), "metadata": {"ownerReferences": [owner]}}
        try:
            _send(cluster, kind, "patch", owned, _name(other))
        except ApiError as error:
            logger.warning(
                "the %s %s stays when its job goes: %s", other["kind"], _name(other), error.message
            )


def _put(cluster: Cluster, kind: Kind, other: Body, job: str) -> None:
    """Create what a job refers to; one of that name is left from an earlier attempt, or from an earlier job.

    The cluster deletes an earlier job's at any moment, so it is taken away from that job first.
    """
    free = {**other, "metadata": {"ownerReferences": None, **other["metadata"]}}
    for _ in range(_TRIES):
        try:
            _send(cluster, kind, "create", other)
            return
        except ApiError as error:
            if error.status != 409 or get(cluster, kind, job) is not None:
                raise
        try:
            _send(cluster, kind, "patch", free, _name(other))
            return
        except ApiError as error:
            if not error.absent:
                raise


def _discard(cluster: Cluster, kind: Kind, others: list[Body]) -> None:
    for other in others:
        with suppress(ApiError):  # The refusal of the job says more.
            _send(cluster, kind, "delete", other, _name(other))


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


def _head(body: Body) -> Body:
    return {"apiVersion": body["apiVersion"], "kind": body["kind"]}


def _name(body: Body) -> str:
    return str(body["metadata"]["name"])


def ours(cluster: Cluster, kind: Kind) -> list[Body]:
    """Return the jobs of a kind that kubedet made."""
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
    """Ask for a job's deletion; one that is gone is no error.

    Args:
        cluster: where it is.
        kind: what it is.
        name: its name.
        uid: delete this very job, not another that has taken its name.
        patience: as of Cluster.call.
    """
    only = {"uid": uid} if uid else None
    options = V1DeleteOptions(propagation_policy="Background", preconditions=only)
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

    A job that is made while pods of an older one are there waits for their names: the operator
    makes its workers and Services only after long back-offs.

    Args:
        cluster: where it is.
        kind: what it is.
        name: its name.
        uid: this very job; another that has taken its name is not waited for.

    Raises:
        LaunchError: something is still there after Timings.removal.
    """
    timings = cluster.timings
    end = time.monotonic() + timings.removal
    waits = timings.waits()
    while True:
        there = get(cluster, kind, name)
        if there is not None and uid and there["metadata"]["uid"] != uid:
            return
        left = [pod.metadata.name for pod in pods.of_job(cluster, kind, name)]
        if there is None and not left:
            return
        if time.monotonic() > end:
            kept = ", ".join(left) or f"the {kind.title} {name}, held by a finalizer"
            raise LaunchError(
                f"{kind.title} {name} was deleted, but after {timings.removal:.0f} s there is still: {kept}",
                fix="see whether its node answers; `kubectl delete pod --force` ends the pods of a dead node",
            )
        time.sleep(min(next(waits), timings.poll))
