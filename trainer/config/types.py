"""Types of a configuration's values: what may stand under a key, and how it is checked."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationInfo

from trainer.base.errors import StorageError

URI_CHECK = "check of URIs"
"""Key of the validation context under which a reader gives its check of URIs: a function that raises
StorageError. So this module need not know of stores."""

NO_WEIGHTS = "none"
"""Value of model.weights for random ones: as an override it turns the freezing of layers off as well."""

Overrides = dict[str, Any]
"""Dotted configuration keys and their values, e.g. {"train.lr": 0.02}."""

STRICT = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False)
"""How every dataclass of a configuration is read; an architecture's options too."""


def integral(value: Any) -> Any:
    """Take 100.0 for 100: a pipeline engine turns nested integers into floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


CocoMetric = Literal[
    "coco/AP", "coco/AP50", "coco/AP75", "coco/APs", "coco/APm", "coco/APl",
    "coco/AR1", "coco/AR10", "coco/AR100", "coco/ARs", "coco/ARm", "coco/ARl",
]  # fmt: skip
ExportFormat = Literal["onnx", "onnx-int8", "torch-export", "openvino", "raw"]
Precision = Literal["bf16", "fp16", "fp32"]
Int = Annotated[int, BeforeValidator(integral)]
Count = Annotated[int, BeforeValidator(integral), Field(ge=0)]
Positive = Annotated[int, BeforeValidator(integral), Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]
Side = Annotated[int, BeforeValidator(integral), Field(ge=96)]
Sizes = Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1)]


def _ascending(value: list[float]) -> list[float]:
    if value[0] > value[1]:
        raise ValueError("the first number must not be above the second")
    return value


def _multiples(value: list[int]) -> list[int]:
    wrong = [side for side in value if side % 32]
    if wrong:
        raise ValueError(f"{wrong[0]} is no multiple of 32, the stride: use {32 * round(wrong[0] / 32)}")
    if len(set(value)) > 8:
        raise ValueError(f"{len(set(value))} different sides: 8 are the most, as each may be compiled")
    return value


Squares = Annotated[list[Side], AfterValidator(_multiples)]


def _possible(value: str, info: ValidationInfo) -> str:
    """Check a URI with the check that the reader of the configuration passes, if it passes one."""
    check: Callable[[str], None] | None = (info.context or {}).get(URI_CHECK)
    try:
        if check:
            check(value)
    except StorageError as error:
        raise ValueError(error.message) from None
    return value


def _none_is_empty(value: str) -> str:
    return "" if value == NO_WEIGHTS else value


Uri = Annotated[str, AfterValidator(_possible)]
WeightsUri = Annotated[Uri, AfterValidator(_none_is_empty)]
Range = Annotated[Sizes, Field(min_length=2, max_length=2), AfterValidator(_ascending)]
