"""Cleans raw boxes: clips them to the image, and drops unusable ones."""

import math
from typing import Any

from trainer.data import problem_counts as reasons
from trainer.data.problem_counts import Problems

MIN_SIDE = 0.1
"""Boxes with a shorter side than this, in pixels, count as having no area."""

_ROUNDING = 1e-6
"""Pixels outside of the image that arithmetic leaves where boxes are shares of its sides: no mistake."""


def clean(
    annotations: list[dict[str, Any]],
    width: int,
    height: int,
    labels: int,
    problems: Problems,
    where: str,
    min_side: float = 0.0,
) -> list[dict[str, Any]]:
    """Return the usable boxes of one image, clipped to it; count the others by reason.

    Args:
        annotations: category_id, bbox (in pixels of the image; NaN where unknown), area and iscrowd.
        width: of the image in pixels.
        height: of the image in pixels.
        labels: how many categories there are.
        problems: grows.
        where: the image's name, for the examples.
        min_side: boxes with a shorter side are left out, in pixels; that is no error of the source.
    """
    kept = []
    for annotation in annotations:
        reason, box = _judge(annotation, width, height, labels)
        if box is not None and min(box[2:]) < min_side:
            reason, box = reasons.BOX_SMALL, None
        if reason:
            shown = [round(value, 2) for value in annotation["bbox"]]
            problems.add(reason, f"{where} {shown}")
        if box is None:
            continue
        area = box[2] * box[3]
        kept.append(
            {
                "category_id": annotation["category_id"],
                "bbox": box,
                "area": min(annotation["area"], area) if annotation["area"] > 0 else area,
                "iscrowd": annotation["iscrowd"],
            }
        )
    return kept


def _judge(
    annotation: dict[str, Any], width: int, height: int, labels: int
) -> tuple[str | None, list[float] | None]:
    """Return the problem of a box, or None, and its usable part, or None."""
    box = annotation["bbox"]
    if len(box) != 4 or not math.isfinite(sum(box)):
        return reasons.BOX_NOT_FINITE, None
    if not 0 <= annotation["category_id"] < labels:
        return reasons.BOX_UNKNOWN_CATEGORY, None
    x, y, w, h = box
    if w < MIN_SIDE or h < MIN_SIDE:
        return reasons.BOX_WITHOUT_AREA, None
    if x >= 0 and y >= 0 and x + w <= width and y + h <= height:
        return None, box
    left, top = max(x, 0.0), max(y, 0.0)
    right, bottom = min(x + w, float(width)), min(y + h, float(height))
    if right - left < MIN_SIDE or bottom - top < MIN_SIDE:
        return reasons.BOX_OUTSIDE, None
    outside = max(left - x, top - y, x + w - right, y + h - bottom)
    reason = reasons.BOX_CLIPPED if outside > _ROUNDING else None
    return reason, [left, top, right - left, bottom - top]
