"""The evaluators of the COCO metrics; they give the same arrays, bit for bit.

hotcoco: https://github.com/derekallman/hotcoco; pycocotools: https://github.com/ppwwyyxx/cocoapi.
"""

import contextlib
import importlib
import io
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trainer.base.errors import EvaluationError
from trainer.evaluation.truth_and_predictions import Predictions, Truth

ENGINES = ("hotcoco", "pycocotools")
_AT_ONCE = 1_000_000  # Predictions in one call of hotcoco, which needs about 300 bytes for each.


@dataclass(frozen=True)
class Arrays:
    """T IoU thresholds x R recalls x K classes x A sizes x M limits of detections an image.

    Sizes are all, small, medium, large; limits 1, 10, 100; classes in the order of their ids.
    """

    precision: np.ndarray
    """[T, R, K, A, M], -1 without ground truth."""
    recall: np.ndarray
    """[T, K, A, M], -1 without ground truth."""


def run(engine: str, truth: Truth, predictions: Predictions) -> Arrays:
    """Match predictions with ground truth and accumulate; raises as `require`."""
    require(engine)
    return (_hotcoco if engine == "hotcoco" else _pycocotools)(truth, predictions)


def require(engine: str) -> None:
    """Raise EvaluationError if there is no such engine, or it is not installed."""
    if engine not in ENGINES:
        raise EvaluationError(f"no evaluator {engine!r}", fix=f"use one of: {', '.join(ENGINES)}")
    try:
        importlib.import_module(engine)
    except ImportError as error:
        others = " or ".join(f"evaluation.engine={other}" for other in ENGINES if other != engine)
        raise EvaluationError(
            f"the evaluator {engine} cannot be loaded: {error}", fix=f"install it, or set {others}"
        ) from None


def evaluator(truth: Truth, predictions: Predictions) -> Any:
    """Return hotcoco's evaluator with all classes matched at IoU 0.5; it holds gigabytes on a large split."""
    coco_eval = _loaded(truth, predictions)
    params = coco_eval.params
    params.iou_thrs, params.max_dets = [0.5], [100]
    params.area_rng, params.area_rng_lbl = params.area_rng[:1], params.area_rng_lbl[:1]
    coco_eval.params = params
    coco_eval.evaluate()
    return coco_eval


def _hotcoco(truth: Truth, predictions: Predictions) -> Arrays:
    parts = []
    for ids in _portions(truth, predictions):
        mask = np.isin(truth.labels, ids)
        columns = ("image_ids", "labels", "boxes", "areas", "crowd")
        part = replace(
            truth,
            categories=[category for category in truth.categories if ids[0] <= category["id"] <= ids[-1]],
            **{name: getattr(truth, name)[mask] for name in columns},
        )
        coco_eval = _loaded(part, predictions.take(np.isin(predictions.labels, ids)))
        coco_eval.evaluate()
        coco_eval.accumulate()
        arrays = coco_eval.eval  # Copied by each access, and large.
        parts.append((np.asarray(arrays["precision"]), np.asarray(arrays["recall"])))
    precision, recall = zip(*parts, strict=True)
    return Arrays(np.concatenate(precision, axis=2), np.concatenate(recall, axis=1))


def _portions(truth: Truth, predictions: Predictions) -> Iterator[np.ndarray]:
    ids = truth.category_ids
    counts = np.bincount(np.searchsorted(ids, predictions.labels), minlength=len(ids))
    before = np.cumsum(counts) - counts
    yield from np.split(ids, np.flatnonzero(np.diff(before // _AT_ONCE)) + 1)


def _loaded(truth: Truth, predictions: Predictions) -> Any:
    from hotcoco import COCO, COCOeval

    dataset = COCO.from_arrays(
        truth.images, truth.categories, truth.image_ids, truth.labels, truth.boxes,
        area=truth.areas, iscrowd=truth.crowd,
    )  # fmt: skip
    columns = (predictions.image_ids, predictions.boxes, predictions.scores, predictions.labels)
    return COCOeval(dataset, dataset.load_res(np.column_stack(columns)), "bbox")


def _pycocotools(truth: Truth, predictions: Predictions) -> Arrays:
    from pycocotools.cocoeval import COCOeval

    areas = predictions.boxes[:, 2] * predictions.boxes[:, 3]
    crowd = np.zeros(len(predictions), bool)
    detections = _coco(truth, predictions, areas, crowd)
    # COCO.loadRes fails on an empty list.
    for item, score in zip(detections.dataset["annotations"], predictions.scores.tolist(), strict=True):
        item["score"] = score
    with contextlib.redirect_stdout(io.StringIO()):
        coco_eval = COCOeval(_coco(truth, truth, truth.areas, truth.crowd), detections, "bbox")
        coco_eval.evaluate()
        coco_eval.accumulate()
    return Arrays(coco_eval.eval["precision"], coco_eval.eval["recall"])


def _coco(truth: Truth, items: Truth | Predictions, areas: np.ndarray, crowd: np.ndarray) -> Any:
    from pycocotools.coco import COCO

    columns = (items.image_ids, items.labels, items.boxes, areas, crowd.astype(int))
    names = ("id", "image_id", "category_id", "bbox", "area", "iscrowd")
    # Ids start at 1: pycocotools treats a match with annotation 0 as no match.
    rows = zip(range(1, len(areas) + 1), *(column.tolist() for column in columns), strict=True)
    annotations = [dict(zip(names, row, strict=True)) for row in rows]
    coco = COCO()
    coco.dataset = {"images": truth.images, "categories": truth.categories, "annotations": annotations}
    with contextlib.redirect_stdout(io.StringIO()):
        coco.createIndex()
    return coco
