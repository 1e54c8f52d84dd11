"""The progress of a training as lines of its log: how they are written, and how they are parsed.

The training writes these lines with the functions here; observers of a job read them with `parse`. The
status of a TrainJob shows the same (see job_status_reporter.py).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.base import log

TASK, UNIT = "train", "steps"
"""Task and unit of the training's progress lines."""
LOSS, SPEED, AP = "loss", "images_per_second", "coco/AP"
"""Names of the metrics, as in metrics.jsonl."""
_SCORES = (AP, "coco/AP50")
_MEASURED = re.compile(r"loss (?P<loss>\S+), (?P<speed>\d+) images/s$")
_SCORED = re.compile(rf"epoch \d+: {AP} (?P<ap>\d+\.\d+), ")
_RESUMED = re.compile(r"resumed at step (?P<done>\d+) of (?P<total>\d+): ")


@dataclass(frozen=True)
class Progress:
    """The progress of a training."""

    percent: int
    """Of all its steps, those of earlier runs included: 0 to 100."""
    remaining_seconds: int | None = None
    """To its end at the rate of late; None where that is not known yet."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The newest of LOSS, SPEED and AP, as far as there are any."""


def percent(done: int, total: int) -> int:
    """The share of steps that are done: 100 with the last one, not before."""
    return min(100 * done // max(total, 1), 100)


def measured(loss: float, speed: float) -> str:
    """Write loss and images a second for the note of the progress line."""
    return f"loss {loss:.3f}, {speed:.0f} images/s"


def scored(epoch: int, metrics: Mapping[str, float]) -> str:
    """Write the log line of a validation's scores."""
    return f"epoch {epoch}: " + ", ".join(f"{name} {metrics[name]:.3f}" for name in _SCORES)


def resumed(step: int, steps: int, images: int, processes: int) -> str:
    """Write the log line of a training that resumes."""
    return f"resumed at step {step} of {steps}: {images} images a step on {processes} processes"


def parse(lines: Sequence[str]) -> Progress | None:
    """Parse the progress of a training from the last lines of its log.

    Args:
        lines: of the process that has rank 0, whatever stands before them in each, and any others between.

    Returns:
        The newest of each number, or None where no line tells of steps.
    """
    place: tuple[int, float | None] | None = None
    metrics: dict[str, float] = {}
    for line in reversed(lines):
        event = log.parse(line)
        if event and (event["task"], event["unit"]) == (TASK, UNIT):
            place = place or _place(event)
            if match := _MEASURED.search(event["note"]):
                metrics.setdefault(LOSS, float(match["loss"]))
                metrics.setdefault(SPEED, float(match["speed"]))
        elif match := _RESUMED.search(line):
            place = place or (percent(int(match["done"]), int(match["total"])), None)
        elif match := _SCORED.search(line):
            metrics.setdefault(AP, float(match["ap"]))
        if place and len(metrics) == 3:
            break
    if place is None:
        return None
    seconds = None if place[1] is None else round(place[1])
    return Progress(place[0], seconds, {name: metrics[name] for name in (LOSS, SPEED, AP) if name in metrics})


def _place(event: dict[str, Any]) -> tuple[int, float | None]:
    done, total = event["done"], event["total"]
    return percent(done, total), 0.0 if done >= total else event["eta"]
