"""Evaluators of the COCO metrics, which return the same arrays, bit for bit.

hotcoco: https://github.com/derekallman/hotcoco; pycocotools: https://github.com/ppwwyyxx/cocoapi.
"""

import contextlib
import importlib
import io
from dataclasses import replace
from typing import Any

import numpy as np

from trainer.base.errors import EvaluationError
from trainer.evaluation.truth_and_predictions import Predictions, Truth

ENGINES = ("hotcoco", "pycocotools")
_CHUNK_PREDICTIONS = 1_000_000  # predictions per call of hotcoco, which needs about 300 bytes for each


PrecisionRecall = tuple[np.ndarray, np.ndarray]
"""Precision [T, R, K, A, M] and recall [T, K, A, M], -1 without ground truth.

T IoU thresholds, R recalls, K classes in the order of their ids, A sizes (all, small, medium, large), and M
limits of detections per image (1, 10, 100).
"""


def run_evaluator(engine: str, truth: Truth, predictions: Predictions) -> PrecisionRecall:
    """Match predictions with ground truth and accumulate; raise the errors of `require_engine`."""
    require_engine(engine)
    return (_run_hotcoco if engine == "hotcoco" else _run_pycocotools)(truth, predictions)


def require_engine(engine: str) -> None:
    """Raise EvaluationError if the engine is unknown or not installed."""
    others = " or ".join(f"evaluation.engine={other}" for other in ENGINES if other != engine)
    if engine not in ENGINES:
        raise EvaluationError(f"unknown evaluator {engine!r}", fix=f"set {others}")
    try:
        importlib.import_module(engine)
    except ImportError as error:
        raise EvaluationError(
            f"the evaluator {engine} cannot be loaded: {error}", fix=f"install it, or set {others}"
        ) from None


def hotcoco_evaluator(truth: Truth, predictions: Predictions) -> Any:
    """Return hotcoco's evaluator after matching at IoU 0.5; large splits take gigabytes of memory."""
    coco_eval = _load_hotcoco(truth, predictions)
    params = coco_eval.params
    params.iou_thrs, params.max_dets = [0.5], [100]
    params.area_rng, params.area_rng_lbl = params.area_rng[:1], params.area_rng_lbl[:1]
    coco_eval.params = params
    coco_eval.evaluate()
    return coco_eval


def summarize_precision(precision: np.ndarray) -> list[float]:
    """Return AP, AP50, AP75, APs, APm and APl of precision [T, R, ..., A]; -1 without ground truth."""
    parts = [precision[..., 0], precision[0, ..., 0], precision[5, ..., 0]]
    return [mean_if_defined(part) for part in (*parts, *(precision[..., size] for size in (1, 2, 3)))]


def mean_if_defined(values: np.ndarray) -> float:
    """Return the mean of the defined values, or -1 if there are none."""
    defined = values[values > -1]
    return float(np.mean(defined)) if defined.size else -1.0


def _run_hotcoco(truth: Truth, predictions: Predictions) -> PrecisionRecall:
    ids, precision, recall = truth.category_ids, [], []
    counts = np.bincount(np.searchsorted(ids, predictions.labels), minlength=len(ids))
    calls = (np.cumsum(counts) - counts) // _CHUNK_PREDICTIONS
    for chosen in np.split(ids, np.flatnonzero(np.diff(calls)) + 1):
        categories = [item for item in truth.categories if chosen[0] <= item["id"] <= chosen[-1]]
        part = replace(truth.take(np.isin(truth.labels, chosen)), categories=categories)
        coco_eval = _load_hotcoco(part, predictions.take(np.isin(predictions.labels, chosen)))
        coco_eval.evaluate()
        coco_eval.accumulate()
        arrays = coco_eval.eval  # each access copies these large arrays
        precision.append(np.asarray(arrays["precision"]))
        recall.append(np.asarray(arrays["recall"]))
    return np.concatenate(precision, axis=2), np.concatenate(recall, axis=1)


def _load_hotcoco(truth: Truth, predictions: Predictions) -> Any:
    from hotcoco import COCO, COCOeval

    dataset = COCO.from_arrays(
        truth.images,
        truth.categories,
        truth.image_ids,
        truth.labels,
        truth.boxes,
        area=truth.areas,
        iscrowd=truth.crowd,
    )
    columns = (predictions.image_ids, predictions.boxes, predictions.scores, predictions.labels)
    return COCOeval(dataset, dataset.load_res(np.column_stack(columns)), "bbox")


def _run_pycocotools(truth: Truth, predictions: Predictions) -> PrecisionRecall:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    areas, crowd = predictions.boxes[:, 2] * predictions.boxes[:, 3], np.zeros(len(predictions), bool)
    sides = (truth, truth.areas, truth.crowd), (predictions, areas, crowd)
    names = ("id", "image_id", "category_id", "bbox", "area", "iscrowd")
    datasets = []
    with contextlib.redirect_stdout(io.StringIO()):
        for items, area, is_crowd in sides:
            columns = (items.image_ids, items.labels, items.boxes, area, is_crowd.astype(int))
            # Ids start at 1: pycocotools treats a match with annotation 0 as no match.
            rows = zip(range(1, len(area) + 1), *(column.tolist() for column in columns), strict=True)
            coco = COCO()
            annotations = [dict(zip(names, row, strict=True)) for row in rows]
            coco.dataset = {
                "images": truth.images,
                "categories": truth.categories,
                "annotations": annotations,
            }
            datasets.append(coco)
        # COCO.loadRes is not used, because it fails on an empty list.
        for item, score in zip(annotations, predictions.scores.tolist(), strict=True):
            item["score"] = score
        for coco in datasets:
            coco.createIndex()
        coco_eval = COCOeval(*datasets, "bbox")
        coco_eval.evaluate()
        coco_eval.accumulate()
    return coco_eval.eval["precision"], coco_eval.eval["recall"]
