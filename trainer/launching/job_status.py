"""The progress of a training in its log: writing the lines, and parsing them for observers of a job."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trainer.base import log

TASK, UNIT = "train", "steps"
"""Task and unit of the training's progress lines."""
LOSS, SPEED, AP = "loss", "images_per_second", "coco/AP"
"""Names of the metrics, as in metrics.jsonl."""
_SCORES = (AP, "coco/AP50")
_LOSS_LINE = re.compile(r"loss (?P<loss>\S+), (?P<speed>\d+) images/s$")
_SCORES_LINE = re.compile(rf"epoch \d+: {AP} (?P<ap>\d+\.\d+), ")
_RESUMED_LINE = re.compile(r"resumed at step (?P<done>\d+) of (?P<total>\d+): ")


@dataclass(frozen=True)
class Progress:
    """The progress of a training."""

    percent: int  # share of all its steps, including those of earlier processes: 0 to 100
    remaining_seconds: int | None = None  # to the end at the current rate; None if unknown
    metrics: dict[str, float] = field(default_factory=dict)  # the newest of LOSS, SPEED and AP, if known


def percent(done: int, total: int) -> int:
    """Return the share of steps that are done: 100 only with the last one."""
    return min(100 * done // max(total, 1), 100)


def measured(loss: float, speed: float) -> str:
    """Return the note of the progress line."""
    return f"loss {loss:.3f}, {speed:.0f} images/s"


def scored(epoch: int, metrics: Mapping[str, float]) -> str:
    """Return the log line of a validation."""
    return f"epoch {epoch}: " + ", ".join(f"{name} {metrics[name]:.3f}" for name in _SCORES)


def resumed(step: int, steps: int, images: int, processes: int) -> str:
    """Return the log line of a resumed training."""
    return f"resumed at step {step} of {steps}: {images} images a step on {processes} processes"


def parse(lines: Sequence[str]) -> Progress | None:
    """Parse the newest numbers in the last lines of a training's log; None if no line contains steps.

    Lines may have prefixes, and other lines may be between them.
    """
    place: tuple[int, float | None] | None = None
    metrics: dict[str, float] = {}
    for line in reversed(lines):
        event = log.parse(line)
        if event and (event["task"], event["unit"]) == (TASK, UNIT):
            if place is None:
                done, total = event["done"], event["total"]
                place = percent(done, total), 0.0 if done >= total else event["eta"]
            if match := _LOSS_LINE.search(event["note"]):
                metrics.setdefault(LOSS, float(match["loss"]))
                metrics.setdefault(SPEED, float(match["speed"]))
        elif match := _RESUMED_LINE.search(line):
            place = place or (percent(int(match["done"]), int(match["total"])), None)
        elif match := _SCORES_LINE.search(line):
            metrics.setdefault(AP, float(match["ap"]))
        if place and len(metrics) == 3:
            break
    if place is None:
        return None
    seconds = None if place[1] is None else round(place[1])
    return Progress(place[0], seconds, {name: metrics[name] for name in (LOSS, SPEED, AP) if name in metrics})
