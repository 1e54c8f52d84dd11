"""Checks which kinds of training jobs a cluster runs, and the shared runtime of TrainJobs."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from components.launchers.cluster import job_objects
from components.launchers.cluster.client import ApiError, Cluster
from components.launchers.cluster.job_objects import Kinds
from components.launchers.cluster.kinds import KINDS, trainjob
from components.launchers.cluster.kinds.kind import Kind
from trainer.base.errors import ConfigError
from trainer.launching.doctor import Check

_PATIENCE = 5.0


@dataclass(frozen=True)
class KindState:
    """The state of a kind of jobs in a cluster."""

    kind: Kind
    known: bool = True
    """Whether its resource is installed, or that is unknown."""
    problem: str = ""
    """Why its jobs would not run; nothing where they would."""
    fix: str = ""
    """What to do about it."""
    certain: bool = True
    """Whether that is certain: the cluster has answered."""
    chosen: bool = False
    """Whether a new job becomes one, unless the user names a kind."""

    @property
    def title(self) -> str:
        """The kind and its controller, without the controller's version."""
        return f"{self.kind.title}s ({self.kind.controller.removeprefix('the ').partition(' (')[0]})"


def look(cluster: Cluster) -> list[KindState]:
    """Ask for the jobs of every kind, as the launcher does, and whether anybody would run a new one."""
    states = [_look(cluster, kind) for kind in KINDS.values()]
    chosen = _chosen(cluster, [item.kind for item in states if not item.problem])
    return [replace(item, chosen=item.kind is chosen) for item in states]


def _look(cluster: Cluster, kind: Kind) -> KindState:
    try:
        cluster.call("list", kind.plural, lambda: _list(cluster, kind), patience=_PATIENCE)
        problem = Kinds(cluster, (kind,)).trouble(kind)
    except ApiError as error:
        if error.unknown and "namespaces" not in error.message:
            return KindState(kind, False, "the cluster does not know them", f"install {kind.controller}")
        return KindState(kind, True, f"not known: {error.message}", error.fix, certain=False)
    return KindState(
        kind, True, problem, f"look at the pods and logs of {kind.controller}" if problem else ""
    )


def _list(cluster: Cluster, kind: Kind) -> Any:
    place = (kind.group, kind.version, cluster.namespace, kind.plural)
    return cluster.custom.list_namespaced_custom_object(*place, limit=1)


def checks(states: list[KindState]) -> Iterator[Check]:
    """Yield a check for each kind; one kind is enough, and the one of a new job is named.

    Args:
        states: what `look` returned.
    """
    running = [item for item in states if not item.problem]
    creatable = any(item.chosen for item in states)
    for item in states:
        name = f"launcher={item.kind.name}"
        if item in running:
            also = "launcher=kubernetes takes them" if item.chosen else f"only {name} takes them"
            also = also if creatable else "you may create none"
            yield Check(item.title, "ok", f"the cluster runs them; {also}")
        elif not item.certain:
            yield Check(item.title, "warning", item.problem, item.fix)
        elif not running:
            yield Check(item.title, "missing", item.problem, item.fix)
        elif item.known:
            yield Check(item.title, "warning", f"{item.problem}; {name} would wait in vain", item.fix)
        else:
            yield Check(item.title, "ok", f"{item.problem}; {running[0].kind.title}s are enough")


def spared(states: list[KindState]) -> dict[str, str]:
    """Return the resources that runs only need where the user names their kind, each with a note."""
    if not any(item.chosen for item in states):
        return {}
    return {
        item.kind.plural: f"only launcher={item.kind.name} needs it" for item in states if not item.chosen
    }


def _chosen(cluster: Cluster, running: list[Kind]) -> Kind | None:
    """Return the kind that a new job becomes, as the launcher chooses; None where it may make none."""
    try:
        return Kinds(cluster, tuple(running)).of_new() if running else None
    except (ApiError, ConfigError):  # The check of the permissions says what is missing.
        return None


def runtime(cluster: Cluster, states: list[KindState]) -> Iterator[Check]:
    """Check the shared runtime of TrainJobs, where the cluster runs them.

    Args:
        cluster: the cluster and namespace.
        states: what `look` returned.
    """
    title = f"runtime {trainjob.SHARED}"
    for item in states:
        if item.kind is not KINDS["trainjob"] or item.problem:
            continue
        place = (item.kind.group, item.kind.version, cluster.namespace, "trainingruntimes", trainjob.SHARED)
        try:
            existing = cluster.call(
                "get", "trainingruntimes",
                partial(cluster.custom.get_namespaced_custom_object, *place), patience=_PATIENCE,
            )  # fmt: skip
        except ApiError as error:
            detail = "is not there" if error.absent else f"not known: {error.message}"
            own = "; each job brings one of its own" if error.absent else ""
            yield Check(title, "warning", detail + own, _apply(cluster) if error.absent else error.fix)
            continue
        if not job_objects.is_managed(existing):
            yield Check(title, "warning",
                "was not made by kubedet; each job brings one of its own", "give that one another name",
            )  # fmt: skip
        elif not _holds(trainjob.shared_runtime()["spec"], existing["spec"]):
            yield Check(title, "warning", "is not the one of this version", _apply(cluster))
        else:
            yield Check(title, "ok", "TrainJobs share it")


def _apply(cluster: Cluster) -> str:
    return f"kubectl apply -n {cluster.namespace} -f deploy/trainer/runtime.yaml"


def _holds(expected: Any, actual: Any) -> bool:
    """Whether an object has all fields of the expected one; the API server adds defaults."""
    if isinstance(expected, dict):
        return isinstance(actual, dict) and all(
            _holds(value, actual.get(key)) for key, value in expected.items()
        )
    if isinstance(expected, list):
        same = isinstance(actual, list) and len(expected) == len(actual)
        return same and all(map(_holds, expected, actual))
    return bool(expected == actual)
