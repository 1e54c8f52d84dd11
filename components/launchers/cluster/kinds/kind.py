"""What the launcher must know of a kind of training job; nothing else in it names one."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from components.launchers.backend import Phase
from components.launchers.spec import JobSpec
from trainer.job_status import Progress

Body = dict[str, Any]
"""An object of the cluster, as it stands in YAML."""
Look = Callable[[str, str], bool]
"""Tells whether the namespace has an object of kubedet's: of a resource of the kind's group, by name."""


@dataclass(frozen=True)
class Standing:
    """Where a job stands by its own conditions."""

    phase: Phase | None = None
    """Its end or suspension; None leaves it to the pods."""
    reason: str = ""
    """One word on why."""
    message: str = ""
    """A sentence on why."""
    restarting: bool = False
    """Whether its controller says that pods are made anew."""


class Kind(Protocol):
    """One kind of training job."""

    name: str
    """What users call it: pytorchjob."""
    title: str
    """What the cluster calls it: PyTorchJob."""
    controller: str
    """Who makes its pods, in words."""
    group: str
    version: str
    plural: str
    """Where the API server has it."""
    pod_label: str
    """Label of a pod that names its job."""
    attempt_label: str = ""
    """Label of a pod that counts those before it in its place; empty where there is none."""

    def manifests(self, job: JobSpec, there: Look) -> list[Body]:
        """Return what is created for a job: first what the job refers to, the job itself last.

        Args:
            job: the job; its image must be named.
            there: looks for what a job may refer to, and which somebody made before.
        """
        ...

    def problems(self, manifests: list[Body]) -> list[str]:
        """Return what the cluster would refuse of them, or pass over in silence."""
        ...

    def left_out(self, job: JobSpec) -> list[str]:
        """Return the fields of a job that say more than this kind can do."""
        ...

    def probe(self) -> Body:
        """Return a small job: sent as a dry run, it shows whether the controller answers."""
        ...

    def rank(self, job: Body, labels: Mapping[str, str]) -> int:
        """Return the number of a pod's node, from 0, by the pod's labels."""
        ...

    def nodes(self, job: Body) -> int:
        """Return how many pods a job asks for."""
        ...

    def needed(self, job: Body) -> int:
        """Return how many pods must run for the job to run."""
        ...

    def elastic(self, job: Body) -> bool:
        """Whether nodes may come and go, and any of them be rank 0."""
        ...

    def standing(self, job: Body) -> Standing:
        """Return where a job stands by its own conditions."""
        ...

    def progress(self, job: Body) -> Progress | None:
        """Return how far the training is, where the job's own status says so."""
        ...

    def tell_of(self, name: str) -> tuple[tuple[str, str], ...]:
        """Return the objects whose events tell of a job: kind and name of each."""
        ...

    def last_exit(self, messages: Iterable[str], pod: str) -> str:
        """Return how the pod before one of the same place ended, from the job's events; or nothing."""
        ...


def holding(job: Body) -> dict[str, Body]:
    """Return the conditions of a job that hold, by type."""
    conditions = (job.get("status") or {}).get("conditions") or []
    return {item["type"]: item for item in conditions if item.get("status") == "True"}


def by_condition(conditions: Mapping[str, Body], phases: Mapping[str, Phase]) -> Standing | None:
    """Return where a job stands by the first of some conditions that holds."""
    for name, phase in phases.items():
        if name in conditions:
            found = conditions[name]
            return Standing(phase, found.get("reason") or "", found.get("message") or "")
    return None
