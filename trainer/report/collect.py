"""Collects the content of an evaluation's report."""

import platform
from importlib.metadata import version
from typing import Any

from trainer import storage
from trainer.data.shard_folder import read_index
from trainer.data.shard_index import ShardDataset
from trainer.evaluation.gate import Verdict
from trainer.evaluation.metric_change import Change
from trainer.evaluation.scored_model import ScoredModel
from trainer.evaluation.scoring import Scores
from trainer.evaluation.truth_and_predictions import Predictions, Truth
from trainer.report import gallery
from trainer.report.report_data import Compared, ReportData
from trainer.training_log import read_rows

_PACKAGES = ("kubedet", "torch", "torchvision", "hotcoco", "pycocotools", "numpy")


def collect(
    model: ScoredModel, dataset: ShardDataset, truth: Truth, predictions: Predictions, scores: Scores,
    summary: dict[str, Any], verdict: Verdict,
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
    """
    index = read_index(dataset.uri)
    return ReportData(
        title=f"{model.config.get('recipe', 'model')} on {dataset.split}",
        split=dataset.split,
        images=len(dataset),
        metrics=scores.metrics,
        per_class=scores.coco.per_class,
        precision=scores.coco.precision,
        verdict=verdict,
        compared=_compared(summary["comparison"]),
        points=scores.points,
        f1=scores.f1,
        tide=scores.tide,
        confusion=scores.confusion,
        calibration=scores.calibration,
        training=read_rows(storage.parent(model.uri)),
        gallery=gallery.worst_images(truth, predictions, scores.matches),
        load_image=_image_loader(dataset),
        dataset=_counts(index),
        statistics=index.get("statistics", {}),
        trained_boxes=dataset.class_counts.get("train", {}),
        config=model.config,
        versions=_versions(model, dataset),
    )


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
        "python": platform.python_version(),
        **{name: version(name) for name in _PACKAGES},
    }


def _image_loader(dataset: ShardDataset) -> Any:
    rows = {int(image_id): row for row, image_id in enumerate(dataset.image_ids)}
    return lambda image_id: dataset.read(rows[image_id])[0]
