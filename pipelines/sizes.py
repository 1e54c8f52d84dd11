"""Resource requests of the pods of the heavy steps: named sizes, and one for each source.

Too small a request packs steps onto a node that cannot hold them; one too large stays pending forever.
"""

from components.launchers import kubernetes_names
from trainer.base.errors import ConfigError

SIZES = {"small": ("500m", "2Gi"), "medium": ("2", "8Gi"), "large": ("6", "24Gi")}
"""Cores and memory, as Kubernetes writes them."""

DEFAULT = "small"
"""The size in the compiled file."""

_LARGE = ("coco:2017", "openimages:")
"""Sources of more than a hundred thousand images."""


def of_source(source: str) -> str:
    """Return the name of the size for the images of a source."""
    if source == "sample" or source.startswith("sample:"):
        return "small"
    return "large" if source.startswith(_LARGE) else "medium"


def request(size: str, cpu: str = "", memory: str = "") -> dict[str, str]:
    """Return the parameters of a named size; the given cores and memory replace its own."""
    cores, amount = SIZES[size]
    return {"step_cpu": cpu or cores, "step_memory": memory or amount}


def check(cpu: str, memory: str) -> None:
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
