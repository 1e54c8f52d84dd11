"""Does the shipped file find what the trained model finds? Asked in the runtime that serves it."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torchvision.ops import box_iou

from trainer import log
from trainer.data.loader import read_sample
from trainer.data.shard_index import ShardDataset
from trainer.data.transforms import FILL, letterbox
from trainer.errors import ExportError
from trainer.export.graph import INPUT
from trainer.model.detector import Detector
from trainer.model.postprocess import Detections

MIN_IOU = 0.99
SCORE_TOLERANCE = 1e-3
BOX_TOLERANCE = 0.01
"""Pixels. Boxes this close are the same even where IoU says nothing: at the border a box may be
clipped to a line, whose IoU with itself is 0/0."""
_BATCH = 8
_OTHER_VERSIONS = "use the versions of torch, onnx and onnxruntime in constraints.txt; nothing was written"


@dataclass(frozen=True)
class Parity:
    """How the exported model compares with the trained one."""

    images: int
    """Images compared."""
    detections: int
    """Detections of the trained model in them."""
    matched: float
    """Share of the detections of both that have a partner: same label, IoU >= 0.99 (or corners within
    0.01 px), score within 1e-3. 1 where neither model detects anything."""
    score_error: float
    """Largest difference of score between partners."""
    box_error: float
    """Largest difference of a coordinate between partners, pixels."""


def check(
    path: Path, detector: Detector, dataset: ShardDataset, *, image_size: int, images: int, least: float
) -> Parity:
    """Compare a written file with the trained model on images of a split.

    Args:
        path: the ONNX file.
        detector: the trained model, on the CPU.
        dataset: where the images come from.
        image_size: side of the input square.
        images: how many images at most.
        least: share of detections that must be matched.

    Raises:
        ExportError: too few match, a batch gives other results than single images, an image
            without objects fails, or a wrong shape is accepted.
    """
    session = _session(path)
    squares = _squares(dataset, image_size, images)
    compared = _Comparison()
    with log.progress("check", len(squares), "images") as bar:
        for start in range(0, len(squares), _BATCH):
            batch = torch.stack(squares[start : start + _BATCH])
            compared.add(detector.predict(batch), _run(session, batch))
            bar.update(len(batch))
    parity = compared.result(len(squares))
    if parity.matched < least:
        raise ExportError(
            f"the exported model differs from the trained one: {parity.matched:.1%} of the detections in "
            f"{parity.images} images match, {least:.1%} must (export.min_match)",
            fix=_OTHER_VERSIONS,
        )
    _check_edges(session, squares, image_size)
    return parity


def describe(parity: Parity) -> dict[str, Any]:
    """The figures as plain numbers."""
    return asdict(parity)


def _session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _squares(dataset: ShardDataset, image_size: int, count: int) -> list[torch.Tensor]:
    chosen = np.linspace(0, len(dataset) - 1, min(count, len(dataset))).astype(int)
    return [letterbox(read_sample(dataset, int(index))[0], image_size)[0] for index in chosen]


def _run(session: onnxruntime.InferenceSession, images: torch.Tensor) -> Detections:
    return Detections(*(torch.from_numpy(part) for part in session.run(None, {INPUT: images.numpy()})))


class _Comparison:
    """Collects partners over batches."""

    def __init__(self) -> None:
        self._detections = self._partners = self._all = 0
        self._score_error = self._box_error = 0.0

    def add(self, ours: Detections, theirs: Detections) -> None:
        """Pair the detections of a batch, each with its best partner that is free."""
        for row in range(len(ours.num)):
            first, second = (_row(part, row) for part in (ours, theirs))
            self._detections += len(first[1])
            self._all += len(first[1]) + len(second[1])
            self._pair(first, second)

    def _pair(self, first: tuple[torch.Tensor, ...], second: tuple[torch.Tensor, ...]) -> None:
        boxes, scores, labels = first
        other_boxes, other_scores, other_labels = second
        if not len(scores) or not len(other_scores):
            return
        score_gap = (scores[:, None] - other_scores).abs()
        same_box = (boxes[:, None] - other_boxes).abs().amax(dim=2) <= BOX_TOLERANCE
        fits = (
            (same_box | (box_iou(boxes, other_boxes) >= MIN_IOU))
            & (labels[:, None] == other_labels)
            & (score_gap <= SCORE_TOLERANCE)
        )
        free = torch.ones(len(other_scores), dtype=torch.bool)
        for index in range(len(scores)):
            options = torch.nonzero(fits[index] & free).flatten()
            if len(options):
                partner = options[score_gap[index, options].argmin()]
                free[partner] = False
                self._partners += 2
                self._score_error = max(self._score_error, float(score_gap[index, partner]))
                gap = (boxes[index] - other_boxes[partner]).abs().max()
                self._box_error = max(self._box_error, float(gap))

    def result(self, images: int) -> Parity:
        """The figures; nothing found by either model counts as a match."""
        matched = self._partners / self._all if self._all else 1.0
        return Parity(images, self._detections, matched, self._score_error, self._box_error)


def _row(detections: Detections, row: int) -> tuple[torch.Tensor, ...]:
    count = int(detections.num[row])
    return detections.boxes[row, :count], detections.scores[row, :count], detections.labels[row, :count]


def _check_edges(session: onnxruntime.InferenceSession, squares: list[torch.Tensor], image_size: int) -> None:
    """Batches equal single images, an empty image works, a wrong size is refused."""
    empty = torch.full((3, image_size, image_size), FILL, dtype=torch.uint8)
    batch = torch.stack([*squares[:3], empty])
    together = _run(session, batch)
    for row in range(len(batch)):
        alone = _run(session, batch[row : row + 1])
        for whole, single in zip(_row(together, row), _row(alone, 0), strict=True):
            if whole.shape != single.shape or not torch.allclose(whole.float(), single.float(), atol=1e-3):
                raise ExportError(
                    "the exported model finds other objects in a batch than in its images one by one",
                    fix=_OTHER_VERSIONS,
                )
    try:
        session.run(None, {INPUT: np.zeros((1, 3, image_size + 32, image_size), np.uint8)})
    except Exception:  # onnxruntime has no common error of its own
        return
    raise ExportError(
        "the exported model accepts images of a size it was not made for",
        fix="report this with the versions in model_metadata.json; nothing was written",
    )
