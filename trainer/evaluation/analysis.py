"""Thresholds, calibration, kinds of errors, confusion matrix."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.evaluation.box_matching import Matches

BINS = 10
GRID = np.linspace(0.0, 1.0, 101)
"""Thresholds of the F1 curves."""
SHOWN_SCORE = 0.3
"""Detections below this score are left out of the confusion matrix and of the report's gallery."""


@dataclass(frozen=True)
class OperatingPoint:
    """The score threshold with the best F1 at IoU 0.5."""

    threshold: float
    f1: float


@dataclass(frozen=True)
class Calibration:
    """Mean score and precision at IoU 0.5 in BINS bins of equal width, NaN for an empty bin.

    `error` is the mean difference weighted with `count`, the predictions of each bin.
    """

    error: float
    confidence: np.ndarray
    precision: np.ndarray
    count: np.ndarray


@dataclass(frozen=True)
class Confusion:
    """Confusion matrix [C, C]: rows are true classes, columns predicted ones, `background` is last."""

    names: list[str]
    counts: np.ndarray

    def largest(self, top: int = 20) -> "Confusion":
        """Return the matrix of the `top` classes with the most objects, with the rest as one, `other`."""
        classes = len(self.names) - 1
        by_size = np.argsort(-self.counts[:classes].sum(axis=1), kind="stable")
        named = by_size if classes <= top + 1 else by_size[:top]
        group = np.full(classes + 1, len(named))
        group[named] = np.arange(len(named))
        titles = [self.names[place] for place in named]
        if len(named) < classes:
            titles.append(f"other ({classes - len(named)})")
        group[classes] = len(titles)
        titles.append(self.names[classes])
        small = np.zeros((len(titles), len(titles)), np.int64)
        np.add.at(small, (group[:, None], group[None, :]), self.counts)
        return Confusion(titles, small)


def operating_points(matches: Matches, names: Sequence[str]) -> dict[str, OperatingPoint]:
    """Return the best threshold of each class that has objects and predictions."""
    points = {}
    for place, name in enumerate(names):
        scores, right, counted = _counts(matches, place)
        objects = len(matches.objects(place))
        if not objects or not len(scores):
            continue
        f1 = 2 * right / (counted + objects)
        # Equal scores are above a threshold together: the last of them counts.
        last = np.flatnonzero(np.r_[scores[1:] != scores[:-1], True])
        best = last[np.argmax(f1[last])]
        points[name] = OperatingPoint(float(scores[best]), float(f1[best]))
    return points


def f1_curves(matches: Matches, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return [len(GRID)] F1 at IoU 0.5 over the threshold, for each class that has objects."""
    curves = {}
    for place, name in enumerate(names):
        objects = len(matches.objects(place))
        if objects:
            scores, right, counted = (np.r_[0, column] for column in _counts(matches, place))
            above = np.searchsorted(-scores[1:], -GRID, side="right")
            curves[name] = 2 * right[above] / (counted[above] + objects)
    return curves


def calibration(matches: Matches) -> Calibration:
    """Compare scores with precision over all classes, without predictions in crowds."""
    counted = ~matches.ignored[:, 0]
    scores, right = matches.scores[counted], matches.right[counted, 0]
    bins = np.minimum((scores * BINS).astype(int), BINS - 1).clip(min=0)
    count = np.bincount(bins, minlength=BINS)
    with np.errstate(invalid="ignore"):
        confidence = np.bincount(bins, weights=scores, minlength=BINS) / count
        precision = np.bincount(bins, weights=right, minlength=BINS) / count
    error = np.nansum(np.abs(confidence - precision) * count) / max(len(scores), 1)
    return Calibration(float(error), confidence, precision, count)


TIDE = {
    "Cls": "right place, wrong class",
    "Loc": "right class, place not exact",
    "Both": "wrong class, and place not exact",
    "Dupe": "object found before",
    "Bkg": "nothing there",
    "Miss": "object not found",
}
"""Kinds of errors (Bolya et al., TIDE, ECCV 2020, https://arxiv.org/abs/2008.08115)."""


def tide(evaluator: Any) -> dict[str, tuple[float, int]]:
    """Return for each kind of error how much AP at IoU 0.5 it costs, and how often it occurs."""
    errors = evaluator.tide_errors(pos_thr=0.5, bg_thr=0.1)
    return {kind: (float(errors["delta_ap"][kind]), int(errors["counts"].get(kind, 0))) for kind in TIDE}


def confusion(evaluator: Any, *, score: float) -> Confusion:
    """Count predicted classes by true class, matched at IoU 0.5 across classes."""
    matrix = evaluator.confusion_matrix(iou_thr=0.5, min_score=score)
    return Confusion([*matrix["cat_names"], "background"], matrix["matrix"].astype(np.int64))


def _counts(matches: Matches, place: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows = matches.of_class(place)
    counted = ~matches.ignored[rows, 0]
    right = matches.right[rows, 0][counted]
    return matches.scores[rows][counted], np.cumsum(right), np.arange(1, len(right) + 1)
