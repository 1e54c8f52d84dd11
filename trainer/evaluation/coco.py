"""Scores a file of detections against a file of ground truth, both in COCO's form."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer import storage
from trainer.base.errors import EvaluationError
from trainer.evaluation import coco_metrics
from trainer.evaluation.truth_and_predictions import (
    Predictions,
    Truth,
    check_predictions,
    check_truth,
    clip_boxes,
    parse_json,
)

_LOG = logging.getLogger(__name__)


def evaluate_files(
    ground_truth_json: str | Path, detections_json: str | Path, *, engine: str = "hotcoco"
) -> dict[str, float | dict[str, dict[str, float]]]:
    """Score a file of detections against a file of ground truth.

    Args:
        ground_truth_json: path or URI of {"images", "annotations", "categories"} in COCO's form.
        detections_json: path or URI of [{"image_id", "category_id", "bbox", "score"}] in COCO's results
            form, or of predictions that `evaluate` wrote.
        engine: one of engines.ENGINES.

    Returns:
        The twelve numbers by the names in metrics.METRICS, and "per_class" as in CocoResult.

    Raises:
        EvaluationError: a file is malformed or does not fit the other; names file, field and examples.
        StorageError: a file cannot be read.
    """
    _, truth = read_truth(str(ground_truth_json))
    result = coco_metrics.evaluate(truth, read_detections(str(detections_json), truth), engine=engine)
    return {**result.metrics, "per_class": result.per_class}


def read_truth(uri: str) -> tuple[dict[str, Any], Truth]:
    """Read and check a file of ground truth; returns its JSON, and its boxes as columns."""
    with _naming(uri):
        dataset = parse_json(storage.read_bytes(uri), uri)
        truth = Truth.from_coco(dataset)
        check_truth(truth)
    return dataset, truth


def read_detections(uri: str, truth: Truth, *, clip: bool = False) -> Predictions:
    """Read detections and check them against the ground truth; `clip` clips boxes to their images."""
    with _naming(uri):
        predictions, _ = Predictions.read(uri)
        if clip:
            predictions, count = clip_boxes(truth, predictions)
            _LOG.info("%s: clipped %d of %d boxes to their images", uri, count, len(predictions))
        check_predictions(truth, predictions)
    return predictions


@contextmanager
def _naming(uri: str) -> Iterator[None]:
    try:
        yield
    except EvaluationError as error:
        if error.message.startswith(uri):
            raise
        raise EvaluationError(f"{uri}: {error.message}", fix=error.fix) from None
