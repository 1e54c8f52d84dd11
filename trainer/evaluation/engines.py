"""The evaluators behind the COCO metrics: hotcoco, and pycocotools as oracle and fallback.

Both give the same arrays, bit for bit. Sources: hotcoco (https://github.com/derekallman/hotcoco)
and pycocotools (https://github.com/ppwwyyxx/cocoapi).
"""

import contextlib
import io
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.errors import EvaluationError
from trainer.evaluation.tables import Predictions, Truth

ENGINES = ("hotcoco", "pycocotools")


@dataclass(frozen=True)
class Arrays:
    """T IoU thresholds x R recalls x K classes x A sizes x M limits of detections an image.

    Sizes are all, small, medium, large; limits 1, 10, 100; classes in the order of their ids.
    """

    precision: np.ndarray
    """[T, R, K, A, M], -1 where there is no ground truth."""
    recall: np.ndarray
    """[T, K, A, M], -1 where there is no ground truth."""
    scores: np.ndarray
    """[T, R, K, A, M]: score of the detection at which each precision is reached."""
    evaluator: Any = None
    """hotcoco's, which finds more than the metrics; None with pycocotools."""


def run(engine: str, truth: Truth, predictions: Predictions) -> Arrays:
    """Match predictions with ground truth and accumulate.

    Args:
        engine: one of ENGINES.
        truth: ground truth, checked.
        predictions: predictions, checked.

    Raises:
        EvaluationError: there is no such engine, or it is not installed.
    """
    if engine == "pycocotools":
        return _pycocotools(truth, predictions)
    if engine == "hotcoco":
        evaluator = hotcoco(truth, predictions)
        evaluator.evaluate()
        evaluator.accumulate()
        found = evaluator.eval  # Copied by each access, and large.
        precision, recall, scores = (np.asarray(found[name]) for name in ("precision", "recall", "scores"))
        return Arrays(precision, recall, scores, evaluator)
    raise EvaluationError(f"no evaluator {engine!r}", fix=f"use one of: {', '.join(ENGINES)}")


def hotcoco(truth: Truth, predictions: Predictions) -> Any:
    """Return hotcoco's evaluator of predictions: for the metrics, and for what it finds beside them.

    Raises:
        EvaluationError: it is not installed.
    """
    try:
        from hotcoco import COCO, COCOeval
    except ImportError as error:
        raise EvaluationError(
            f"the evaluator hotcoco cannot be loaded: {error}",
            fix="install it, or set evaluation.engine=pycocotools",
        ) from None
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
    found = _coco(truth, predictions, areas, crowd)
    # COCO.loadRes would do, but it fails on an empty list.
    for item, score in zip(found.dataset["annotations"], predictions.scores.tolist(), strict=True):
        item["score"] = score
    with contextlib.redirect_stdout(io.StringIO()):
        scored = COCOeval(_coco(truth, truth, truth.areas, truth.crowd), found, "bbox")
        scored.evaluate()
        scored.accumulate()
    return Arrays(scored.eval["precision"], scored.eval["recall"], scored.eval["scores"])


def _coco(truth: Truth, items: Truth | Predictions, areas: np.ndarray, crowd: np.ndarray) -> Any:
    from pycocotools.coco import COCO

    columns = (items.image_ids, items.labels, items.boxes, areas, crowd.astype(int))
    names = ("id", "image_id", "category_id", "bbox", "area", "iscrowd")
    # Numbered from 1: pycocotools takes a match with an annotation of id 0 for none.
    rows = zip(range(1, len(areas) + 1), *(column.tolist() for column in columns), strict=True)
    annotations = [dict(zip(names, row, strict=True)) for row in rows]
    coco = COCO()
    coco.dataset = {"images": truth.images, "categories": truth.categories, "annotations": annotations}
    with contextlib.redirect_stdout(io.StringIO()):
        coco.createIndex()
    return coco
