"""Scores a model on a split: predictions, metrics, comparison with a baseline, the gate, the report."""

import logging
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

from pydantic import dataclasses as models

from trainer import storage
from trainer.base.errors import EvaluationError, MissingError
from trainer.config.schema import Config
from trainer.data.shard_folder import read_index
from trainer.data.shard_index import ShardDataset
from trainer.data.tiles import tile_settings
from trainer.evaluation import engines, gate, scoring
from trainer.evaluation.gate import Evidence
from trainer.evaluation.inference import ScoredModel, predict_split
from trainer.evaluation.metrics import SUMMARY, Compared
from trainer.evaluation.truth_and_predictions import Predictions, Truth, name_difference
from trainer.export import loading
from trainer.export import published_models as published
from trainer.export.bundle import METADATA
from trainer.launching.distributed import World, broadcast, process_group
from trainer.report import evaluation_page, gallery
from trainer.report.evaluation_page import ReportData
from trainer.storage import check_writable
from trainer.trackers.training_log import read_rows

_LOG = logging.getLogger("evaluate")

_PACKAGES = ("kubedet", "torch", "torchvision", "hotcoco", "pycocotools", "numpy")
_IDENTITY = ("fingerprint", "split", "checkpoint", "sha256", "tile")
NO_BASELINE = "none"  # value of evaluation.baseline for no comparison
_MODEL_FILES = (".pt", ".safetensors", ".onnx")


@models.dataclass(config={"strict": True}, frozen=True)
class EvaluationSummary:
    """The inputs of an evaluation, read from its metrics.json."""

    fingerprint: str
    split: str
    predictions: str  # URI
    predictions_sha256: str  # `Predictions.digest`
    checkpoint: str  # URI, as the following fields
    shards: str = ""
    truth: str = ""  # ground truth, if there are no shards


@dataclass(frozen=True)
class Baseline:
    """A model and its evaluation, if any."""

    name: str
    model: str  # URI of a checkpoint or exported model; may be empty
    summary: EvaluationSummary | None = None


def evaluate(
    model_uri: str,
    shards_uri: str,
    output_uri: str,
    config: Config,
    *,
    data_root: str = "",
    rules: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Score a model; the processes that torchrun started share the images.

    Mistakes of the user are errors before any prediction.

    Args:
        model_uri: best.pt of a run, next to metrics.jsonl for the curves, or see `loading.load`.
        shards_uri: folder that the shard step wrote.
        output_uri: folder for metrics.json, the predictions, and what `write_results` writes.
        config: the evaluation section, workers of the loader, and the model's name.
        data_root: its current model is the baseline if the configuration names none; empty has no models.
        rules: rules of the gate; None takes the configuration's.

    Returns:
        On rank 0 the content of metrics.json, elsewhere {}.
    """
    rules = list(config.evaluation.gate if rules is None else rules)
    gate.check(rules)
    if config.evaluation.baseline == NO_BASELINE:
        gate.check_baseline(rules)
    engines.require(config.evaluation.engine)
    with process_group() as world:
        dataset = _dataset(shards_uri, config.evaluation.split)
        model = _load(model_uri, dataset, config, world)
        gate.check(rules, dataset.index.names)
        if world.is_main:
            check_writable(output_uri)
            storage.remove_stale(output_uri)
        # Problems of the baseline are reported before the model's hours of work.
        baseline = find_baseline(config, shards_uri, data_root)
        tile, overlap = tile_settings(model.config, config.evaluation.tile)
        identity = {
            "fingerprint": dataset.fingerprint,
            "split": dataset.split,
            "checkpoint": storage.absolute(model.uri),
            "sha256": model.sha256,
            "tile": f"{tile} px, overlap {overlap:g}" if tile else "",
        }
        base, obstacle = _baseline_predictions(baseline, dataset, config, world)
        file = f"predictions.{config.evaluation.predictions}"
        predictions_uri = storage.join(storage.absolute(output_uri), file)
        predictions = _earlier_predictions(predictions_uri, identity) if world.is_main else None
        if not broadcast(predictions is not None, world):
            predictions = _predict(model, dataset, config, world)
        if predictions is None or not world.is_main:
            return {}
        truth_json, index = dataset.annotations(), dataset.index
        truth = Truth.from_coco(truth_json)
        scores = scoring.score(truth_json, truth, predictions, config.evaluation.engine)
        summary = {
            "images": len(dataset),
            **scores.to_json(),
            **identity,
            "step": model.step,
            "shards": storage.absolute(dataset.uri),
            "predictions": predictions_uri,
            "data_warnings": index.warnings,
        }
        compared, samples = None, config.evaluation.bootstrap
        if baseline and base is not None:
            compared = scoring.compare(baseline.name, baseline.model, base, truth, scores, samples=samples)
        elif baseline:
            compared = Compared(baseline.name, samples=samples, obstacle=obstacle, model=baseline.model)
        rows = {int(image_id): row for row, image_id in enumerate(dataset.image_ids)}
        pictures = gallery.worst_images(
            truth, predictions, scores.matches, lambda image_id: dataset.read(rows[image_id])[0]
        )
        counts = {
            split: {"images": part.samples, "boxes": part.boxes, "shards": len(part.shards)}
            for split, part in index.splits.items()
        }
        for split, row in index.statistics.items():
            counts[split] |= {"without boxes": row.images_without_boxes, "crowds": row.crowds}
        step = "" if model.step is None else f" (step {model.step})"
        report = ReportData(
            title=f"{model.config.get('recipe', 'model')} on {dataset.split}",
            split=dataset.split,
            images=len(dataset),
            scores=scores,
            compared=compared,
            gallery=pictures,
            training=read_rows(storage.parent(model.uri)),
            dataset=counts,
            warnings=index.warnings,
            statistics=index.statistics,
            trained_boxes=index.class_counts.get("train", {}),
            config=model.config,
            versions={
                "model": f"{model.uri}{step}",
                "sha256": model.sha256,
                "data": f"{dataset.uri} ({dataset.split})",
                **program_versions(),
            },
        )
        write_results(output_uri, predictions, report, summary, rules)
        return summary


def _dataset(shards_uri: str, only: str) -> ShardDataset:
    try:
        sizes = read_index(shards_uri).samples
    except MissingError:
        raise EvaluationError(
            f"{shards_uri} is not a folder of shards: it has no index.json",
            fix="use the folder that the shard step wrote, <data root>/shards/<fingerprint>",
        ) from None
    for split in [only] if only else ["test", "val"]:
        if sizes.get(split):
            return ShardDataset(shards_uri, split)
    listed = ", ".join(f"{split} ({size} images)" for split, size in sizes.items()) or "none"
    missing = f"no images of the split {only}" if only else "neither a test nor a val split to score"
    raise EvaluationError(
        f"the shards {shards_uri} have {missing}",
        fix=f"their splits are: {listed}; add one to the source, set data.val_fraction above 0, or choose "
        "another evaluation.split",
    )


def _load(uri: str, dataset: ShardDataset, config: Config, world: World) -> ScoredModel:
    model = loading.load(uri, world.device)
    names = [category["name"] for category in model.categories]
    if difference := name_difference(dataset.index.names, names, "the data", "the model"):
        raise EvaluationError(
            f"the classes of the model {uri} are not those of the data: {difference}",
            fix="evaluate on shards with the classes of the training (data.classes)",
        )
    return model


def _predict(model: ScoredModel, dataset: ShardDataset, config: Config, world: World) -> Predictions:
    size, resize, fill = model.square
    changed = replace(config, loader=replace(config.loader, image_size=size, resize=resize, fill=fill))
    tile = tile_settings(model.config, config.evaluation.tile)
    return predict_split(model.predict, dataset, changed, world, reentrant=model.reentrant, tile=tile)


def _earlier_predictions(uri: str, identity: dict[str, str]) -> Predictions | None:
    if not uri.endswith(".parquet") or not storage.exists(uri):
        return None
    try:
        predictions, metadata = Predictions.read(uri)
    except EvaluationError:
        return None
    # The same checkpoint may have been copied to another URI.
    expected = {**identity, "kubedet": version("kubedet"), "checkpoint": metadata.get("checkpoint", "")}
    if any(metadata.get(name, "") != value for name, value in expected.items()):
        return None
    _LOG.info("using the predictions of an earlier evaluation of these images: %s", uri)
    return predictions


def _baseline_predictions(
    baseline: Baseline | None, dataset: ShardDataset, config: Config, world: World
) -> tuple[Predictions | None, str]:
    """Return the baseline's predictions, or the reason why it cannot be compared."""
    if baseline is None:
        return None, ""
    earlier, images = baseline.summary, (dataset.fingerprint, dataset.split)
    if earlier and (earlier.fingerprint, earlier.split) == images and storage.exists(earlier.predictions):
        try:
            return Predictions.read(earlier.predictions, earlier.predictions_sha256)[0], ""
        except EvaluationError as error:
            _LOG.warning(error.message)
    _LOG.info("scoring the baseline %s first: it has no predictions of these images", baseline.name)
    try:
        model = _load(baseline.model, dataset, config, world)
    except EvaluationError as error:
        return None, f"it cannot be compared with the baseline {baseline.name}: {error.message}"
    return _predict(model, dataset, config, world), ""


def find_baseline(config: Config, shards_uri: str, data_root: str) -> Baseline | None:
    """Find the baseline: evaluation.baseline, else the current model of the data root."""
    uri = config.evaluation.baseline
    if uri == NO_BASELINE:
        return None
    if not uri:
        return _current_model(config, shards_uri, data_root) if data_root else None
    if uri.endswith(_MODEL_FILES):
        return Baseline(uri, uri)
    if summary := find_summary(uri):
        return Baseline(uri, summary.checkpoint, summary)
    if storage.exists(storage.join(uri, METADATA)):
        return Baseline(uri, uri)
    raise EvaluationError(
        f"the baseline {uri} is neither an evaluation nor a model",
        fix="set evaluation.baseline to the URI of a run's folder, its best.pt, or an exported model; "
        f"`{NO_BASELINE}` for no comparison",
    )


def _current_model(config: Config, shards_uri: str, data_root: str) -> Baseline | None:
    name = published.name_for(config.export.name, shards_uri)
    record = published.current(data_root, name)
    if record is None:
        return None
    # By name: the data root may be mounted at another path.
    bundle = storage.join(published.folder(data_root, name), record.version)
    model = record.checkpoint if storage.exists(record.checkpoint) else bundle
    summary = find_summary(record.evaluation) if record.evaluation else None
    return Baseline(f"{name} {record.version}", model, summary)


def find_summary(uri: str) -> EvaluationSummary | None:
    """Return the summary of an evaluation or of a run's evaluation; None for other folders."""
    candidates = (storage.join(folder, SUMMARY) for folder in (uri, storage.join(uri, "evaluation")))
    file = next((candidate for candidate in candidates if storage.exists(candidate)), None)
    if file is None:
        return None
    summary = storage.read_model(file, EvaluationSummary, "evaluate the model again")
    # The folder may have been copied with its predictions.
    copied = storage.join(storage.parent(file), summary.predictions.rpartition("/")[2])
    return replace(summary, predictions=copied) if storage.exists(copied) else summary


def result_files(predictions: str) -> list[str]:
    """Return the names of the files that `write_results` writes, with predictions of that format."""
    return [*evaluation_page.FILES, f"predictions.{predictions}", "gate.json", SUMMARY]


def write_results(
    output_uri: str,
    predictions: Predictions,
    report: ReportData,
    summary: dict[str, Any],
    rules: Sequence[str],
) -> None:
    """Apply the gate; write predictions, table.txt, the reports, gate.json and, last, metrics.json."""
    # First: that of another model would describe the new predictions if this process were killed.
    storage.delete(storage.join(output_uri, SUMMARY))
    summary["predictions_sha256"] = predictions.digest()
    summary["comparison"] = report.compared.to_json() if report.compared else None
    verdict = gate.decide(Evidence.from_summary(summary), rules)
    summary["verdict"] = {"passed": verdict.passed, "reason": verdict.reason, "rules": list(rules)}
    origin = {name: str(summary[name]) for name in _IDENTITY}
    predictions.write(summary["predictions"], origin | {"kubedet": version("kubedet")})
    evaluation_page.write_report(replace(report, verdict=verdict), output_uri)
    storage.write_json(storage.join(output_uri, "gate.json"), summary["verdict"])
    # Last: its existence means that all other files are there.
    storage.write_json(storage.join(output_uri, SUMMARY), summary)


def program_versions() -> dict[str, str]:
    """Return the versions of Python and of the scoring packages, for the report."""
    return {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}}
