"""All metrics and analyses of an evaluation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.evaluation import bootstrap, coco, engines, openimages_metric
from trainer.evaluation.box_matching import BoxMatches, match_boxes
from trainer.evaluation.coco import CocoResult
from trainer.evaluation.metrics import OPEN_IMAGES, BaselineComparison
from trainer.evaluation.truth_and_predictions import Predictions, Truth, check_boxes

MIN_SHOWN_SCORE = 0.3
"""Detections below this score are left out of the confusion matrix and of the report's gallery."""


@dataclass(frozen=True)
class OperatingPoint:
    """The score threshold with the best F1 at IoU 0.5."""

    threshold: float
    f1: float


@dataclass(frozen=True)
class ConfusionMatrix:
    """A matrix [C, C]: rows are true classes, columns predicted classes; `background` is the last of both."""

    class_names: list[str]
    counts: np.ndarray

    def top_classes(self, count: int = 20) -> "ConfusionMatrix":
        """Return the matrix of the `count` most frequent classes; `other` combines the rest."""
        classes = len(self.class_names) - 1
        by_size = np.argsort(-self.counts[:classes].sum(axis=1), kind="stable")
        named = by_size if classes <= count + 1 else by_size[:count]
        titles = [self.class_names[place] for place in named]
        group = np.full(classes + 1, len(named))
        group[named] = np.arange(len(named))
        if len(named) < classes:
            titles.append(f"other ({classes - len(named)})")
        group[classes] = len(titles)
        titles.append(self.class_names[classes])
        small = np.zeros((len(titles), len(titles)), np.int64)
        np.add.at(small, (group[:, None], group[None, :]), self.counts)
        return ConfusionMatrix(titles, small)


@dataclass(frozen=True)
class Scores:
    """Metrics, matches and analyses of a model's predictions of a split."""

    coco: CocoResult
    metrics: dict[str, float]  # the twelve COCO numbers and oid/AP50, by name
    matches: BoxMatches  # at coco.IOU_THRESHOLDS
    operating_points: dict[str, OperatingPoint]  # of each class with objects and predictions
    confusion: ConfusionMatrix | None  # matched at IoU 0.5 across classes; None with pycocotools

    def to_dict(self) -> dict[str, object]:
        return {
            "metrics": self.metrics,
            "per_class": self.coco.per_class,
            "thresholds": {name: point.threshold for name, point in self.operating_points.items()},
        }


def score(dataset: Mapping[str, Any], truth: Truth, predictions: Predictions, engine: str) -> Scores:
    """Score predictions. Raises the errors of `coco.evaluate`; `dataset` is the truth in COCO's format."""
    result = coco.evaluate(truth, predictions, engine=engine)
    confusion = None
    if engine == "hotcoco":
        evaluator = engines.hotcoco_evaluator(truth, predictions)
        matrix = evaluator.confusion_matrix(iou_thr=0.5, min_score=MIN_SHOWN_SCORE)
        confusion = ConfusionMatrix([*matrix["cat_names"], "background"], matrix["matrix"].astype(np.int64))
        del evaluator  # frees gigabytes of memory
    verified, ancestors = openimages_metric.read_image_labels(dataset)
    open_images, _ = openimages_metric.evaluate(truth, predictions, verified=verified, ancestors=ancestors)
    metrics = {**result.metrics, OPEN_IMAGES: open_images}
    matches = match_boxes(truth, predictions, coco.IOU_THRESHOLDS)
    points = {}
    for place, name in enumerate(truth.class_names):
        if not (objects := len(matches.image_of_each_object(place))):
            continue
        rows = matches.class_rows(place)
        counted = ~matches.ignored[rows, 0]
        scores = matches.scores[rows][counted]
        correct = np.r_[0, np.cumsum(matches.correct[rows, 0][counted])]
        f1 = 2 * correct / (np.arange(len(correct)) + objects)
        if len(scores):
            # Detections with equal scores pass a threshold together, so only the last one is a candidate.
            last = np.flatnonzero(np.r_[scores[1:] != scores[:-1], True])
            best = last[np.argmax(f1[1:][last])]
            points[name] = OperatingPoint(float(scores[best]), float(f1[1:][best]))
    return Scores(result, metrics, matches, points, confusion)


def compare(
    name: str, model: str, base: Predictions, truth: Truth, scores: Scores, *, samples: int
) -> BaselineComparison:
    """Compare a model with a baseline's predictions for the same images."""
    check_boxes(truth, base, "the baseline's detections")
    before = match_boxes(truth, base, coco.IOU_THRESHOLDS)
    changes = bootstrap.compare(before, scores.matches, truth.class_names, samples=samples)
    obstacle = f"the model cannot be compared with the baseline {name}: no class has objects"
    return BaselineComparison(name, changes, samples, "" if changes else obstacle, model)
