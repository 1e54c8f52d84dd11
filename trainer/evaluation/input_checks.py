"""Refuse what the evaluators would score wrongly: unknown ids, boxes and scores that are no numbers.

pycocotools takes a NaN score and an unknown category in silence, hotcoco an unknown image.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trainer.base.errors import EvaluationError
from trainer.evaluation.truth_and_predictions import EXAMPLES, Predictions, Truth

OUTSIDE = 1.0
"""Pixels by which a detection may lie outside of its image: rounding, not another image's box."""


def check_truth(truth: Truth) -> None:
    """Check that each box is a finite one of a known image and category.

    Raises:
        EvaluationError: with the count of each problem and the first examples.
    """
    problems = list(_unknown_ids(truth, truth)) + list(_malformed_boxes(truth.boxes))
    problems.append(("a non-finite area", ~np.isfinite(truth.areas), truth.areas))
    _refuse("ground truth", problems)


def check_predictions(truth: Truth, predictions: Predictions, where: str = "detections") -> None:
    """Check that each prediction has a finite score and box inside of a known image, of a known category.

    Args:
        truth: ground truth.
        predictions: predictions.
        where: what an error calls them.

    Raises:
        EvaluationError: with the count of each problem and the first examples.
    """
    problems = list(_unknown_ids(truth, predictions)) + list(_malformed_boxes(predictions.boxes))
    problems.append(("a non-finite score", ~np.isfinite(predictions.scores), predictions.scores))
    problems.append(
        (
            "a box outside of its image",
            _beyond(predictions.boxes, _sizes(truth, predictions), OUTSIDE),
            predictions.boxes,
        )
    )
    _refuse(where, problems)


def class_difference(
    model_categories: Sequence[Mapping[str, Any]], data_categories: Sequence[Mapping[str, Any]]
) -> str:
    """Say in what the classes of a model and of data differ; "" where they are the same, in one order.

    Args:
        model_categories: the model's categories, in the order of their labels.
        data_categories: those of the data.
    """
    model_names, data_names = (
        [category["name"] for category in side] for side in (model_categories, data_categories)
    )
    if data_names == model_names:
        return ""
    detail = "the same names in another order"
    if differing := set(data_names) ^ set(model_names):
        sides = (
            (sorted(differing & set(data_names)), "the data"),
            (sorted(differing & set(model_names)), "the model"),
        )
        parts = (f"{', '.join(some[:EXAMPLES])} only in {whose}" for some, whose in sides if some)
        detail = f"{len(differing)} differ: {'; '.join(parts)}"
    return f"{len(model_names)} against {len(data_names)} classes, {detail}"


_Problem = tuple[str, np.ndarray, np.ndarray]


def _unknown_ids(truth: Truth, items: Truth | Predictions) -> Iterator[_Problem]:
    yield "an unknown image id", ~np.isin(items.image_ids, truth.all_image_ids), items.image_ids
    yield "an unknown category id", ~np.isin(items.labels, truth.category_ids), items.labels


def _malformed_boxes(boxes: np.ndarray) -> Iterator[_Problem]:
    finite = np.isfinite(boxes).all(axis=1)
    yield "a non-finite box", ~finite, boxes
    yield "a box of negative size", finite & (boxes[:, 2:] < 0).any(axis=1), boxes


def clip_boxes(truth: Truth, predictions: Predictions) -> tuple[Predictions, int]:
    """Clip boxes to their images; returns the predictions, and how many boxes changed.

    What cannot be clipped (unknown images, boxes that are not finite or of negative size) stays as it is, for
    `check_predictions`.
    """
    boxes, sizes = predictions.boxes, _sizes(truth, predictions)
    corners = np.clip(np.stack([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1), 0.0, sizes[:, None])
    clipped = np.concatenate([corners[:, 0], corners[:, 1] - corners[:, 0]], axis=1)
    usable = np.isfinite(boxes).all(axis=1) & (boxes[:, 2:] >= 0).all(axis=1)
    changed = usable & _beyond(boxes, sizes, 0.0)
    boxes = np.where(changed[:, None], clipped, boxes)
    return replace(predictions, boxes=boxes), int(changed.sum())


def _sizes(truth: Truth, predictions: Predictions) -> np.ndarray:
    """[N, 2] width and height of each prediction's image; infinite if it is unknown or has no size."""
    by_id = sorted(truth.images, key=lambda image: image["id"])
    sizes = np.array([[image.get("width") or np.inf, image.get("height") or np.inf] for image in by_id])
    place = np.searchsorted(truth.all_image_ids, predictions.image_ids).clip(max=len(by_id) - 1)
    is_known = np.isin(predictions.image_ids, truth.all_image_ids)
    return np.where(is_known[:, None], sizes[place], np.inf)


def _beyond(boxes: np.ndarray, sizes: np.ndarray, margin: float) -> np.ndarray:
    """[N] bool: whether a box leaves its image by more than the margin; never if the image is unknown."""
    beyond = (boxes[:, :2] < -margin) | (boxes[:, :2] + boxes[:, 2:] > sizes + margin)
    return np.asarray(beyond.any(axis=1))


def _refuse(where: str, problems: list[_Problem]) -> None:
    lines = []
    for problem, wrong, values in problems:
        places = np.flatnonzero(wrong)
        if len(places):
            examples = ", ".join(f"{values[place].tolist()!r} (item {place})" for place in places[:EXAMPLES])
            lines.append(f"  {len(places)} with {problem}: {examples}")
    if lines:
        count = len(problems[0][1])
        raise EvaluationError(
            f"{where} ({count} in all) cannot be scored:\n" + "\n".join(lines),
            fix="score detections against the ground truth of the same split and classes; boxes are "
            "[x, y, width, height] in pixels",
        )
