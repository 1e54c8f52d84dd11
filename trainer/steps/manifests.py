"""The manifests that the steps of a run exchange. They are small and refer to data by URI."""

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field

from trainer import storage
from trainer.base.json_files import STRICT
from trainer.config.types import Overrides
from trainer.data.raw_manifest import RawManifest


class Manifest(BaseModel):
    """A manifest; `data_root` is the URI under which data and models are stored."""

    model_config = {**STRICT, "frozen": True, "ser_json_inf_nan": "constants"}

    data_root: str


class RawData(Manifest):
    """Images and annotations that the step `download` stored."""

    kind: Literal["raw data"] = "raw data"
    folder: RawManifest
    recipe: str
    overrides: Overrides


class NothingNew(Manifest):
    """The result of the step `download` if there is no reason to train."""

    kind: Literal["nothing new"] = "nothing new"
    since: str  # The model version or run that the source was compared with.
    found: str  # The differences from it.
    model: str  # Name of the model.
    model_version: str  # Its current version.


class Shards(Manifest):
    """Shards that the step `shard` wrote."""

    kind: Literal["shards"] = "shards"
    uri: str  # URI of the folder.
    fingerprint: str
    samples: dict[str, int]  # Number of images by split.
    boxes: dict[str, int]
    recipe: str
    overrides: Overrides

    @property
    def statistics(self) -> str:
        """URI of the page with the statistics of the shards."""
        return storage.join(self.uri, "statistics.html")


class TrainedModel(Manifest):
    """The result of the step `train`."""

    kind: Literal["trained model"] = "trained model"
    output: str  # URI of the run folder.
    shards: str  # URI of the folder of the shards.
    metrics: dict[str, float]  # Metrics of the best checkpoint on the validation images.

    @property
    def run(self) -> str:
        """Name of the run folder."""
        return run_name(self.output)

    @property
    def config(self) -> str:
        """URI of the run's configuration."""
        return storage.join(self.output, "config.json")

    @property
    def checkpoint(self) -> str:
        """URI of the best checkpoint."""
        return storage.join(self.output, "train", "best.pt")

    @property
    def evaluation(self) -> str:
        """URI of the folder of the model's evaluation."""
        return storage.join(self.output, "evaluation")


class Scores(Manifest):
    """The result of the step `evaluate`."""

    kind: Literal["scores"] = "scores"
    evaluation: str  # URI of the folder with the report and all results.
    model: str  # Name under which the model is published.
    metrics: dict[str, float]
    passed: bool  # Whether all gate rules passed.
    reason: str  # A line for each rule.
    rules: list[str]

    @property
    def defined_metrics(self) -> dict[str, float]:
        """The metrics that have a value."""
        return drop_undefined(self.metrics)


class Bundle(Manifest):
    """The result of the step `export`."""

    kind: Literal["bundle"] = "bundle"
    model: str  # URI of the published bundle.
    name: str
    model_version: str
    formats: list[str]
    metrics: dict[str, float]  # Metrics of the evaluation.
    gate: str  # A line for each rule of the gate.


M = TypeVar("M", bound=Manifest)
DOWNLOAD_RESULT: Any = Annotated[RawData | NothingNew, Field(discriminator="kind")]
"""Result of the step `download`, as the class to pass to `read`."""


def write(uri: str | Path, manifest: Manifest) -> None:
    """Write a manifest as JSON."""
    storage.write_bytes(str(uri), (manifest.model_dump_json(indent=2) + "\n").encode())


def read(uri: str | Path, kind: type[M]) -> M:
    """Read a manifest; raises DataError if it is not of the class `kind`."""
    return storage.read_model(str(uri), kind, "run the step that writes it again")


def drop_undefined(metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics that have a value: COCO metrics are -1 if there is nothing to score."""
    return {name: value for name, value in metrics.items() if value != -1}


def run_name(output: str) -> str:
    """Return the name of a run, given the URI of its folder."""
    return storage.absolute(output).rstrip("/").rpartition("/")[2]
