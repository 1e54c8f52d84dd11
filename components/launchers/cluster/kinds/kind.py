"""Interface of a kind of training job; the rest of the launcher names no kind."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from components.launchers.backend import Phase
from components.launchers.pod_template import Body
from components.launchers.spec import JobSpec
from trainer.launching.job_status import Progress

Exists = Callable[[str, str], bool]
"""Whether the namespace has an object of kubedet's: by resource (of the kind's group) and name."""


class Resource(NamedTuple):
    """Where the API server has objects of a type that no client has a class for."""

    group: str
    version: str
    plural: str


@dataclass(frozen=True)
class Standing:
    """A job's state according to its conditions."""

    phase: Phase | None = None
    """Its end or suspension; None leaves it to the pods."""
    reason: str = ""
    """One word on why."""
    message: str = ""
    """A sentence on why."""
    restarting: bool = False
    """Whether its controller says that it recreates pods."""


class Kind(Protocol):
    """One kind of training job. Methods with a body are defaults."""

    name: str
    """What users call it: pytorchjob."""
    title: str
    """What the cluster calls it: PyTorchJob."""
    controller: str
    """Who makes its pods, in words."""
    group: str
    version: str
    plural: str
    pod_label: str
    """Label of a pod that names its job."""
    attempt_label: str = ""
    """Label of a pod that counts the pods before it in its place; empty if there is none."""

    @property
    def resource(self) -> Resource:
        """Where the API server has the jobs."""
        return Resource(self.group, self.version, self.plural)

    def manifests(self, job: JobSpec, exists: Exists) -> list[Body]:
        """Return what is created for a job with an image: the job last, after what it refers to."""
        ...

    def problems(self, manifests: list[Body]) -> list[str]:
        """Return what the controller would refuse or overwrite, a line for each problem."""
        return []

    def left_out(self, job: JobSpec) -> list[str]:
        """Return the fields of a job that this kind does not support."""
        return []

    def probe(self) -> Body:
        """Return a small job: sent as a dry run, it shows whether the controller answers."""
        ...

    def rank(self, job: Body, labels: Mapping[str, str]) -> int:
        """Return the number of a pod's node, from 0, by the pod's labels."""
        ...

    def nodes(self, job: Body) -> int:
        """Return how many pods a job asks for."""
        ...

    def bounds(self, job: Body) -> tuple[int, int] | None:
        """Return the fewest and most nodes of an elastic job; None if their number is fixed."""
        ...

    def standing(self, job: Body) -> Standing:
        """Return a job's state according to its conditions."""
        ...

    def progress(self, job: Body) -> Progress | None:
        """Return the training's progress, if the job's status reports it."""
        return None

    def event_objects(self, name: str) -> tuple[tuple[str, str], ...]:
        """Return the objects whose events concern a job: kind and name of each."""
        return ((self.title, name),)


def holding(job: Body) -> dict[str, Body]:
    """Return the conditions of a job whose status is True, by type."""
    conditions = (job.get("status") or {}).get("conditions") or []
    return {item["type"]: item for item in conditions if item.get("status") == "True"}


def by_condition(conditions: Mapping[str, Body], phases: Mapping[str, Phase | None]) -> Standing | None:
    """Return a job's state by the first of these condition types that is True."""
    for name, phase in phases.items():
        if condition := conditions.get(name):
            return Standing(
                phase, condition.get("reason") or "", condition.get("message") or "", restarting=phase is None
            )
    return None
