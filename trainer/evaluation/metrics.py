"""Names and meanings of the metrics, and their changes between two models. Imports only light modules."""

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from typing import Any

SUMMARY = "metrics.json"  # file of an evaluation's results; written last

METRICS = {
    "coco/AP": "mean over IoU 0.50 to 0.95",
    "coco/AP50": "at IoU 0.50",
    "coco/AP75": "at IoU 0.75",
    "coco/APs": "small objects, below 32 x 32 px",
    "coco/APm": "medium objects",
    "coco/APl": "large objects, above 96 x 96 px",
    "coco/AR1": "recall with 1 detection per image",
    "coco/AR10": "recall with 10 detections per image",
    "coco/AR100": "recall with 100 detections per image",
    "coco/ARs": "recall of small objects",
    "coco/ARm": "recall of medium objects",
    "coco/ARl": "recall of large objects",
}
"""The twelve COCO numbers in pycocotools' order, with their meaning."""

OPEN_IMAGES = "oid/AP50"  # the metric that follows the Open Images Challenge

PER_CLASS = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR100")  # metrics of each class

VERDICTS = BETTER, WORSE, NOT_SURE, TOO_FEW = "better", "worse", "not sure", "too few to tell"

MIN_IMAGES = 10
"""Minimum number of images with boxes for a verdict. With fewer, bootstrap intervals are too narrow."""


@dataclass(frozen=True)
class Change:
    """A change of average precision between two models, with its 95 % confidence interval."""

    base: float
    new: float
    low: float
    high: float
    verdict: str = NOT_SURE

    @property
    def delta(self) -> float:
        return self.new - self.base


@dataclass(frozen=True)
class BaselineComparison:
    """The comparison of a model with a baseline."""

    name: str  # the baseline's name
    changes: Mapping[str, Change] = field(default_factory=dict)
    """Changes of coco/AP, coco/AP50 and AP[class], from bootstrap.compare; empty if there is an obstacle."""
    samples: int = 0
    obstacle: str = ""  # reason why there is no comparison
    model: str = ""  # URI of the baseline

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> "BaselineComparison":
        """Read `comparison` of metrics.json."""
        changes = {name: Change(*values) for name, values in record["changes"].items()}
        return cls(
            record["baseline"], changes, record["samples"], record["obstacle"], record.get("model", "")
        )

    def to_dict(self) -> dict[str, object]:
        changes = {name: list(astuple(change)) for name, change in self.changes.items()}
        return {
            "baseline": self.name,
            "model": self.model,
            "obstacle": self.obstacle,
            "samples": self.samples,
            "changes": changes,
        }


def format_verdict_counts(changes: Mapping[str, Change]) -> str:
    """Format the number of classes with each verdict: `2 better, 0 worse, 5 not sure, 1 too few to tell`."""
    found = [change.verdict for name, change in changes.items() if name.startswith("AP[")]
    return ", ".join(f"{found.count(verdict)} {verdict}" for verdict in VERDICTS)
