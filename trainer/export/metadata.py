"""The content of model_metadata.json, the machine-readable description of a bundle."""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic.dataclasses import dataclass

from trainer.base.json_files import STRICT
from trainer.config.types import NetworkInput, Resize

REMEDY = "export the model again, or take another version"
_MAX_INPUT_SIZE = 8192  # preprocessing needs 15 bytes per pixel of the input square


def _check_time(value: str) -> str:
    if datetime.fromisoformat(value).tzinfo is None:
        raise ValueError("the time has no time zone")
    return value


@dataclass(config=STRICT, frozen=True)
class Input:
    """The model's input and the preprocessing that clients apply."""

    name: str
    dtype: str
    shape: list[int | str]
    input_size: Annotated[int, Field(gt=0, le=_MAX_INPUT_SIZE)]
    resize: Resize
    fill: Annotated[int, Field(ge=0, le=255)]
    preprocessing: str


@dataclass(config=STRICT, frozen=True)
class Outputs:
    """The model's outputs: names, number of rows, and meanings."""

    names: list[str]
    rows: int  # detections of an image
    boxes: str
    scores: str
    labels: str
    num: str


@dataclass(config=STRICT, frozen=True)
class Agreement:
    """Comparison of the detections of two models."""

    detections: int  # detections of the first model
    matched: float  # share of both models' detections that have a partner; 1 if there are no detections
    score_error: float  # largest difference of score between partners
    box_error: float  # largest difference of a coordinate between partners, pixels


@dataclass(config=STRICT, frozen=True)
class Check:
    """Result of the check of one exported file."""

    runtime: str
    images: int
    ap: float  # COCO AP of the file; -1 if the images have no boxes
    ap_change: float  # AP of the file minus AP of the trained model
    matches: Agreement


@dataclass(config=STRICT, frozen=True)
class ExportedFormat:
    """The files of a format; runtimes open the first one."""

    files: Annotated[list[str], Field(min_length=1)]
    outputs: list[str]
    bytes: dict[str, int]
    check: Check


@dataclass(config=STRICT, frozen=True)
class Origin:
    """The model's training data and checkpoint."""

    shards: str  # fingerprint
    checkpoint: str
    step: int | None
    epoch: int | None
    source: str = ""
    splits: dict[str, dict[str, int]] = Field(default_factory=dict)


@dataclass(config=STRICT, frozen=True)
class Evaluation:
    """Results of the evaluation; empty if the model was not evaluated."""

    split: str
    images: int
    evaluation: str  # URI of its folder, or ""
    values: dict[str, float]
    gate: str = ""
    per_class: dict[str, dict[str, int | float | None]] = Field(default_factory=dict)


@dataclass(config=STRICT, frozen=True)
class Metadata:
    """Content of model_metadata.json."""

    name: str
    model_version: str
    created: Annotated[str, AfterValidator(_check_time)]
    classes: Annotated[list[dict[str, Any]], Field(min_length=1)]  # id, name and original_id of each class
    input: Input
    outputs: Outputs
    architecture: dict[str, str]
    thresholds: dict[str, float]
    formats: dict[str, ExportedFormat]
    sha256: dict[str, str]  # hash of each file, by name
    versions: dict[str, str]
    config: Mapping[str, Any]  # training configuration
    trained_on: Origin
    metrics: Evaluation
    made_from: str = ""  # hash of all inputs
    kind: Literal["model"] = "model"
    version: Literal[2] = 2

    @model_validator(mode="after")
    def _check_classes(self) -> "Metadata":
        ids = [item.get("id") for item in self.classes]
        if sorted(value for value in ids if isinstance(value, int)) != list(range(len(ids))):
            raise ValueError("the ids of classes are not 0, 1, 2, ...")
        if not all(isinstance(item.get("name"), str) for item in self.classes):
            raise ValueError("a class has no name")
        return self

    @property
    def network_input(self) -> NetworkInput:
        """The square input of the network."""
        return NetworkInput(self.input.input_size, self.input.resize, self.input.fill)
