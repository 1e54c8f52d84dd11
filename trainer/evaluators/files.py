"""Scores files of detections of any detector, and compares two evaluations of the same images."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trainer import storage
from trainer.base.errors import EvaluationError
from trainer.config.schema import EvaluationConfig
from trainer.data.shard_index import ShardDataset
from trainer.evaluation import engines, gate, scoring
from trainer.evaluation.coco import read_detections, read_truth
from trainer.evaluation.metrics import NOT_SURE
from trainer.evaluation.scoring import Scores
from trainer.evaluation.truth_and_predictions import Truth
from trainer.evaluators.baseline import NO_BASELINE, EvaluationSummary, find_summary
from trainer.evaluators.shards import program_versions, write_results
from trainer.report import evaluation_page, gallery
from trainer.report.evaluation_page import ReportData
from trainer.storage import check_writable

COMPARISON = "comparison.json"


def evaluate(
    truth_uri: str,
    detections_uri: str,
    output_uri: str,
    config: EvaluationConfig,
    *,
    rules: Sequence[str] = (),
    images_uri: str = "",
    clip: bool = False,
) -> dict[str, Any]:
    """Score a file of detections; writes the same files as `trainer.evaluators.shards`.

    Args:
        truth_uri: ground truth in COCO's format.
        detections_uri: detections in COCO's results format, or predictions that `evaluate` wrote.
        output_uri: folder for the files.
        config: its baseline is a file of detections or an evaluation of the same images.
        rules: rules of the gate.
        images_uri: folder of the images, to show the worst of them; empty shows none.
        clip: clip boxes that leave their image (the baseline's too) instead of refusing the file.

    Returns:
        The content of metrics.json, with `truth` instead of `shards`; its fingerprint is the sha256 of the
        ground truth, its split that file's name.
    """
    gate.check(rules)
    if config.baseline in ("", NO_BASELINE):
        gate.check_baseline(rules)
    engines.require(config.engine)
    dataset, truth = read_truth(truth_uri)
    gate.check(rules, truth.names)
    truth_digest, split = _sha256(truth_uri), _stem(truth_uri)
    predictions = read_detections(detections_uri, truth, clip=clip)
    base = None
    if config.baseline not in ("", NO_BASELINE):
        base_uri, base_digest, earlier = _read_side(config.baseline)
        if earlier and earlier.fingerprint != truth_digest:
            raise EvaluationError(
                f"the baseline {config.baseline} was not scored on this ground truth",
                fix="evaluate its detections against the same file, or use the file of its detections",
            )
        base = read_detections(base_uri, truth, digest=base_digest, clip=clip)
    load_image = _image_loader(images_uri, truth) if images_uri else None
    check_writable(output_uri)
    scores = scoring.score(dataset, truth, predictions, config.engine)
    summary: dict[str, Any] = {
        "images": len(truth.images),
        **scores.to_json(),
        "fingerprint": truth_digest,
        "split": split,
        "checkpoint": storage.absolute(detections_uri),
        "sha256": _sha256(detections_uri),
        "step": None,
        "tile": "",
        "truth": storage.absolute(truth_uri),
        "predictions": storage.absolute(storage.join(output_uri, f"predictions.{config.predictions}")),
    }
    name, compared = config.baseline, None
    if base is not None:
        compared = scoring.compare(name, name, base, truth, scores, samples=config.bootstrap)
    report = _report(
        f"{_stem(detections_uri)} on {split}",
        split,
        truth,
        scores,
        summary["checkpoint"],
        summary["sha256"],
        summary["truth"],
    )
    pictures = load_image and gallery.worst_images(truth, predictions, scores.matches, load_image)
    report = replace(report, compared=compared, gallery=pictures)
    write_results(output_uri, predictions, report, summary, rules)
    return summary


def compare(
    first_uri: str,
    second_uri: str,
    *,
    truth_uri: str = "",
    output_uri: str = "",
    engine: str = "hotcoco",
    samples: int = 200,
    clip: bool = False,
) -> dict[str, Any]:
    """Compare two evaluations of the same images with a paired bootstrap over images.

    Each is the folder of an evaluation or a file of detections; a change is the second's value minus the
    first's. Without `truth_uri` the ground truth is that of the evaluations; without `output_uri` nothing is
    written.

    Returns:
        names, images, metrics (both values by name), changes (of coco/AP, coco/AP50 and AP[class], the
        fields of a Change), samples, and verdict (that of coco/AP).
    """
    engines.require(engine)
    sides = [_read_side(uri) for uri in (first_uri, second_uri)]
    summaries = [summary for _, _, summary in sides if summary]
    images = {f"{summary.split} of {summary.fingerprint}" for summary in summaries}
    if len(images) > 1:
        raise EvaluationError(
            f"these evaluations are of different images: {' and '.join(sorted(images))}",
            fix="evaluate both models on the same shards and split, or files against the same ground truth",
        )
    shards = summaries[0].shards if summaries and not truth_uri else ""
    truth_name = shards or truth_uri or (summaries[0].truth if summaries else "")
    if not truth_name:
        raise EvaluationError(
            "the ground truth of these detections is unknown",
            fix="pass --truth GT.json, or --truth SHARDS/annotations/SPLIT.json",
        )
    if shards:
        dataset = ShardDataset(shards, summaries[0].split).annotations()
        truth = Truth.from_coco(dataset)
    else:
        dataset, truth = read_truth(truth_name)
    first, second = (read_detections(uri, truth, digest=digest, clip=clip) for uri, digest, _ in sides)
    if output_uri:
        check_writable(output_uri)
    before, scores = (scoring.score(dataset, truth, found, engine) for found in (first, second))
    compared = scoring.compare(first_uri, first_uri, first, truth, scores, samples=samples)
    comparison = {
        "names": [first_uri, second_uri],
        "images": len(truth.images),
        "metrics": {name: [before.metrics[name], value] for name, value in scores.metrics.items()},
        "changes": compared.to_json()["changes"],
        "samples": samples,
        "verdict": compared.changes["coco/AP"].verdict if compared.changes else NOT_SURE,
    }
    if output_uri:
        split = summaries[0].split if summaries else _stem(truth_name)
        title, sha256 = f"{second_uri} against {first_uri}", _sha256(sides[1][0])
        report = _report(title, split, truth, scores, second_uri, sha256, truth_name)
        evaluation_page.write_report(replace(report, compared=compared), output_uri)
        storage.write_json(storage.join(output_uri, COMPARISON), comparison)
    return comparison


def _read_side(uri: str) -> tuple[str, str, EvaluationSummary | None]:
    """Return the URI of the detections, their digest if it is known, and their evaluation."""
    summary = find_summary(uri)
    if summary is None and not storage.exists(uri):
        raise EvaluationError(
            f"{uri} is neither an evaluation nor a file of detections",
            fix="use a folder that `kubedet evaluate` or a run wrote, or a file in COCO's results format",
        )
    return (summary.predictions, summary.predictions_sha256, summary) if summary else (uri, "", None)


def _image_loader(folder: str, truth: Truth) -> Callable[[int], bytes]:
    fields = ("file_name", "width", "height")
    bad = [image["id"] for image in truth.images if not all(image.get(field) for field in fields)]
    if bad:
        raise EvaluationError(
            f"ground truth: {len(bad)} images without file_name, width or height, e.g. image {bad[0]}",
            fix="omit --images, or add these fields",
        )
    by_id = {image["id"]: storage.join(folder, image["file_name"]) for image in truth.images}
    first = next(iter(by_id.values()))
    if not storage.exists(first):
        raise EvaluationError(
            f"there is no image {first}", fix="set --images to the folder that contains the file_name entries"
        )
    return lambda image_id: storage.read_bytes(by_id[image_id])


def _report(
    title: str, split: str, truth: Truth, scores: Scores, detections_uri: str, sha256: str, truth_uri: str
) -> ReportData:
    crowds = int(truth.crowd.sum())
    counts = {
        "images": len(truth.images),
        "boxes": len(truth.boxes) - crowds,
        "without boxes": len(truth.images) - len(np.unique(truth.image_ids)),
        "crowds": crowds,
    }
    versions = {"detections": detections_uri, "sha256": sha256, "ground truth": truth_uri}
    return ReportData(
        title,
        split,
        len(truth.images),
        scores,
        dataset={split: counts},
        versions=versions | program_versions(),
    )


def _sha256(uri: str) -> str:
    return hashlib.sha256(storage.read_bytes(uri)).hexdigest()


def _stem(uri: str) -> str:
    return uri.rstrip("/").rpartition("/")[2].removesuffix(".json").removesuffix(".parquet")
