"""The COCO box metrics (https://cocodataset.org/#detection-eval); -1 means "no ground truth"."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.base.safe_text import align, display_width, to_one_line
from trainer.evaluation import engines
from trainer.evaluation.metrics import METRICS, PER_CLASS
from trainer.evaluation.truth_and_predictions import Predictions, Truth, check_boxes

IOU_THRESHOLDS = np.linspace(0.5, 0.95, 10)  # the T IoU thresholds
RECALLS = np.linspace(0.0, 1.0, 101)  # the R recalls at which precision is sampled


@dataclass(frozen=True)
class CocoResult:
    """COCO metrics of one evaluation."""

    metrics: dict[str, float]  # the twelve values, by the names in METRICS
    per_class: dict[str, dict[str, float]]
    """For each class by name: AP, AP50, AP75, APs, APm, APl, AR100 (-1 without boxes of that
    size), and the number of boxes without crowds."""
    precision: np.ndarray
    """[T, R, K] precision for all sizes and up to 100 detections per image; -1 if a class has no boxes."""


def evaluate(
    ground_truth: Truth | Mapping[str, Any],
    detections: Predictions | Sequence[Mapping[str, Any]],
    *,
    engine: str = "hotcoco",
) -> CocoResult:
    """Score detections against ground truth, as columns or in COCO's JSON format."""
    truth = ground_truth if isinstance(ground_truth, Truth) else Truth.from_coco(ground_truth)
    predictions = detections if isinstance(detections, Predictions) else Predictions.from_coco(detections)
    check_boxes(truth, truth, "ground truth")
    check_boxes(truth, predictions, "detections")
    precision, recall = engines.run_evaluator(engine, truth, predictions)
    precision = precision[..., -1]
    numbers = engines.summarize_precision(precision)
    numbers += [engines.mean_if_defined(recall[:, :, 0, limit]) for limit in (0, 1, 2)]
    numbers += [engines.mean_if_defined(recall[:, :, size, -1]) for size in (1, 2, 3)]
    boxes, per_class = Counter(truth.labels[~truth.crowd].tolist()), {}
    for place, category in enumerate(truth.categories):
        values = [
            *engines.summarize_precision(precision[:, :, place]),
            engines.mean_if_defined(recall[:, place, 0, -1]),
        ]
        row = dict(zip(PER_CLASS, values, strict=True))
        per_class[category["name"]] = row | {"boxes": boxes[category["id"]]}
    # A copy, because a view would keep the precision of other sizes and limits in memory.
    return CocoResult(dict(zip(METRICS, numbers, strict=True)), per_class, precision[..., 0].copy())


_MAX_NAME_LENGTH = 33  # longest class name in the table, so that a line fits into 80 columns


def format_table(result: CocoResult, *, rows: int = 40) -> str:
    """Format the metrics and at most `rows` classes, the best and the worst, for a terminal."""
    lines = []
    for title, names in (("precision", list(METRICS)[:6]), ("recall", list(METRICS)[6:])):
        lines.append(f"{title:<9}" + "".join(f"{name.removeprefix('coco/'):>8}" for name in names))
        lines.append(" " * 9 + "".join(f"{format_metric(result.metrics[name]):>8}" for name in names))
    classes = sorted(result.per_class.items(), key=lambda item: -item[1]["AP"])
    width = max(9, *(min(display_width(to_one_line(name)), _MAX_NAME_LENGTH) for name, _ in classes))
    lines += ["", f"{'class':<{width}}{'boxes':>9}{'AP':>8}{'AP50':>8}"]
    shown = []
    for name, row in classes if len(classes) <= rows else classes[: rows // 2] + classes[-(rows // 2) :]:
        bar = "█" * round(max(row["AP"], 0) * 20)
        numbers = f"{row['boxes']:>9}{format_metric(row['AP']):>8}{format_metric(row['AP50']):>8}"
        shown.append(f"{align(name, width)}{numbers}  {bar}".rstrip())
    if len(classes) > rows:
        shown.insert(rows // 2, f"... {len(classes) - len(shown)} classes between ...")
    return "\n".join(lines + shown)


def format_metric(value: float) -> str:
    """Format a metric with three decimals, or as a dash if there is no ground truth."""
    return "-" if np.isnan(value) or value < 0 else f"{value:.3f}"
