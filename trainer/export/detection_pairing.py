"""Pairs the detections of two models by label, overlap and score, not by rank, which depends on rounding."""

from dataclasses import dataclass

import torch
from torchvision.ops import box_iou

from trainer.model.postprocess import Detections


@dataclass(frozen=True)
class Tolerance:
    """Least overlap and largest score difference of two detections of the same object."""

    iou: float
    score: float
    binding: bool
    """Whether too few matches fail the export."""


EXACT = Tolerance(iou=0.99, score=1e-3, binding=True)
QUANTIZED = Tolerance(iou=0.75, score=0.1, binding=False)

BOX_TOLERANCE = 0.01
"""Pixels. Boxes this close are equal, whatever their IoU: for a box clipped to a line it is 0/0."""


@dataclass(frozen=True)
class Matches:
    """Comparison of the detections of two models."""

    detections: int
    """Detections of the first model."""
    matched: float
    """Share of the detections of both that have a partner; 1 if neither detects anything."""
    score_error: float
    """Largest difference of score between partners."""
    box_error: float
    """Largest difference of a coordinate between partners, pixels."""


class Comparison:
    """Pairs the detections of two models, batch by batch."""

    def __init__(self, tolerance: Tolerance) -> None:
        self._tolerance = tolerance
        self._detections = self._partners = self._all = 0
        self._score_error = self._box_error = 0.0

    def add(self, first: Detections, second: Detections) -> None:
        """Pair the detections of a batch, each with its free partner of the nearest score."""
        for row in range(len(first.num)):
            one, other = (_unpadded(part, row) for part in (first, second))
            self._detections += len(one.scores)
            self._all += len(one.scores) + len(other.scores)
            self._pair(one, other)

    def _pair(self, first: Detections, second: Detections) -> None:
        if not len(first.scores) or not len(second.scores):
            return
        score_gap = (first.scores[:, None] - second.scores).abs()
        same_box = (first.boxes[:, None] - second.boxes).abs().amax(dim=2) <= BOX_TOLERANCE
        fits = (
            (same_box | (box_iou(first.boxes, second.boxes) >= self._tolerance.iou))
            & (first.labels[:, None] == second.labels)
            & (score_gap <= self._tolerance.score)
        )
        free = torch.ones(len(second.scores), dtype=torch.bool)
        for index in range(len(first.scores)):
            options = torch.nonzero(fits[index] & free).flatten()
            if len(options):
                partner = options[score_gap[index, options].argmin()]
                free[partner] = False
                self._partners += 2
                self._score_error = max(self._score_error, float(score_gap[index, partner]))
                gap = (first.boxes[index] - second.boxes[partner]).abs().max()
                self._box_error = max(self._box_error, float(gap))

    def result(self) -> Matches:
        matched = self._partners / self._all if self._all else 1.0
        return Matches(self._detections, matched, self._score_error, self._box_error)


def _unpadded(detections: Detections, row: int) -> Detections:
    boxes, scores, labels, num = (part[row] for part in detections)
    count = int(num)
    return Detections(boxes[:count], scores[:count], labels[:count], num)
