"""Everything that an evaluation computes from predictions, each value once."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.evaluation import analysis, bootstrap, coco_metrics, engines, openimages_metric
from trainer.evaluation.analysis import Calibration, Confusion, OperatingPoint
from trainer.evaluation.box_matching import Matches, match
from trainer.evaluation.coco_metrics import CocoResult
from trainer.evaluation.metrics import OPEN_IMAGES, Change, Compared
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
    """Threshold with the best F1 of each class."""
    f1: dict[str, np.ndarray]
    """F1 of each class over analysis.GRID."""
    calibration: Calibration
    tide: dict[str, tuple[float, int]] | None
    """Cost in AP and count of each kind of error; None with the evaluator pycocotools."""
    confusion: Confusion | None
    """None with the evaluator pycocotools."""

    def to_json(self) -> dict[str, Any]:
        """Return the part of metrics.json that follows from the scores alone."""
        return {
            "metrics": self.metrics,
            "per_class": self.coco.per_class,
            "thresholds": {name: point.threshold for name, point in self.points.items()},
        }


def score(dataset: Mapping[str, Any], truth: Truth, predictions: Predictions, engine: str) -> Scores:
    """Score predictions against ground truth.

    Args:
        dataset: ground truth in COCO's form, for its image-level labels (openimages_metric.image_labels).
        truth: its boxes.
        predictions: predictions of its images.
        engine: one of engines.ENGINES.

    Raises:
        EvaluationError: ids, boxes or scores cannot be used; with their count and the first examples.
    """
    result = coco_metrics.evaluate(truth, predictions, engine=engine)
    tide = confusion = None
    if engine == "hotcoco":
        tide, confusion = _errors(truth, predictions)
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


def _errors(truth: Truth, predictions: Predictions) -> tuple[dict[str, tuple[float, int]], Confusion]:
    """TIDE errors and confusions, which only hotcoco computes; its gigabytes are freed afterwards."""
    evaluator = engines.evaluator(truth, predictions)
    return analysis.tide(evaluator), analysis.confusion(evaluator, score=analysis.SHOWN_SCORE)


def changes(truth: Truth, base: Predictions, scores: Scores, *, samples: int) -> dict[str, Change]:
    """Compare with a baseline's predictions of the same images.

    Args:
        truth: ground truth.
        base: the baseline's predictions.
        scores: of the model.
        samples: bootstrap samples.

    Returns:
        The change of coco/AP, coco/AP50 and of AP[class] for each class with objects; empty where
        none has.

    Raises:
        EvaluationError: the baseline's predictions are not of these images and classes.
    """
    check_predictions(truth, base, "the baseline's detections")
    before = match(truth, base, coco_metrics.IOU_THRESHOLDS)
    comparison = bootstrap.compare(before, scores.matches, truth.names, samples=samples)
    of_classes = {f"AP[{name}]": change for name, change in comparison.per_class.items()}
    if not of_classes:
        return {}
    return {"coco/AP": comparison.overall, "coco/AP50": comparison.at_half, **of_classes}


def compare(
    name: str, model: str, base: Predictions, truth: Truth, scores: Scores, *, samples: int
) -> Compared:
    """Compare with a baseline's predictions, as `changes`; if no class has objects, that is the obstacle.

    Args:
        name: the baseline, for people.
        model: its URI.
        base: its predictions.
        truth: ground truth.
        scores: of the model.
        samples: bootstrap samples.
    """
    found = changes(truth, base, scores, samples=samples)
    obstacle = "" if found else f"it cannot be compared with the baseline {name}: no class has objects"
    return Compared(name, found, samples, obstacle, model)
