"""The specification of a training job, the same for every launcher."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from trainer.errors import ConfigError


@dataclass(frozen=True)
class JobSpec:
    """What to run and on how many processes. A plain value: building one starts nothing."""

    arguments: tuple[str, ...]
    """Verb and arguments of `python -m trainer` that every process runs."""
    nodes: int = 1
    """Machines."""
    nproc: int = 1
    """Processes on each machine."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables besides the launcher's own."""
    grace_seconds: float = 60.0
    """How long a job that was asked to stop may take to save its checkpoint."""

    def __post_init__(self) -> None:
        problems = [
            f"  {name}: must be 1 or more, not {value}"
            for name, value in (("nodes", self.nodes), ("nproc", self.nproc))
            if value < 1
        ]
        if not self.arguments:
            problems.append("  arguments: must name a verb of `python -m trainer`")
        if problems:
            raise ConfigError(
                "the training job cannot be started:\n" + "\n".join(problems), fix="correct these values"
            )
