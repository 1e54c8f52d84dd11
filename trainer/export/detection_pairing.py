"""Pairs the detections of two models by label, overlap and score, never by rank.

The order of nearly equal scores depends on rounding, so a comparison by rank would find differences
where there are none.
"""

from dataclasses import dataclass

import torch
from torchvision.ops import box_iou

from trainer.model.postprocess import Detections


@dataclass(frozen=True)
class Tolerance:
    """How much two detections of the same object may differ."""

    iou: float
    """Least overlap."""
    score: float
    """Largest difference of score."""
    binding: bool
    """Too few matches fail the export."""


EXACT = Tolerance(iou=0.99, score=1e-3, binding=True)
"""The same arithmetic in another runtime."""
QUANTIZED = Tolerance(iou=0.75, score=0.1, binding=False)
"""Eight bits: matches are only reported, the change in AP decides."""

BOX_TOLERANCE = 0.01
"""Pixels. Boxes this close are the same even where IoU says nothing: at the border a box may be
clipped to a line, whose IoU with itself is 0/0."""


@dataclass(frozen=True)
class Matches:
    """How the detections of two models compare."""

    detections: int
    """Detections of the first."""
    matched: float
    """Share of the detections of both that have a partner; 1 where neither detects anything."""
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
        """Pair the detections of a batch, each with its nearest partner in score that is free."""
        for row in range(len(first.num)):
            one, other = (rows(part, row) for part in (first, second))
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
        """The figures; nothing found by either model counts as a match."""
        matched = self._partners / self._all if self._all else 1.0
        return Matches(self._detections, matched, self._score_error, self._box_error)


def rows(detections: Detections, row: int) -> Detections:
    """The detections of one image of a batch, without padding: [n, 4], [n], [n] and n."""
    count = int(detections.num[row])
    return Detections(
        detections.boxes[row, :count], detections.scores[row, :count], detections.labels[row, :count],
        detections.num[row],
    )  # fmt: skip
