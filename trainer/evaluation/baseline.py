"""The baseline of a comparison: evaluation.baseline, or the last model that passed."""

from dataclasses import dataclass, fields, replace

from trainer import storage
from trainer.base.errors import EvaluationError
from trainer.config.schema import Config
from trainer.data.shard_index import data_root_of
from trainer.evaluation.truth_and_predictions import Predictions
from trainer.export import published_models as published
from trainer.export.bundle import METADATA

NONE = "none"
"""Value of evaluation.baseline for no comparison."""
SUMMARY = "metrics.json"
_MODEL_FILES = (".pt", ".safetensors", ".onnx", ".pt2", ".xml")


@dataclass(frozen=True)
class EvaluationSummary:
    """The inputs of an evaluation, read from its metrics.json."""

    fingerprint: str
    split: str
    predictions: str
    """URI, as the following fields."""
    checkpoint: str
    shards: str = ""
    truth: str = ""
    """Ground truth, if there are no shards."""


@dataclass(frozen=True)
class Baseline:
    """A model and its evaluation, if any."""

    name: str
    model: str
    """URI of a checkpoint or exported model; may be empty."""
    summary: EvaluationSummary | None = None

    def predictions(self, fingerprint: str, split: str) -> Predictions | None:
        """Return the stored predictions of the same images, or None."""
        summary = self.summary
        if summary is None or (summary.fingerprint, summary.split) != (fingerprint, split):
            return None
        return Predictions.read(summary.predictions)[0] if storage.exists(summary.predictions) else None


def find(config: Config, shards_uri: str) -> Baseline | None:
    """Find the baseline: evaluation.baseline, else the current model of the data root of the shards."""
    uri = config.evaluation.baseline
    if uri == NONE:
        return None
    if not uri:
        return _current(data_root_of(shards_uri), published.name_for(config.export.name, shards_uri))
    if uri.endswith(_MODEL_FILES):
        return Baseline(uri, uri)
    if summary := find_summary(uri):
        return Baseline(uri, summary.checkpoint, summary)
    if storage.exists(storage.join(uri, METADATA)):
        return Baseline(uri, uri)
    raise EvaluationError(
        f"the baseline {uri} is neither an evaluation nor a model",
        fix="give evaluation.baseline the URI of a run's folder, its best.pt, or an exported model; "
        f"`{NONE}` compares with nothing",
    )


def _current(root: str, name: str) -> Baseline | None:
    record = published.current(root, name)
    if record is None:
        return None
    # By name: the data root may be mounted at another path.
    bundle = storage.join(published.folder(root, name), record.version)
    model = record.checkpoint if storage.exists(record.checkpoint) else bundle
    summary = find_summary(record.evaluation) if record.evaluation else None
    return Baseline(f"{name} {record.version}", model, summary)


def find_summary(uri: str) -> EvaluationSummary | None:
    """Return the summary of an evaluation or of a run's evaluation; None for other folders."""
    candidates = (storage.join(folder, SUMMARY) for folder in (uri, storage.join(uri, "evaluation")))
    file = next((candidate for candidate in candidates if storage.exists(candidate)), None)
    if file is None:
        return None
    record = storage.read_json(file)
    values = {}
    if isinstance(record, dict):
        names = [field.name for field in fields(EvaluationSummary)]
        values = {name: record[name] for name in names if isinstance(record.get(name), str)}
    try:
        summary = EvaluationSummary(**values)
    except TypeError:  # A value is missing.
        raise EvaluationError(f"{file} is not of an evaluation", fix="evaluate the model again") from None
    # The folder may have been copied with its predictions.
    copied = storage.join(storage.parent(file), summary.predictions.rpartition("/")[2])
    return replace(summary, predictions=copied) if storage.exists(copied) else summary
