"""Hooks of optional features: entry points with instances of `Hooks`. Steps work without any of them."""

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

DECIDED = (PASSED, HELD_BACK, NOTHING_NEW)
"""Outcomes that a step decides, and records in its pod's status (`steps.record`): event, line end, reason."""

TRAIN = "train"  # What the step `download` returns if a training follows; otherwise it returns NOTHING_NEW.


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    event: str  # One of EVENTS.
    run: str  # The name of its folder; in the clean-up its id, with which that name ends.
    reason: str = ""  # The gate's lines, the last step's error, or since which version nothing is new.
    model: str = ""  # Name of the model, if there is one.
    model_version: str = ""  # The published version, or the one since which nothing is new.
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StepEnd:
    """The end of a step. Fields that do not concern the step are empty."""

    step: str
    outcome: Outcome | None = None  # Outcome of the run, if this step decides it.
    folder: str = ""  # URI of the folder that records which notices were sent.
    data_root: str = ""
    keep_runs: int = 0  # How many runs are to be kept now; 0 keeps all.


class Hooks:
    """What a feature does in the steps of a run."""

    def at_end(self, end: StepEnd) -> None:
        """Process the end of a step. Errors are only logged."""


@cache
def _registered() -> tuple[Hooks, ...]:
    found = sorted(entry_points(group=GROUP), key=lambda entry: entry.name)
    return tuple(entry.load() for entry in found)


def at_end(end: StepEnd) -> None:
    """Report the end of a step."""
    for each in _registered():
        try:
            each.at_end(end)
        except Exception as error:  # The text of an error may contain a secret address.
            logger.warning("a hook failed at the end of the step %s: %s", end.step, type(error).__name__)
