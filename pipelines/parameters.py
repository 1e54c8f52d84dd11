"""The pipeline's compile options, and checks of its parameters."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from components.launchers import kubernetes_names
from trainer.base.errors import ConfigError, KubedetError

Values: TypeAlias = dict[str, Any]
"""Values of the pipeline's parameters, or of a recipe's keys, by name."""

PARALLELISM = 16  # Default number of trials that train at the same time.

SMALL, MEDIUM, LARGE = ("500m", "2Gi"), ("2", "8Gi"), ("6", "24Gi")
"""Cores and memory that the pods of the heavy steps request: of the sample (and in the compiled file), of
a source of usual size, and of one with more than a hundred thousand images. Too small a request packs steps
onto a node that cannot hold them; one too large stays pending forever."""


@dataclass(frozen=True)
class CompileOptions:
    """Settings for pods, loops and limits, which Kubeflow creates before the parameters are known."""

    volume: bool = False  # Every step mounts the PersistentVolumeClaim that the parameter `claim` names.
    parallelism: int = PARALLELISM  # Trials that train at the same time; 0 is no limit.
    until: str = ""  # "shards" ends the pipeline when the data are ready; empty runs all steps.
    conditional: bool = False
    """Skip training if fewer images changed than `min_new_images`. The condition costs a pod."""
    trials: int = 0  # Trials of a search for hyper-parameters, in place of one training; 0 is no search.
    gpus: int = 0  # GPUs of each trial's pod. (kfp ignores a number that is a parameter here.)
    deadline: int = 0  # Seconds after which Kubeflow ends a run; 0 is no limit.
    ttl: int = 0  # Seconds after its end when a run's Workflow is deleted; 0 leaves it to the cluster.

    def __post_init__(self) -> None:
        limits = ("parallelism", "deadline", "ttl", "trials", "gpus")
        problems = [f"{key} {value} is less than zero" for key in limits if (value := getattr(self, key)) < 0]
        if self.until not in ("", "shards"):
            problems.append(f"until {self.until!r} is not a step to end at; use shards")
        if self.conditional and self.until:
            problems.append(f"conditional has no effect until {self.until}: no training follows")
        if self.trials and (self.until or self.conditional):
            other = f"until {self.until}" if self.until else "conditional"
            problems.append(f"{other} cannot be combined with a search, which trains trials")
        if self.parallelism != PARALLELISM and not self.trials:
            problems.append("parallelism has no effect without trials")
        if self.gpus and not self.trials:
            problems.append("gpus has no effect without trials: for a training it is a parameter")
        if problems:
            raise ConfigError("; ".join(problems), fix="correct these")


def check_sizes(cpu: str, memory: str) -> None:
    """Raise ConfigError for cores and memory that Kubernetes does not accept, or that are too small."""
    problems = []
    for name, text, least in (("step_cpu", cpu, "10m"), ("step_memory", memory, "64Mi")):
        try:
            if kubernetes_names.amount(kubernetes_names.quantity(text)) < kubernetes_names.amount(least):
                raise ValueError(f"{text!r} is less than {least}")
        except ValueError as error:
            problems.append(f"{name}: {error}")
    if problems:
        raise ConfigError("\n".join(problems), fix="e.g. step_cpu 500m or 4, step_memory 8Gi")


def check_all(*checks: Callable[[], object]) -> None:
    """Make every check, which raises a KubedetError if it finds a problem; raise one with all problems."""
    problems: list[str] = []
    for check in checks:
        try:
            check()
        except KubedetError as error:
            lines = error.message.splitlines()
            if len(lines) > 1 and lines[1].startswith("  "):
                problems += lines[1:]  # Without its heading.
            else:
                lines[-1] += f"; {error.fix}" if error.fix else ""
                problems += [f"  {line}" for line in lines]
    if problems:
        raise ConfigError("these settings cannot be used:\n" + "\n".join(problems), fix="correct these")
