"""The progress of a training run, read from the events in its log."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from trainer.base import events

TASK, UNIT = "train", "steps"
"""Task and unit of a training run's progress events."""
LOSS, SPEED, AP = "loss", "images_per_second", "coco/AP"
"""Names of the metrics, as in metrics.jsonl."""


@dataclass(frozen=True)
class TrainingProgress:
    """The progress of a training run, as shown to users."""

    percent: int  # completed steps in percent, including steps before a restart
    remaining_seconds: int | None = None  # estimated from the current rate; None if unknown
    metrics: dict[str, float] = field(default_factory=dict)  # the newest of LOSS, SPEED and AP, if known


def percent(done: int, total: int) -> int:
    """Return the percentage of completed steps, rounded down."""
    return min(100 * done // max(total, 1), 100)


def read_progress(lines: Iterable[str]) -> TrainingProgress | None:
    """Return the latest progress from the events in a training log; None if there is none."""
    share, seconds, metrics = None, None, dict[str, float]()
    for event in events.parse_lines(lines):
        if isinstance(event, events.Progress) and (event.task, event.unit) == (TASK, UNIT):
            eta = 0.0 if event.done >= (event.total or 0) else event.eta
            share, seconds = percent(event.done, event.total or 0), None if eta is None else round(eta)
            metrics |= event.metrics
        elif isinstance(event, events.TrainingResumed):
            share, seconds = percent(event.step, event.steps), None
        elif isinstance(event, events.ValidationScored) and AP in event.metrics:
            metrics[AP] = event.metrics[AP]
    if share is None:
        return None
    return TrainingProgress(
        share, seconds, {name: metrics[name] for name in (LOSS, SPEED, AP) if name in metrics}
    )
