"""Finds the baseline, the model that a new model is compared with."""

from dataclasses import dataclass, replace

from pydantic import dataclasses as models

from trainer import storage
from trainer.base.errors import EvaluationError
from trainer.config.schema import Config
from trainer.evaluation.metrics import SUMMARY
from trainer.export import published_models as published
from trainer.export.bundle import METADATA, WEIGHTS

NO_BASELINE = "none"  # value of evaluation.baseline for no comparison
_MODEL_FILES = (".pt", ".safetensors", ".onnx")


@models.dataclass(config={"strict": True}, frozen=True)
class Evaluation:
    """The inputs of an evaluation, read from its metrics.json."""

    fingerprint: str
    split: str
    predictions: str  # URI
    predictions_sha256: str  # `Predictions.digest`
    checkpoint: str  # URI


@dataclass(frozen=True)
class Baseline:
    """A model to compare with, and its evaluation, if any."""

    name: str
    model: str  # URI of a checkpoint or exported model; may be empty
    summary: Evaluation | None = None


def find_baseline(config: Config, shards_uri: str, data_root: str) -> Baseline | None:
    """Find the baseline: evaluation.baseline, else the current model of the data root."""
    uri = config.evaluation.baseline
    if uri == NO_BASELINE:
        return None
    if not uri:
        return _current_model(config, shards_uri, data_root) if data_root else None
    if uri.endswith(_MODEL_FILES):
        return Baseline(uri, uri)
    if summary := find_evaluation(uri):
        return Baseline(uri, summary.checkpoint, summary)
    if storage.exists(storage.join(uri, METADATA)):
        return Baseline(uri, uri)
    raise EvaluationError(
        f"the baseline {uri} is neither an evaluation nor a model",
        fix="set evaluation.baseline to the URI of a run folder, a best.pt or an exported model, or to "
        f"{NO_BASELINE} for no comparison",
    )


def _current_model(config: Config, shards_uri: str, data_root: str) -> Baseline | None:
    name = published.resolve_name(config.export.name, shards_uri)
    record = published.read_current(data_root, name)
    if record is None:
        return None
    # Shards are compared by name, because the data root may be mounted at another path.
    bundle = storage.join(published.model_folder(data_root, name), record.version)
    # Prefer weights to ONNX, so that a GPU can run the model.
    model = record.checkpoint if storage.exists(record.checkpoint) else storage.join(bundle, WEIGHTS)
    summary = find_evaluation(record.evaluation) if record.evaluation else None
    return Baseline(f"{name} {record.version}", model, summary)


def find_evaluation(uri: str) -> Evaluation | None:
    """Return the summary of an evaluation, or of a run's evaluation; None for other folders."""
    candidates = (storage.join(folder, SUMMARY) for folder in (uri, storage.join(uri, "evaluation")))
    file = next((candidate for candidate in candidates if storage.exists(candidate)), None)
    if file is None:
        return None
    summary = storage.read_model(file, Evaluation, "evaluate the model again")
    # The folder may have been copied with its predictions.
    copied = storage.join(storage.parent(file), summary.predictions.rpartition("/")[2])
    return replace(summary, predictions=copied) if storage.exists(copied) else summary
