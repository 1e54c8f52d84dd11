"""Collects the content of an evaluation's report."""

import platform
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np

from trainer import storage
from trainer.data.shard_folder import read_index
from trainer.data.shard_index import ShardDataset
from trainer.evaluation.gate import Verdict
from trainer.evaluation.inference import ScoredModel
from trainer.evaluation.metrics import Change
from trainer.evaluation.scoring import Scores
from trainer.evaluation.truth_and_predictions import Predictions, Truth
from trainer.report import gallery
from trainer.report.report_data import Compared, ReportData, Table
from trainer.trackers.training_log import read_rows

_PACKAGES = ("kubedet", "torch", "torchvision", "hotcoco", "pycocotools", "numpy")


def collect(
    model: ScoredModel, dataset: ShardDataset, truth: Truth, predictions: Predictions, scores: Scores,
    summary: dict[str, Any], verdict: Verdict, used: Table = (),
) -> ReportData:  # fmt: skip
    """Collect what the report shows.

    Args:
        model: what was scored.
        dataset: the split it was scored on.
        truth: ground truth of the split.
        predictions: its predictions.
        scores: their metrics and analyses.
        summary: content of metrics.json, with the comparison.
        verdict: the gate's.
        used: see `ReportData.used`.
    """
    index = read_index(dataset.uri)
    return ReportData(
        title=f"{model.config.get('recipe', 'model')} on {dataset.split}",
        **_of_scores(scores, summary, verdict),
        gallery=gallery.worst_images(truth, predictions, scores.matches),
        training=read_rows(storage.parent(model.uri)),
        load_image=_image_loader(dataset),
        dataset=_counts(index),
        warnings=index.get("warnings", ()),
        statistics=index.get("statistics", {}),
        trained_boxes=dataset.class_counts.get("train", {}),
        config=model.config,
        versions=_versions(model, dataset),
        used=used,
    )


def collect_files(
    title: str, truth: Truth, predictions: Predictions, scores: Scores, summary: dict[str, Any],
    verdict: Verdict | None, load_image: Callable[[int], bytes] | None,
) -> ReportData:  # fmt: skip
    """Collect what the report shows of a file of detections.

    Args:
        title: what was scored on what.
        truth: ground truth.
        predictions: the detections.
        scores: their metrics and analyses.
        summary: content of metrics.json, with the comparison.
        verdict: the gate's; None where none was asked.
        load_image: bytes of an image by its id; None where the images are not to be had.
    """
    boxes = len(truth.boxes) - int(truth.crowd.sum())
    empty = len(truth.images) - len(np.unique(truth.image_ids))
    counts = {"images": len(truth.images), "boxes": boxes, "without boxes": empty,
              "crowds": int(truth.crowd.sum())}  # fmt: skip
    return ReportData(
        title=title,
        **_of_scores(scores, summary, verdict),
        gallery=gallery.worst_images(truth, predictions, scores.matches) if load_image else None,
        load_image=load_image,
        dataset={summary["split"]: counts},
        versions={
            "detections": summary["checkpoint"],
            "sha256": summary["sha256"],
            "ground truth": summary["truth"],
            **_program_versions(),
        },
    )


def _of_scores(scores: Scores, summary: dict[str, Any], verdict: Verdict | None) -> dict[str, Any]:
    """What of a report follows from the scores alone."""
    return {
        "split": summary["split"],
        "images": summary["images"],
        "metrics": scores.metrics,
        "per_class": scores.coco.per_class,
        "precision": scores.coco.precision,
        "verdict": verdict,
        "compared": _compared(summary["comparison"]),
        "points": scores.points,
        "f1": scores.f1,
        "tide": scores.tide,
        "confusion": scores.confusion,
        "calibration": scores.calibration,
    }


def _compared(comparison: dict[str, Any] | None) -> Compared | None:
    if comparison is None:
        return None
    changes = {name: Change(*values) for name, values in comparison["changes"].items()}
    return Compared(comparison["baseline"], changes, comparison["samples"], comparison["obstacle"])


def _counts(index: dict[str, Any]) -> dict[str, dict[str, int]]:
    counts = {
        split: {"images": part["samples"], "boxes": part["boxes"], "shards": len(part["shards"])}
        for split, part in index["splits"].items()
    }
    for split, statistics in index.get("statistics", {}).items():
        counts[split] |= {"without boxes": statistics["images_without_boxes"], "crowds": statistics["crowds"]}
    return counts


def _versions(model: ScoredModel, dataset: ShardDataset) -> dict[str, str]:
    step = "" if model.step is None else f" (step {model.step})"
    return {
        "model": f"{model.uri}{step}",
        "sha256": model.sha256,
        "data": f"{dataset.uri} ({dataset.split})",
        **_program_versions(),
    }


def _program_versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}}


def _image_loader(dataset: ShardDataset) -> Any:
    rows = {int(image_id): row for row, image_id in enumerate(dataset.image_ids)}
    return lambda image_id: dataset.read(rows[image_id])[0]
