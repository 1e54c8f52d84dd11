"""Checks of the pipeline's parameters."""

from collections.abc import Callable
from typing import Any, TypeAlias

from components.launchers.kubernetes_names import check_quantity, parse_quantity
from trainer.base.errors import ConfigError, KubedetError

Values: TypeAlias = dict[str, Any]
"""Values of the pipeline's parameters, or of a recipe's keys, by name."""

SMALL, MEDIUM, LARGE = ("500m", "2Gi"), ("2", "8Gi"), ("6", "24Gi")
"""Cores and memory that the pods of the heavy steps request: for the sample (and in the compiled file), for a
source of usual size, and for more than a hundred thousand images. If a request is too small, a node gets more
steps than it can hold; if it is too large, the pod stays pending."""


def check_sizes(cpu: str, memory: str) -> None:
    """Raise ConfigError for cores and memory that Kubernetes does not accept, or that are too small."""
    problems = []
    for name, text, least in (("step_cpu", cpu, "10m"), ("step_memory", memory, "64Mi")):
        try:
            if parse_quantity(check_quantity(text)) < parse_quantity(least):
                raise ValueError(f"{text!r} is less than {least}")
        except ValueError as error:
            problems.append(f"{name}: {error}")
    if problems:
        raise ConfigError("\n".join(problems), fix="e.g. step_cpu 500m or 4, step_memory 8Gi")


def check_all(*checks: Callable[[], object]) -> None:
    """Call every check and collect the KubedetErrors; raise one error with all problems."""
    problems: list[str] = []
    for check in checks:
        try:
            check()
        except KubedetError as error:
            lines = error.message.splitlines()
            if len(lines) > 1 and lines[1].startswith("  "):
                problems += lines[1:]  # Without the heading.
            else:
                lines[-1] += f"; {error.fix}" if error.fix else ""
                problems += [f"  {line}" for line in lines]
    if problems:
        raise ConfigError("these settings cannot be used:\n" + "\n".join(problems), fix="correct these")
