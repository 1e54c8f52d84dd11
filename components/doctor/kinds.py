"""Which kinds of training jobs a cluster runs, and what those of Kubeflow Trainer find in the namespace."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from components.launchers.cluster import job_objects
from components.launchers.cluster.api_errors import ApiError
from components.launchers.cluster.client import Cluster
from components.launchers.cluster.job_kinds import Kinds
from components.launchers.cluster.kinds import KINDS
from components.launchers.cluster.kinds.kind import Kind
from components.launchers.render import trainjob
from trainer.doctor import Check
from trainer.errors import ConfigError

_PATIENCE = 5.0


@dataclass(frozen=True)
class Found:
    """What is known of a kind of jobs in a cluster."""

    kind: Kind
    known: bool = True
    """Whether the cluster knows it, or nobody can tell."""
    problem: str = ""
    """Why its jobs would not run; nothing where they would."""
    fix: str = ""
    """What to do about it."""
    certain: bool = True
    """Whether the cluster has said so."""
    taken: bool = False
    """Whether a new job becomes one, unless the user names a kind."""

    @property
    def title(self) -> str:
        """The kind and its controller, without the controller's version."""
        return f"{self.kind.title}s ({self.kind.controller.removeprefix('the ').partition(' (')[0]})"


def look(cluster: Cluster) -> list[Found]:
    """Ask for the jobs of every kind, as the launcher does, and whether anybody would run a new one."""
    seen = [_look(cluster, kind) for kind in KINDS.values()]
    taken = _taken(cluster, [item.kind for item in seen if not item.problem])
    return [replace(item, taken=item.kind is taken) for item in seen]


def _look(cluster: Cluster, kind: Kind) -> Found:
    try:
        cluster.call("list", kind.plural, lambda: _list(cluster, kind), patience=_PATIENCE)
        problem = Kinds(cluster, (kind,)).trouble(kind)
    except ApiError as error:
        if error.unknown and "namespaces" not in error.message:
            return Found(kind, False, "the cluster does not know them", f"install {kind.controller}")
        return Found(kind, True, f"not known: {error.message}", error.fix, certain=False)
    return Found(kind, True, problem, f"look at the pods and logs of {kind.controller}" if problem else "")


def _list(cluster: Cluster, kind: Kind) -> Any:
    place = (kind.group, kind.version, cluster.namespace, kind.plural)
    return cluster.custom.list_namespaced_custom_object(*place, limit=1)


def checks(seen: list[Found]) -> Iterator[Check]:
    """Tell of each kind; one is enough, and which of two a job becomes is said.

    Args:
        seen: what `look` found.
    """
    running = [item for item in seen if not item.problem]
    some = any(item.taken for item in seen)
    for item in seen:
        name = f"launcher={item.kind.name}"
        if item in running:
            also = "launcher=kubernetes takes them" if item.taken else f"only {name} takes them"
            also = also if some else "you may create none"
            yield Check(item.title, "ok", f"the cluster runs them; {also}")
        elif not item.certain:
            yield Check(item.title, "warning", item.problem, item.fix)
        elif not running:
            yield Check(item.title, "missing", item.problem, item.fix)
        elif item.known:
            yield Check(item.title, "warning", f"{item.problem}; {name} would wait in vain", item.fix)
        else:
            yield Check(item.title, "ok", f"{item.problem}; {running[0].kind.title}s are enough")


def spared(seen: list[Found]) -> dict[str, str]:
    """Return the resources that no run needs unless the user names their kind, and words on it."""
    if not any(item.taken for item in seen):
        return {}
    return {item.kind.plural: f"only launcher={item.kind.name} needs it" for item in seen if not item.taken}


def _taken(cluster: Cluster, running: list[Kind]) -> Kind | None:
    """Return the kind that a new job becomes, as the launcher chooses; None where it may make none."""
    try:
        return Kinds(cluster, tuple(running)).of_new() if running else None
    except (ApiError, ConfigError):  # The check of the permissions says what is missing.
        return None


def runtime(cluster: Cluster, seen: list[Found]) -> Iterator[Check]:
    """Look for the runtime that TrainJobs refer to, where the cluster runs them.

    Args:
        cluster: the cluster and namespace.
        seen: what `look` found.
    """
    title = f"runtime {trainjob.SHARED}"
    for item in seen:
        if item.kind is not KINDS["trainjob"] or item.problem:
            continue
        place = (item.kind.group, item.kind.version, cluster.namespace, "trainingruntimes", trainjob.SHARED)
        try:
            there = cluster.call(
                "get", "trainingruntimes",
                partial(cluster.custom.get_namespaced_custom_object, *place), patience=_PATIENCE,
            )  # fmt: skip
        except ApiError as error:
            told = "is not there" if error.absent else f"not known: {error.message}"
            own = "; each job brings one of its own" if error.absent else ""
            yield Check(title, "warning", told + own, _apply(cluster) if error.absent else error.fix)
            continue
        if not job_objects.is_managed(there):
            yield Check(title, "warning",
                "was not made by kubedet; each job brings one of its own", "give that one another name",
            )  # fmt: skip
        elif not _holds(trainjob.shared_runtime()["spec"], there["spec"]):
            yield Check(title, "warning", "is not the one of this version", _apply(cluster))
        else:
            yield Check(title, "ok", "TrainJobs share it")


def _apply(cluster: Cluster) -> str:
    return f"kubectl apply -n {cluster.namespace} -f deploy/trainer/runtime.yaml"


def _holds(ours: Any, there: Any) -> bool:
    """Whether an object says all that ours says; the API server adds what is usual."""
    if isinstance(ours, dict):
        return isinstance(there, dict) and all(_holds(value, there.get(key)) for key, value in ours.items())
    if isinstance(ours, list):
        same = isinstance(there, list) and len(ours) == len(there)
        return same and all(map(_holds, ours, there))
    return bool(ours == there)
