"""Evaluates a model on a split: predictions, metrics, comparison with a baseline, gate and report."""

import logging
import platform
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from trainer import storage
from trainer.base.errors import EvaluationError
from trainer.config.schema import Config
from trainer.data.shard_index import ShardDataset
from trainer.evaluation import engines, gate, scoring
from trainer.evaluation.gate import Evidence
from trainer.evaluation.metrics import SUMMARY, BaselineComparison
from trainer.evaluation.truth_and_predictions import Predictions, Truth
from trainer.evaluators import predictions
from trainer.evaluators.baseline import NO_BASELINE, Baseline, find_baseline
from trainer.launching.distributed import World, broadcast, process_group
from trainer.report import evaluation_page, gallery
from trainer.report.evaluation_page import ReportData
from trainer.storage import check_writable
from trainer.trackers.training_log import read_rows

_LOG = logging.getLogger("evaluate")

RESULT_FILES = (*evaluation_page.FILES, predictions.PREDICTIONS, "gate.json", SUMMARY)
"""Files that an evaluation writes."""
_PACKAGES = ("kubedet", "torch", "torchvision", "hotcoco", "pycocotools", "numpy")
_IDENTITY = ("fingerprint", "split", "checkpoint", "sha256", "tile", "kubedet")


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

    User errors are raised before any prediction.

    Args:
        model_uri: best.pt of a run, next to its metrics.jsonl; or any model of `loading.load_model`.
        shards_uri: folder that the shard step wrote.
        output_uri: folder for the files of `write_results`.
        config: the evaluation section, workers of the loader, and the model's name.
        data_root: contains the default baseline, the current model; "" for none.
        rules: rules of the gate; None uses the configuration's.

    Returns:
        The content of metrics.json on rank 0, and {} on other ranks.
    """
    rules = list(config.evaluation.gate if rules is None else rules)
    gate.check_rules(rules)
    if config.evaluation.baseline == NO_BASELINE:
        gate.refuse_baseline_rules(rules)
    engines.require_engine(config.evaluation.engine)
    with process_group() as world:
        dataset = predictions.open_split(shards_uri, config.evaluation.split)
        model = predictions.load_model(model_uri, dataset, world)
        gate.check_rules(rules, dataset.index.class_names)
        if world.is_main:
            check_writable(output_uri)
            storage.remove_stale(output_uri)
        # Report problems of the baseline before hours of prediction.
        baseline = find_baseline(config, shards_uri, data_root)
        training = storage.parent(model.uri)
        base, obstacle = _baseline_predictions(baseline, training, dataset, config, world)
        predictions_uri = storage.join(storage.absolute(output_uri), predictions.PREDICTIONS)
        known = [predictions_uri, storage.join(training, predictions.PREDICTIONS)]
        predicted = predictions.load_or_predict(model, dataset, config, world, known)
        if predicted is None:
            return {}
        truth_json, index = dataset.annotations(), dataset.index
        truth = Truth.from_coco(truth_json)
        scores = scoring.score(truth_json, truth, predicted, config.evaluation.engine)
        summary = {
            "images": len(dataset),
            **scores.to_dict(),
            **predictions.describe_inputs(model, dataset, config),
            "checkpoint": storage.absolute(model.uri),
            "step": model.step,
            "shards": storage.absolute(dataset.uri),
            "predictions": predictions_uri,
            "data_warnings": index.warnings,
        }
        comparison, samples = None, config.evaluation.bootstrap
        if baseline and base is not None:
            comparison = scoring.compare(baseline.name, baseline.model, base, truth, scores, samples=samples)
        elif baseline:
            comparison = BaselineComparison(
                baseline.name, samples=samples, obstacle=obstacle, model=baseline.model
            )
        rows = {int(image_id): row for row, image_id in enumerate(dataset.image_ids)}
        pictures = gallery.worst_images(
            truth, predicted, scores.matches, lambda image_id: dataset.read(rows[image_id])[0]
        )
        step = "" if model.step is None else f" (step {model.step})"
        report = ReportData(
            title=f"{model.config.get('recipe', 'model')} on {dataset.split}",
            split=dataset.split,
            images=len(dataset),
            scores=scores,
            comparison=comparison,
            gallery=pictures,
            training=read_rows(training),
            warnings=index.warnings,
            config=model.config,
            versions={
                "model": f"{model.uri}{step}",
                "sha256": model.sha256,
                "data": f"{dataset.uri} ({dataset.split})",
                **program_versions(),
            },
        )
        write_results(output_uri, predicted, report, summary, rules)
        return summary


def _baseline_predictions(
    baseline: Baseline | None, training: str, dataset: ShardDataset, config: Config, world: World
) -> tuple[Predictions | None, str]:
    """Return the baseline's predictions on rank 0, or the reason why it cannot be compared.

    `training` is the folder of the training run, which may contain predictions of the baseline.
    """
    if baseline is None:
        return None, ""
    stored = predictions.read_baseline(baseline, dataset) if world.is_main else None
    if broadcast(stored is not None, world):
        return stored, ""
    try:
        model = predictions.load_model(baseline.model, dataset, world)
    except EvaluationError as error:
        return None, f"the model cannot be compared with the baseline {baseline.name}: {error.message}"
    _LOG.info("the baseline %s has no evaluation on these images", baseline.name)
    known = storage.join(training, predictions.BASELINE_PREDICTIONS)
    return predictions.load_or_predict(model, dataset, config, world, [known]), ""


def write_results(
    output_uri: str,
    predicted: Predictions,
    report: ReportData,
    summary: dict[str, Any],
    rules: Sequence[str],
) -> None:
    """Apply the gate; write predictions, table.txt, the reports, gate.json, and finally metrics.json."""
    # Delete the old summary first: if this process were killed, it would describe the new predictions.
    storage.delete(storage.join(output_uri, SUMMARY))
    summary["predictions_sha256"] = predicted.digest()
    summary["comparison"] = report.comparison.to_dict() if report.comparison else None
    verdict = gate.decide(Evidence.from_summary(summary), rules)
    summary["verdict"] = {"passed": verdict.passed, "reason": verdict.reason, "rules": list(rules)}
    origin = {name: str(summary[name]) for name in _IDENTITY if name in summary}
    predicted.write(summary["predictions"], origin)
    evaluation_page.write_report(replace(report, verdict=verdict), output_uri)
    storage.write_json(storage.join(output_uri, "gate.json"), summary["verdict"])
    # Written last: its existence means that all other files exist.
    storage.write_json(storage.join(output_uri, SUMMARY), summary)


def program_versions() -> dict[str, str]:
    """Return the versions of Python and of the scoring packages, for the report."""
    return {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}}
