"""The COCO box metrics (https://cocodataset.org/#detection-eval); -1 means "no ground truth"."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.base.safe_text import aligned, cells, one_line
from trainer.evaluation import engines
from trainer.evaluation.engines import Arrays
from trainer.evaluation.metrics import METRICS
from trainer.evaluation.truth_and_predictions import Predictions, Truth, check_predictions, check_truth

IOU_THRESHOLDS = np.linspace(0.5, 0.95, 10)
"""The T IoU thresholds."""
RECALLS = np.linspace(0.0, 1.0, 101)
"""The R recalls at which precision is taken."""


@dataclass(frozen=True)
class CocoResult:
    """COCO metrics of one evaluation."""

    metrics: dict[str, float]
    """The twelve numbers, by the names in METRICS."""
    per_class: dict[str, dict[str, float]]
    """For each class by name: AP, AP50, AP75, APs, APm, APl, AR100 (-1 without boxes of the
    size) and boxes (crowds not counted)."""
    precision: np.ndarray
    """[T, R, K] precision for 100 detections an image and all sizes; -1 if a class has no boxes."""


def evaluate(
    ground_truth: Truth | Mapping[str, Any],
    detections: Predictions | Sequence[Mapping[str, Any]],
    *,
    engine: str = "hotcoco",
) -> CocoResult:
    """Score detections against ground truth, as columns or in COCO's JSON form, with one of engines.ENGINES.

    Raises:
        EvaluationError: there is no ground truth, or ids, boxes or scores cannot be used; with
            their count and the first examples.
    """
    truth = ground_truth if isinstance(ground_truth, Truth) else Truth.from_coco(ground_truth)
    predictions = detections if isinstance(detections, Predictions) else Predictions.from_coco(detections)
    check_truth(truth)
    check_predictions(truth, predictions)
    arrays = engines.run(engine, truth, predictions)
    return CocoResult(
        metrics=dict(zip(METRICS, _twelve(arrays), strict=True)),
        per_class=_per_class(truth, arrays),
        # A view would keep the other sizes and limits in memory.
        precision=arrays.precision[:, :, :, 0, -1].copy(),
    )


_NAME = 33  # Characters of a class name in the table: a line then fits into 80 columns.


def table(result: CocoResult, *, rows: int = 40) -> str:
    """Format the metrics and at most `rows` classes, the best and the worst, for a terminal."""
    lines = []
    for title, names in (("precision", list(METRICS)[:6]), ("recall", list(METRICS)[6:])):
        lines.append(f"{title:<9}" + "".join(f"{name.removeprefix('coco/'):>8}" for name in names))
        lines.append(" " * 9 + "".join(f"{number(result.metrics[name]):>8}" for name in names))
    classes = sorted(result.per_class.items(), key=lambda item: -item[1]["AP"])
    half = rows // 2 if len(classes) > rows else len(classes)
    width = max(9, *(min(cells(one_line(name)), _NAME) for name, _ in classes))
    lines += ["", f"{'class':<{width}}{'boxes':>9}{'AP':>8}{'AP50':>8}"]
    lines += [_class_line(name, row, width) for name, row in classes[:half]]
    if len(classes) > rows:
        lines.append(f"... {len(classes) - 2 * half} classes between ...")
        lines += [_class_line(name, row, width) for name, row in classes[-half:]]
    return "\n".join(lines)


def _class_line(name: str, row: dict[str, float], width: int) -> str:
    bar = "█" * round(max(row["AP"], 0) * 20)
    numbers = f"{row['boxes']:>9}{number(row['AP']):>8}{number(row['AP50']):>8}"
    return f"{aligned(name, width)}{numbers}  {bar}".rstrip()


def number(value: float) -> str:
    """Format a metric with three decimals, or as a dash if there is no ground truth."""
    return "-" if np.isnan(value) or value < 0 else f"{value:.3f}"


def _twelve(arrays: Arrays) -> list[float]:
    precision, recall = arrays.precision[..., -1], arrays.recall
    means = [_mean(precision[..., 0]), _mean(precision[0, ..., 0]), _mean(precision[5, ..., 0])]
    means += [_mean(precision[..., size]) for size in (1, 2, 3)]
    means += [_mean(recall[:, :, 0, limit]) for limit in (0, 1, 2)]
    return means + [_mean(recall[:, :, size, -1]) for size in (1, 2, 3)]


def _per_class(truth: Truth, arrays: Arrays) -> dict[str, dict[str, float]]:
    boxes = Counter(truth.labels[~truth.crowd].tolist())
    precision, recall = arrays.precision[..., -1], arrays.recall[:, :, 0, -1]
    return {
        category["name"]: {
            "AP": _mean(precision[:, :, place, 0]),
            "AP50": _mean(precision[0, :, place, 0]),
            "AP75": _mean(precision[5, :, place, 0]),
            "APs": _mean(precision[:, :, place, 1]),
            "APm": _mean(precision[:, :, place, 2]),
            "APl": _mean(precision[:, :, place, 3]),
            "AR100": _mean(recall[:, place]),
            "boxes": boxes[category["id"]],
        }
        for place, category in enumerate(truth.categories)
    }


def _mean(values: np.ndarray) -> float:
    defined = values[values > -1]
    return float(np.mean(defined)) if defined.size else -1.0
