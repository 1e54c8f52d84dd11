"""Hooks of optional features: entry points that are instances of `Hooks`. Steps work without them."""

import logging
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points

logger = logging.getLogger(__name__)

GROUP = "kubedet.hooks"  # Group of entry points.

FAILED, STOPPED, PASSED, HELD_BACK, NOTHING_NEW = EVENTS = (
    "failed", "stopped", "passed", "held back", "nothing new"
)  # fmt: skip
"""Outcomes of a run: a step failed or the run reached its deadline; a user stopped it; its model was
published; the gate refused it; there was no reason to train."""

DECIDED_OUTCOMES = (PASSED, HELD_BACK, NOTHING_NEW)
"""Outcomes that a step decides. It records outcome and reason, on separate lines, in its pod's status."""

TRAIN = "train"  # Returned by the step `download` if training follows; otherwise it returns NOTHING_NEW.


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    event: str  # One of EVENTS.
    run: str  # Name of the run folder; in the clean-up step the run's id, which ends that name.
    reason: str = ""  # The gate's lines, the error of the last step, or the unchanged version.
    model: str = ""  # Name of the model, if there is one.
    model_version: str = ""  # The published version, or the version since which no data changed.
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StepEnd:
    """The end of a step. Fields that do not concern the step are empty."""

    step: str
    outcome: Outcome | None = None  # Outcome of the run, if this step decides it.
    folder: str = ""  # URI of the folder that records sent notifications.
    data_root: str = ""
    keep_runs: int = 0  # Number of runs to keep; 0 keeps all.


class Hooks:
    """The interface of a feature that takes part in the steps of a run."""

    def on_step_end(self, end: StepEnd) -> None:
        """Process the end of a step. Errors are only logged."""


@cache
def _load_hooks() -> tuple[Hooks, ...]:
    found = sorted(entry_points(group=GROUP), key=lambda entry: entry.name)
    return tuple(entry.load() for entry in found)


def on_step_end(end: StepEnd) -> None:
    """Report the end of a step."""
    for each in _load_hooks():
        try:
            each.on_step_end(end)
        except Exception as error:  # The text of an error may contain a secret address.
            logger.warning("a hook failed at the end of the step %s: %s", end.step, type(error).__name__)
