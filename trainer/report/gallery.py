"""Which images the detector got most wrong, and what was right and wrong in them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.evaluation.analysis import SHOWN_SCORE
from trainer.evaluation.box_matching import Matches
from trainer.evaluation.truth_and_predictions import Predictions, Truth

IOU = 0.5
"""Overlap that a detection needs to count as right."""

Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Marked:
    """A box of the ground truth or of the detector, and whether the other side agrees."""

    box: Box
    """x, y, width, height in pixels of the image."""
    name: str
    matched: bool
    score: float | None = None
    """None for ground truth."""


@dataclass(frozen=True)
class GalleryImage:
    """One image with what is in it and what was found."""

    image_id: int
    file_name: str
    width: int
    height: int
    f1: float
    """2 TP / (2 TP + FP + FN) of this image."""
    truth: tuple[Marked, ...]
    predictions: tuple[Marked, ...]

    @property
    def missed(self) -> int:
        """Objects without a detection."""
        return sum(not item.matched for item in self.truth)

    @property
    def false(self) -> int:
        """Detections without an object."""
        return sum(not item.matched for item in self.predictions)


def worst_images(
    truth: Truth, predictions: Predictions, matches: Matches, count: int = 12
) -> list[GalleryImage]:
    """The images with the lowest F1, the one with most errors first among equals.

    Detections take the best free box of their class, highest score first; those that lie
    mostly in a crowd region are left out. Images without an error are not listed.

    Args:
        truth: ground truth.
        predictions: predictions; those below SHOWN_SCORE are left out.
        matches: of both, the first threshold IoU.
        count: images to list at most.
    """
    images = len(truth.images)
    counted = (matches.scores >= SHOWN_SCORE) & ~matches.ignored[:, 0]
    right = np.bincount(matches.images[counted & matches.right[:, 0]], minlength=images)
    false = np.bincount(matches.images[counted], minlength=images) - right
    missed = np.bincount(matches.truth_images, minlength=images) - right
    f1 = 2 * right / np.maximum(2 * right + false + missed, 1)
    order = np.lexsort((-(false + missed), f1))
    worst = [place for place in order.tolist() if false[place] + missed[place]][:count]
    by_id = {image["id"]: image for image in truth.images}
    names = dict(zip(truth.category_ids.tolist(), truth.names, strict=True))
    listed = truth.all_image_ids[worst].tolist()
    return [_compare(by_id[image_id], truth, predictions, names) for image_id in listed]


def _compare(
    image: dict[str, Any], ground_truth: Truth, predictions: Predictions, names: dict[int, str]
) -> GalleryImage:
    in_image = ground_truth.image_ids == image["id"]
    columns = (ground_truth.labels, ground_truth.boxes, ground_truth.crowd)
    rows = zip(*(column[in_image] for column in columns), strict=True)
    truth = [
        {"category_id": int(label), "bbox": box.tolist(), "iscrowd": bool(crowd)}
        for label, box, crowd in rows
    ]
    shown = (predictions.image_ids == image["id"]) & (predictions.scores >= SHOWN_SCORE)
    detections = predictions.take(shown).to_coco()
    objects = [item for item in truth if not item.get("iscrowd")]
    crowds = [item for item in truth if item.get("iscrowd")]
    matched_objects: set[int] = set()
    marked_detections = []
    for item in sorted(detections, key=lambda item: -item["score"]):
        overlaps = [
            (_iou(item["bbox"], other["bbox"]), place)
            for place, other in enumerate(objects)
            if place not in matched_objects and other["category_id"] == item["category_id"]
        ]
        best, place = max(overlaps, default=(0.0, -1))
        matched = best >= IOU
        if matched:
            matched_objects.add(place)
        elif any(_inside(item, crowd) >= IOU for crowd in crowds):
            continue
        name = names[item["category_id"]]
        marked_detections.append(Marked(tuple(item["bbox"]), name, matched, item["score"]))
    marked_objects = tuple(
        Marked(tuple(item["bbox"]), names[item["category_id"]], place in matched_objects)
        for place, item in enumerate(objects)
    )
    total = len(marked_objects) + len(marked_detections)
    return GalleryImage(
        image_id=image["id"],
        file_name=image.get("original_file_name", image["file_name"]),
        width=image["width"],
        height=image["height"],
        f1=2 * len(matched_objects) / total if total else 1.0,
        truth=marked_objects,
        predictions=tuple(marked_detections),
    )


def _inside(item: dict[str, Any], crowd: dict[str, Any]) -> float:
    """Share of a detection that lies in a crowd region of its class."""
    if item["category_id"] != crowd["category_id"]:
        return 0.0
    width, height = item["bbox"][2:]
    return _intersection(item["bbox"], crowd["bbox"]) / max(width * height, 1e-9)


def _iou(one: Sequence[float], other: Sequence[float]) -> float:
    common = _intersection(one, other)
    return common / max(one[2] * one[3] + other[2] * other[3] - common, 1e-9)


def _intersection(one: Sequence[float], other: Sequence[float]) -> float:
    width = min(one[0] + one[2], other[0] + other[2]) - max(one[0], other[0])
    height = min(one[1] + one[3], other[1] + other[3]) - max(one[1], other[1])
    return max(width, 0.0) * max(height, 0.0)
