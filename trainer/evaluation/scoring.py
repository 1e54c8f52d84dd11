"""All metrics and analyses of an evaluation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.evaluation import analysis, bootstrap, coco_metrics, engines, openimages_metric
from trainer.evaluation.analysis import Calibration, Confusion, OperatingPoint
from trainer.evaluation.box_matching import Matches, match
from trainer.evaluation.coco_metrics import CocoResult
from trainer.evaluation.metrics import OPEN_IMAGES, Compared
from trainer.evaluation.truth_and_predictions import Predictions, Truth, check_predictions


@dataclass(frozen=True)
class Scores:
    """Metrics, matches and analyses of a model's predictions of a split."""

    coco: CocoResult
    metrics: dict[str, float]
    """The twelve COCO numbers and oid/AP50, by name."""
    matches: Matches
    """At coco_metrics.IOU_THRESHOLDS."""
    points: dict[str, OperatingPoint]
    """By class."""
    f1: dict[str, np.ndarray]
    """F1 of each class over analysis.GRID."""
    calibration: Calibration
    tide: dict[str, tuple[float, int]] | None
    """Cost in AP and count of each kind of error; None with the evaluator pycocotools."""
    confusion: Confusion | None
    """None with the evaluator pycocotools."""

    def to_json(self) -> dict[str, Any]:
        return {
            "metrics": self.metrics,
            "per_class": self.coco.per_class,
            "thresholds": {name: point.threshold for name, point in self.points.items()},
        }


def score(dataset: Mapping[str, Any], truth: Truth, predictions: Predictions, engine: str) -> Scores:
    """Score predictions; raises as `coco_metrics.evaluate`. `dataset` is the truth in COCO's form."""
    result = coco_metrics.evaluate(truth, predictions, engine=engine)
    tide = confusion = None
    if engine == "hotcoco":
        evaluator = engines.evaluator(truth, predictions)
        tide = analysis.tide(evaluator)
        confusion = analysis.confusion(evaluator, score=analysis.SHOWN_SCORE)
        del evaluator  # It holds gigabytes.
    verified, ancestors = openimages_metric.image_labels(dataset)
    open_images = openimages_metric.evaluate(truth, predictions, verified=verified, ancestors=ancestors)
    matches = match(truth, predictions, coco_metrics.IOU_THRESHOLDS)
    return Scores(
        coco=result,
        metrics={**result.metrics, OPEN_IMAGES: open_images.average},
        matches=matches,
        points=analysis.operating_points(matches, truth.names),
        f1=analysis.f1_curves(matches, truth.names),
        calibration=analysis.calibration(matches),
        tide=tide,
        confusion=confusion,
    )


def compare(
    name: str, model: str, base: Predictions, truth: Truth, scores: Scores, *, samples: int
) -> Compared:
    """Compare with a baseline's predictions of the same images."""
    check_predictions(truth, base, "the baseline's detections")
    before = match(truth, base, coco_metrics.IOU_THRESHOLDS)
    changes = bootstrap.compare(before, scores.matches, truth.names, samples=samples)
    obstacle = "" if changes else f"it cannot be compared with the baseline {name}: no class has objects"
    return Compared(name, changes, samples, obstacle, model)
