"""The content of an evaluation's report."""

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import numpy as np

from trainer import storage
from trainer.data.shard_folder import read_index
from trainer.data.shard_index import ShardDataset
from trainer.evaluation.analysis import Calibration, Confusion, OperatingPoint
from trainer.evaluation.gate import Verdict
from trainer.evaluation.inference import ScoredModel
from trainer.evaluation.metrics import Compared
from trainer.evaluation.scoring import Scores
from trainer.evaluation.truth_and_predictions import Predictions, Truth
from trainer.report import gallery
from trainer.report.gallery import GalleryImage
from trainer.trackers.training_log import read_rows

Table = Sequence[Sequence[str]]
"""Rows of cells, the first of which is their header."""


@dataclass(frozen=True)
class ReportData:
    """Everything the report shows. Only the first five are needed."""

    title: str
    """Name of the run or model."""
    split: str
    """Split that was scored."""
    images: int
    """Images in it."""
    metrics: Mapping[str, float]
    """The twelve COCO numbers by name, as in CocoResult, and others."""
    per_class: Mapping[str, Mapping[str, float]]
    """AP, AP50, sizes and boxes by class, as in CocoResult."""
    precision: np.ndarray | None = None
    """[T, R, K] as in CocoResult, for the curves."""
    verdict: Verdict | None = None
    """The gate's decision."""
    compared: Compared | None = None
    """The comparison with the baseline."""
    points: Mapping[str, OperatingPoint] = field(default_factory=dict)
    """Threshold of the best F1 by class."""
    f1: Mapping[str, np.ndarray] = field(default_factory=dict)
    """F1 curves by class, from analysis.f1_curves."""
    tide: Mapping[str, tuple[float, int]] | None = None
    """Cost and count by kind of error, from analysis.tide."""
    confusion: Confusion | None = None
    """From analysis.confusion."""
    calibration: Calibration | None = None
    """From analysis.calibration."""
    training: Sequence[dict[str, Any]] = ()
    """Rows of metrics.jsonl."""
    gallery: Sequence[GalleryImage] | None = None
    """From gallery.worst_images; None leaves the gallery out."""
    load_image: Callable[[int], bytes] | None = None
    """Bytes of an encoded image by its id; needed where there is a gallery."""
    dataset: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Counts of each split, e.g. {"train": {"images": 205, "boxes": 2600}}."""
    warnings: Sequence[str] = ()
    """What is suspicious about the data."""
    statistics: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Histograms of each split, as in the shards' index."""
    trained_boxes: Mapping[str, int] = field(default_factory=dict)
    """Training boxes of each class."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Configuration, nested or flat."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Libraries, code, data fingerprint and checkpoint, by name."""
    used: Table = ()
    """What the run has used so far: a header, a row a step, and one of all."""


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
        "compared": Compared.from_json(summary["comparison"]) if summary["comparison"] else None,
        "points": scores.points,
        "f1": scores.f1,
        "tide": scores.tide,
        "confusion": scores.confusion,
        "calibration": scores.calibration,
    }


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
