"""Refuse what the evaluators would score wrongly: unknown ids, boxes and scores that are no numbers.

pycocotools takes a NaN score and an unknown category in silence, hotcoco an unknown image.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from trainer.errors import EvaluationError
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
    problems.append(("a box outside of its image", _outside(truth, predictions), predictions.boxes))
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


def _outside(truth: Truth, predictions: Predictions) -> np.ndarray:
    """[N] bool. Images whose size is not given hold everything."""
    by_id = sorted(truth.images, key=lambda image: image["id"])
    sizes = np.array([[image.get("width") or np.inf, image.get("height") or np.inf] for image in by_id])
    place = np.searchsorted(truth.all_image_ids, predictions.image_ids).clip(max=len(by_id) - 1)
    is_known = np.isin(predictions.image_ids, truth.all_image_ids)
    near, far = predictions.boxes[:, :2], predictions.boxes[:, :2] + predictions.boxes[:, 2:]
    beyond = (near < -OUTSIDE) | (far > sizes[place] + OUTSIDE)
    return np.asarray(is_known & beyond.any(axis=1))


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
