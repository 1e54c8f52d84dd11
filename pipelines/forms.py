"""What of the pipeline is fixed when it is compiled, and so makes another file.

A parameter can be changed in the UI; these cannot, since Kubeflow Pipelines makes pods, loops and limits of
them before a run's parameters are known.
"""

from dataclasses import dataclass

from trainer.base.errors import ConfigError

PARALLELISM = 16
"""Trials that train at the same time, by default."""

ENDS = ("", "shards")
"""Where a pipeline may end: at its end, or when the data are ready."""


@dataclass(frozen=True)
class Form:
    """One form of the pipeline."""

    volume: bool = False
    """Every step mounts a PersistentVolumeClaim, whose name is the parameter `claim`."""
    partitions: int = 1
    """Pods that share download and sharding, 1 to `sharing.MOST`."""
    parallelism: int = PARALLELISM
    """Trials that train at the same time; 0 is no limit."""
    until: str = ""
    """The last thing that is made: "shards", or all of it."""
    conditional: bool = False
    """A run ends at once where fewer images are new than the parameter `min_new_images` says; that condition
    costs a pod."""
    trials: int = 0
    """Trials of a search for hyper-parameters, which then follows the data; 0: one training does."""
    gpus: int = 0
    """GPUs of each trial's pod. (Of a number that is a parameter Kubeflow makes nothing here.)"""
    deadline: int = 0
    """Seconds after which Kubeflow ends a run; 0 is no limit."""
    ttl: int = 0
    """Seconds after its end when a run's Workflow is deleted; 0 leaves it to the cluster."""

    def __post_init__(self) -> None:
        if self.partitions != 1:
            from components import sharing  # Imports libraries that commands do not need to start.

            sharing.check(self.partitions)
        problems = [
            f"{name} {value} is less than zero"
            for name, value in (
                ("parallelism", self.parallelism), ("deadline", self.deadline), ("ttl", self.ttl),
                ("trials", self.trials), ("gpus", self.gpus),
            )
            if value < 0
        ]  # fmt: skip
        if self.until not in ENDS:
            problems.append(f"until {self.until!r} is nowhere in the pipeline; it may be: {ENDS[1]}")
        if self.conditional and self.until:
            problems.append(f"conditional means nothing in a pipeline until {self.until}: it trains nothing")
        if self.trials and (self.until or self.conditional):
            other = f"until {self.until}" if self.until else "conditional"
            problems.append(f"{other} means nothing in a search, which trains trials")
        if self.parallelism != PARALLELISM and not self.trials:
            problems.append("parallelism means nothing without trials")
        if self.gpus and not self.trials:
            problems.append("gpus means nothing without trials: of a training it is a parameter")
        if problems:
            raise ConfigError("; ".join(problems), fix="correct these")
