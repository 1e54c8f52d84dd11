"""Types of a configuration's values, with their checks."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from trainer.base.errors import StorageError
from trainer.storage import check_uri

NO_WEIGHTS = "none"  # model.weights=none: random weights; as an override it also unfreezes all layers

FILL = 114  # default gray value of the padding, 0 to 255

Shapes = Mapping[str, Sequence[int]]
"""Shapes of tensors by name."""

Overrides = dict[str, Any]
"""Dotted configuration keys and their values, e.g. {"train.lr": 0.02}."""

STRICT = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False)
"""Pydantic settings of all configuration dataclasses, including the options of architectures."""


Resize = Literal["letterbox", "squash"]


class NetworkInput(NamedTuple):
    """The square input of a network, and how images are fitted into it."""

    size: int  # side of the square in pixels
    resize: Resize = "letterbox"  # see `LoaderConfig.resize`
    fill: int = FILL


def as_integer(value: Any) -> Any:
    """Accept 100.0 for 100: Kubeflow Pipelines turns nested integers into floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


CocoMetric = Literal[
    "coco/AP",
    "coco/AP50",
    "coco/AP75",
    "coco/APs",
    "coco/APm",
    "coco/APl",
    "coco/AR1",
    "coco/AR10",
    "coco/AR100",
    "coco/ARs",
    "coco/ARm",
    "coco/ARl",
]
ExportFormat = Literal["onnx", "onnx-int8", "raw"]
Precision = Literal["bf16", "fp16", "fp32"]
Int = Annotated[int, BeforeValidator(as_integer)]
Count = Annotated[int, BeforeValidator(as_integer), Field(ge=0)]
Positive = Annotated[int, BeforeValidator(as_integer), Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]
# Upper limits, so that the configuration in an untrusted checkpoint cannot exhaust memory.
Side = Annotated[int, BeforeValidator(as_integer), Field(ge=96, le=8192)]
Sizes = Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1, max_length=100)]
Width = Annotated[Positive, Field(le=2048)]
Depth = Annotated[Positive, Field(le=100)]
DetectionCount = Annotated[Positive, Field(le=100_000)]


_MIN_TILE = 64
_MAX_SIDES = 12  # 480 to 800 in steps of 32 are 11


def _check_ascending(value: list[float]) -> list[float]:
    if value[0] > value[1]:
        raise ValueError("the first number must not be above the second")
    return value


def _check_input_sides(value: list[int]) -> list[int]:
    wrong = [side for side in value if side % 32]
    if wrong:
        raise ValueError(f"{wrong[0]} is not a multiple of the stride 32: use {32 * round(wrong[0] / 32)}")
    if len(set(value)) > _MAX_SIDES:
        raise ValueError(
            f"{len(set(value))} different sides: {_MAX_SIDES} are allowed, because each may be compiled"
        )
    return value


def _check_tile_side(value: int) -> int:
    if 0 < value < _MIN_TILE:
        raise ValueError(f"the side of a tile must be at least {_MIN_TILE} pixels; 0 disables tiles")
    return value


TileSide = Annotated[Count, AfterValidator(_check_tile_side)]
EvaluationTile = Annotated[int, BeforeValidator(as_integer), Field(ge=-1), AfterValidator(_check_tile_side)]
InputSides = Annotated[list[Side], AfterValidator(_check_input_sides)]


def _check_uri(value: str) -> str:
    try:
        check_uri(value)
    except StorageError as error:
        raise ValueError(error.message) from None
    return value


Uri = Annotated[str, AfterValidator(_check_uri)]
WeightsUri = Annotated[Uri, AfterValidator(lambda value: "" if value == NO_WEIGHTS else value)]
Range = Annotated[Sizes, Field(min_length=2, max_length=2), AfterValidator(_check_ascending)]
