"""Checks in the serving runtimes that exported files give the same results as the trained model.

Compares COCO AP and single detections, then checks batches, an image without objects, and wrong input shapes.
"""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torchvision.ops import box_iou

from trainer.base import log
from trainer.base.errors import ExportError, wrap_exceptions
from trainer.config.schema import Config
from trainer.config.types import NetworkInput
from trainer.data.decoding import read_sample
from trainer.data.shard_index import ShardDataset
from trainer.data.transforms import fit_image
from trainer.evaluation import coco
from trainer.evaluation.inference import to_image_boxes
from trainer.evaluation.truth_and_predictions import Predictions
from trainer.export.formats import FORMATS, ExportedModel
from trainer.export.metadata import Agreement, Check
from trainer.export.quantize import evenly_spaced_indices
from trainer.model.architecture import Architecture, Detections

_LOG = logging.getLogger("export")
_BATCH = 8
_VERSIONS_FIX = "use the versions of torch, onnx and onnxruntime in constraints.txt; nothing was published"


BOX_TOLERANCE = 0.01
"""Boxes within this many pixels are equal, whatever their IoU, which is undefined for empty boxes."""


@dataclass(frozen=True)
class Tolerance:
    """Minimum overlap and maximum score difference of two detections of the same object."""

    iou: float
    score: float
    required: bool  # whether too few matches make the export fail


EXACT = Tolerance(iou=0.99, score=1e-3, required=True)
QUANTIZED = Tolerance(iou=0.75, score=0.1, required=False)


class DetectionComparison:
    """Pairs the detections of two models, batch by batch.

    Detections are paired by label, overlap and score, not by rank, which depends on rounding.
    """

    def __init__(self, tolerance: Tolerance) -> None:
        self._tolerance = tolerance
        self._detections = self._partners = self._total = 0
        self._score_error = self._box_error = 0.0

    def add(self, first: Detections, second: Detections) -> None:
        """Pair each detection of a batch with the unpaired one that has the nearest score."""
        for row in range(len(first.num)):
            count, others = int(first.num[row]), int(second.num[row])
            self._detections += count
            self._total += count + others
            if not count or not others:
                continue
            boxes, other_boxes = first.boxes[row, :count], second.boxes[row, :others]
            score_gap = (first.scores[row, :count, None] - second.scores[row, :others]).abs()
            same_box = (boxes[:, None] - other_boxes).abs().amax(dim=2) <= BOX_TOLERANCE
            fits = (
                (same_box | (box_iou(boxes, other_boxes) >= self._tolerance.iou))
                & (first.labels[row, :count, None] == second.labels[row, :others])
                & (score_gap <= self._tolerance.score)
            )
            free = torch.ones(others, dtype=torch.bool)
            for index in range(count):
                options = torch.nonzero(fits[index] & free).flatten()
                if len(options):
                    partner = options[score_gap[index, options].argmin()]
                    free[partner] = False
                    self._partners += 2
                    self._score_error = max(self._score_error, float(score_gap[index, partner]))
                    gap = (boxes[index] - other_boxes[partner]).abs().max()
                    self._box_error = max(self._box_error, float(gap))

    def result(self) -> Agreement:
        matched = self._partners / self._total if self._total else 1.0
        return Agreement(self._detections, matched, self._score_error, self._box_error)


def verify_exports(
    folder: Path,
    names: Sequence[str],
    detector: Architecture,
    dataset: ShardDataset,
    config: Config,
    network_input: NetworkInput,
) -> dict[str, Check]:
    """Compare written files with the trained model on images of a split."""
    served = {}
    for name in names:
        with _wrap_runtime_errors(name, "cannot be opened by the runtime that serves it"):
            served[name] = ExportedModel(FORMATS[name], folder / FORMATS[name].file, detector.thresholds)
    indices = evenly_spaced_indices(len(dataset), config.export.check_images)
    comparisons = {name: DetectionComparison(_tolerance(name)) for name in names}
    predictions: dict[str, list[Predictions]] = {name: [Predictions.from_coco([])] for name in ["", *names]}
    sizes = dict(zip(dataset.image_ids.tolist(), dataset.sizes, strict=True))
    first = torch.empty(0)
    with log.progress("check", len(indices), "images") as bar:
        for start in range(0, len(indices), _BATCH):
            samples = [read_sample(dataset, int(index)) for index in indices[start : start + _BATCH]]
            image_ids = [record["image_id"] for _, record in samples]
            squares, scales = zip(*(fit_image(image, network_input) for image, _ in samples), strict=True)
            images = torch.stack(squares)
            first = images if not start else first
            trained = detector.predict(images)
            predictions[""].append(to_image_boxes(trained, image_ids, list(scales), sizes)[0])
            for name, model in served.items():
                with _wrap_runtime_errors(name, "fails on validation images"):
                    detections = model.predict(images.numpy())
                comparisons[name].add(trained, detections)
                predictions[name].append(to_image_boxes(detections, image_ids, list(scales), sizes)[0])
            bar.update(len(images))
    chosen, truth = set(dataset.image_ids[indices].tolist()), dataset.annotations()
    truth["images"] = [image for image in truth["images"] if image["id"] in chosen]
    truth["annotations"] = [item for item in truth["annotations"] if item["image_id"] in chosen]
    ap = dict.fromkeys(predictions, -1.0)
    if truth["annotations"]:
        for name, parts in predictions.items():
            ap[name] = coco.evaluate(truth, Predictions.join(parts)).metrics["coco/AP"]
    checks = {}
    for name, model in served.items():
        matches, change = comparisons[name].result(), ap[name] - ap[""]
        _check_agreement(name, change, matches, len(indices), config)
        _check_edge_cases(name, model, first, network_input)
        checks[name] = Check(model.runtime.name, len(indices), ap[name], change, matches)
        if matches.detections:
            _LOG.info(
                "%s in %s: AP %+.4f, %.1f%% of %d detections match",
                name,
                model.runtime.name,
                change,
                matches.matched * 100,
                matches.detections,
            )
        else:
            text = "%s: the model detects nothing in %d images, so the check is not meaningful; train longer"
            _LOG.warning(text, name, len(indices))
    return checks


def _tolerance(name: str) -> Tolerance:
    return QUANTIZED if name == "onnx-int8" else EXACT


def _wrap_runtime_errors(name: str, failing: str) -> AbstractContextManager[None]:
    return wrap_exceptions(ExportError, f"the exported model ({name}) {failing}", fix=_VERSIONS_FIX)


def _check_agreement(name: str, change: float, matches: Agreement, image_count: int, config: Config) -> None:
    int8 = name == "onnx-int8"
    key = "max_ap_change_int8" if int8 else "max_ap_change"
    limit = getattr(config.export, key)
    problems = []
    if abs(change) > limit:
        problems.append(f"COCO AP changes by {change:+.4f}; the limit is {limit:g} (export.{key})")
    minimum = config.export.min_match
    if _tolerance(name).required and matches.matched < minimum:
        problems.append(
            f"{matches.matched:.1%} of the detections match; the minimum is {minimum:.1%} (export.min_match)"
        )
    if problems:
        raise ExportError(
            f"the exported model ({name}) differs from the trained one on {image_count} images: "
            + "; ".join(problems),
            fix="remove onnx-int8 from export.formats, or calibrate on more images "
            "(export.calibration_images); nothing was published"
            if int8
            else _VERSIONS_FIX,
        )


def _check_edge_cases(name: str, served: ExportedModel, squares: torch.Tensor, target: NetworkInput) -> None:
    image_size = target.size
    empty = torch.full((3, image_size, image_size), target.fill, dtype=torch.uint8)
    batch = torch.stack([*squares[:3], empty]).numpy()
    with _wrap_runtime_errors(name, "fails on an image without objects"):
        served.predict(batch[-1:])
    with _wrap_runtime_errors(name, "fails on a batch"):
        together = served.predict(batch)
    alone = [served.predict(batch[row : row + 1]) for row in range(len(batch))]
    # Exact for int8 too, because rounding does not depend on the batch.
    comparison = DetectionComparison(EXACT)
    comparison.add(together, Detections(*map(torch.cat, zip(*alone, strict=True))))
    matched = comparison.result().matched
    if matched < 0.99:
        raise ExportError(
            f"the exported model ({name}) detects different objects in a batch than in single images "
            f"({matched:.1%} match)",
            fix=_VERSIONS_FIX,
        )
    for shape in ((1, 3, image_size + 32, image_size), (1, 1, image_size, image_size), (3, image_size)):
        try:
            served.runtime.run(np.zeros(shape, np.uint8))
        except Exception:  # runtimes have no common error class  # noqa: S112
            continue
        raise ExportError(
            f"the exported model ({name}) accepts an input with the wrong shape {list(shape)}",
            fix=_VERSIONS_FIX,
        )
