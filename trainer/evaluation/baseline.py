"""The baseline of a comparison: the last model that passed, or what evaluation.baseline names."""

from dataclasses import dataclass
from typing import Any

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
class Baseline:
    """A model and, if there is one, metrics.json of its evaluation."""

    name: str
    model: str
    """URI of a checkpoint or exported model; may be empty."""
    summary: dict[str, Any] | None = None

    def predictions(self, fingerprint: str, split: str) -> Predictions | None:
        """Return the stored predictions of the same images, or None."""
        if self.summary is None or not self.is_scored_on(fingerprint, split):
            return None
        uri = self.summary["predictions"]
        return Predictions.read(uri)[0] if storage.exists(uri) else None

    def is_scored_on(self, fingerprint: str, split: str) -> bool:
        if self.summary is None:
            return False
        return (self.summary["fingerprint"], self.summary["split"]) == (fingerprint, split)


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
        return Baseline(uri, summary["checkpoint"], summary)
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


def find_summary(uri: str) -> dict[str, Any] | None:
    """Return metrics.json of an evaluation, or of the evaluation of a run; None if the folder is neither."""
    candidates = (storage.join(folder, SUMMARY) for folder in (uri, storage.join(uri, "evaluation")))
    file = next((candidate for candidate in candidates if storage.exists(candidate)), None)
    if file is None:
        return None
    summary = storage.read_json(file)
    keys = ("fingerprint", "split", "predictions", "checkpoint")
    if not isinstance(summary, dict) or not all(isinstance(summary.get(key), str) for key in keys):
        raise EvaluationError(f"{file} is not of an evaluation", fix="evaluate that model again")
    # The folder may have been copied together with its predictions.
    copied = storage.join(storage.parent(file), summary["predictions"].rpartition("/")[2])
    return {**summary, "predictions": copied} if storage.exists(copied) else summary
