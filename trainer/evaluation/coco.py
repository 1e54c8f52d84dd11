"""The COCO box metrics, by pycocotools, and the average precision of each class.

Definitions: https://cocodataset.org/#detection-eval. Average precision is the mean of the
interpolated precision at 101 recalls, over ten IoU thresholds from 0.5 to 0.95. Small is an
area below 32 x 32 pixels, large one above 96 x 96. -1 stands for "no ground truth".
"""

import contextlib
import io
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from trainer.errors import EvaluationError
from trainer.evaluation.checks import check_detections, check_ground_truth

METRICS = {
    "coco/AP": "mean over IoU 0.50 to 0.95",
    "coco/AP50": "at IoU 0.50",
    "coco/AP75": "at IoU 0.75",
    "coco/APs": "small objects, below 32 x 32 px",
    "coco/APm": "medium objects",
    "coco/APl": "large objects, above 96 x 96 px",
    "coco/AR1": "recall with 1 detection an image",
    "coco/AR10": "recall with 10 detections an image",
    "coco/AR100": "recall with 100 detections an image",
    "coco/ARs": "recall of small objects",
    "coco/ARm": "recall of medium objects",
    "coco/ARl": "recall of large objects",
}
"""The twelve numbers in pycocotools' order, each with what it means."""

IOU_THRESHOLDS = np.linspace(0.5, 0.95, 10)
"""The T IoU thresholds."""
RECALLS = np.linspace(0.0, 1.0, 101)
"""The R recalls at which precision is taken."""


@dataclass(frozen=True)
class CocoResult:
    """What one evaluation found."""

    metrics: dict[str, float]
    """The twelve numbers, by the names in METRICS."""
    per_class: dict[str, dict[str, float]]
    """For each class by name: "AP", "AP50" (-1 without boxes) and "boxes" (crowds not counted)."""
    precision: np.ndarray
    """[T, R, K] precision at IOU_THRESHOLDS x RECALLS x classes in the order of per_class, for
    100 detections an image and all sizes; -1 where a class has no boxes."""
    scores: np.ndarray
    """[T, R, K] score of the detection at which each of these precisions is reached."""


def evaluate_files(
    ground_truth_json: str | Path, detections_json: str | Path
) -> dict[str, float | dict[str, dict[str, float]]]:
    """Score a file of detections against a file of ground truth, both in COCO's JSON form.

    Returns:
        The twelve numbers by name, and "per_class" as in CocoResult.

    Raises:
        EvaluationError: a file cannot be read, or does not fit the other one.
    """
    result = evaluate(_read(ground_truth_json), _read(detections_json))
    return {**result.metrics, "per_class": result.per_class}


def evaluate(ground_truth: dict[str, Any], detections: list[dict[str, Any]]) -> CocoResult:
    """Score detections against ground truth. Neither is changed.

    Args:
        ground_truth: {"images", "annotations", "categories"} in COCO's form; boxes are
            [x, y, width, height] in pixels; "iscrowd" and "area" may be missing.
        detections: [{"image_id", "category_id", "bbox", "score"}]; may be empty.

    Raises:
        EvaluationError: there is no ground truth, or ids, boxes or scores cannot be used; with
            their count and the first examples.
    """
    check_ground_truth(ground_truth)
    check_detections(ground_truth, detections)
    with contextlib.redirect_stdout(io.StringIO()):
        scored = COCOeval(_ground_truth(ground_truth), _detections(ground_truth, detections), "bbox")
        scored.evaluate()
        scored.accumulate()
        scored.summarize()
    # Dimensions are T, R, K, sizes (all first) and limits of detections (100 last).
    precision = scored.eval["precision"][:, :, :, 0, -1]
    return CocoResult(
        metrics={name: float(value) for name, value in zip(METRICS, scored.stats, strict=True)},
        per_class=_per_class(ground_truth, precision),
        precision=precision,
        scores=scored.eval["scores"][:, :, :, 0, -1],
    )


def table(result: CocoResult, *, rows: int = 40) -> str:
    """The twelve numbers and the classes, best first, as a table for a terminal.

    Of more than `rows` classes only the best and the worst are listed.
    """
    lines = []
    for title, names in (("precision", list(METRICS)[:6]), ("recall", list(METRICS)[6:])):
        lines.append(f"{title:<9}" + "".join(f"{name.removeprefix('coco/'):>8}" for name in names))
        lines.append(" " * 9 + "".join(f"{number(result.metrics[name]):>8}" for name in names))
    classes = sorted(result.per_class.items(), key=lambda item: -item[1]["AP"])
    half = rows // 2 if len(classes) > rows else len(classes)
    width = max(9, *(len(name) for name, _ in classes))
    lines += ["", f"{'class':<{width}}{'boxes':>9}{'AP':>8}{'AP50':>8}"]
    lines += [_class_line(name, row, width) for name, row in classes[:half]]
    if len(classes) > rows:
        lines.append(f"... {len(classes) - 2 * half} classes between ...")
        lines += [_class_line(name, row, width) for name, row in classes[-half:]]
    return "\n".join(lines)


def _class_line(name: str, row: dict[str, float], width: int) -> str:
    bar = "█" * round(max(row["AP"], 0) * 20)
    return f"{name:<{width}}{row['boxes']:>9}{number(row['AP']):>8}{number(row['AP50']):>8}  {bar}".rstrip()


def number(value: float) -> str:
    """A metric as people read it: three decimals, or a dash where there is no ground truth."""
    return "-" if np.isnan(value) or value < 0 else f"{value:.3f}"


def _read(path: str | Path) -> Any:
    try:
        return json.loads(Path(path).read_bytes())
    except OSError as error:
        raise EvaluationError(f"{path} cannot be read: {error.strerror}", fix="check the path") from None
    except ValueError as error:
        raise EvaluationError(f"{path} is not JSON: {error}", fix="give a file in COCO's JSON form") from None


def _ground_truth(ground_truth: dict[str, Any]) -> COCO:
    # Numbered anew from 1: pycocotools takes a match with an annotation of id 0 for none.
    annotations = [
        {
            "id": new_id,
            "image_id": item["image_id"],
            "category_id": item["category_id"],
            "bbox": item["bbox"],
            "area": item.get("area", item["bbox"][2] * item["bbox"][3]),
            "iscrowd": int(item.get("iscrowd", 0)),
        }
        for new_id, item in enumerate(ground_truth["annotations"], start=1)
    ]
    return _coco(ground_truth, annotations)


def _detections(ground_truth: dict[str, Any], detections: list[dict[str, Any]]) -> COCO:
    # As COCO.loadRes does, which fails on an empty list and writes into the caller's dicts.
    annotations = [
        {
            "id": new_id,
            "image_id": item["image_id"],
            "category_id": item["category_id"],
            "bbox": item["bbox"],
            "area": item["bbox"][2] * item["bbox"][3],
            "iscrowd": 0,
            "score": item["score"],
        }
        for new_id, item in enumerate(detections, start=1)
    ]
    return _coco(ground_truth, annotations)


def _coco(ground_truth: dict[str, Any], annotations: list[dict[str, Any]]) -> COCO:
    coco = COCO()
    coco.dataset = {
        "images": ground_truth["images"],
        "categories": ground_truth["categories"],
        "annotations": annotations,
    }
    coco.createIndex()
    return coco


def _per_class(ground_truth: dict[str, Any], precision: np.ndarray) -> dict[str, dict[str, float]]:
    boxes = Counter(item["category_id"] for item in ground_truth["annotations"] if not item.get("iscrowd", 0))
    # COCOeval orders classes by id.
    categories = sorted(ground_truth["categories"], key=lambda category: category["id"])
    return {
        category["name"]: {
            "AP": _mean(precision[:, :, place]),
            "AP50": _mean(precision[0, :, place]),
            "boxes": boxes[category["id"]],
        }
        for place, category in enumerate(categories)
    }


def _mean(precision: np.ndarray) -> float:
    known = precision[precision > -1]
    return float(known.mean()) if known.size else -1.0
