"""Refuse ground truth and detections that pycocotools would score wrongly or crash on.

It takes NaN scores and unknown categories in silence and fails on others with an assertion.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from trainer.errors import EvaluationError

EXAMPLES = 5
"""Examples of each problem that an error lists."""


def check_ground_truth(ground_truth: dict[str, Any]) -> None:
    """Check that ground truth in COCO's form can be scored against.

    Raises:
        EvaluationError: it is empty, an id or name occurs twice, or annotations are malformed
            or name unknown images or categories; with the count and the first examples.
    """
    if not isinstance(ground_truth, dict):
        raise EvaluationError("ground truth is not a JSON object", fix="give a file in COCO's JSON form")
    for key in ("images", "annotations", "categories"):
        if not isinstance(ground_truth.get(key), list) or not ground_truth[key]:
            raise EvaluationError(
                f"ground truth has no {key}, so nothing can be scored",
                fix="check that the split has images with boxes, and its file COCO's JSON form",
            )
    for key, field in (("images", "id"), ("categories", "id"), ("categories", "name")):
        counts = Counter(item.get(field) for item in ground_truth[key])
        wrong = [value for value, count in counts.items() if count > 1 or value is None]
        if wrong:
            raise EvaluationError(
                f"ground truth: {len(wrong)} {key} without {field} or with one that occurs more than once: "
                + ", ".join(map(repr, wrong[:EXAMPLES])),
                fix=f"give each of the {key} its own {field}",
            )
    _check_items("ground truth", ground_truth["annotations"], ground_truth, scored=False)


def check_detections(ground_truth: dict[str, Any], detections: list[dict[str, Any]]) -> None:
    """Check that each detection has a finite score and box, of a known image and category.

    Raises:
        EvaluationError: one has not; with the count of each problem and the first examples.
    """
    if not isinstance(detections, list):
        raise EvaluationError(
            "detections are not a list",
            fix='give a list of {"image_id", "category_id", "bbox": [x, y, width, height], "score"}',
        )
    _check_items("detections", detections, ground_truth, scored=True)


def _check_items(where: str, items: list[Any], ground_truth: dict[str, Any], *, scored: bool) -> None:
    images = {image["id"] for image in ground_truth["images"]}
    categories = {category["id"] for category in ground_truth["categories"]}
    problems: dict[str, list[str]] = defaultdict(list)
    counts: Counter[str] = Counter()
    for place, item in enumerate(items):
        for problem, value in _problems(item, images, categories, scored=scored):
            counts[problem] += 1
            if counts[problem] <= EXAMPLES:
                problems[problem].append(f"{value!r} (item {place})")
    if not counts:
        return
    lines = [
        f"  {counts[problem]} with {problem}: {', '.join(examples)}" for problem, examples in problems.items()
    ]
    raise EvaluationError(
        f"{where} ({len(items)} in all) cannot be scored:\n" + "\n".join(lines),
        fix="score detections against the ground truth of the same split and classes; boxes are "
        "[x, y, width, height] in pixels",
    )


def _problems(
    item: Any, images: set[Any], categories: set[Any], *, scored: bool
) -> Iterable[tuple[str, object]]:
    try:
        image, category, box = item["image_id"], item["category_id"], item["bbox"]
        score = item["score"] if scored else 0.0
        known_image, known_category = image in images, category in categories
    except (TypeError, KeyError):
        yield "missing or malformed fields", item
        return
    if not known_image:
        yield "an unknown image id", image
    if not known_category:
        yield "an unknown category id", category
    if not (isinstance(box, list | tuple) and len(box) == 4 and all(map(_finite, box))):
        yield "a malformed or non-finite box", box
    elif box[2] < 0 or box[3] < 0:
        yield "a box of negative size", box
    if not scored and not _finite(item.get("area", 0)):
        yield "a non-finite area", item["area"]
    if not _finite(score):
        yield "a non-finite score", score


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
