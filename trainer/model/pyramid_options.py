"""Options that all detectors on a residual network with a feature pyramid have."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from trainer.config.schema import ModelConfig
from trainer.config.types import STRICT, Detected, Fraction, Overrides, Width, as_integer

Backbone = Literal[
    "resnet18", "resnet34", "resnet50", "resnet101",
    "resnext50_32x4d", "resnext101_32x8d", "resnext101_64x4d",
]  # fmt: skip

_STAGES = 5
_PREFIXES = ("", "backbone.body.", "module.", "module.backbone.body.")


@dataclass(config=STRICT, frozen=True)
class PyramidOptions(ModelConfig):
    """A detector on a residual network and its feature pyramid."""

    library: ClassVar[str] = "torchvision"

    backbone: Backbone = "resnet50"
    """Residual network that extracts the features."""
    backbone_width: Annotated[Width, Field(le=512)] = 64
    """Channels of the backbone's first stage; 64 is the published network."""
    norm: Literal["batch", "frozen", "group"] = "batch"
    """Normalization of the backbone: BatchNorm, frozen BatchNorm or GroupNorm."""
    trainable_layers: Annotated[int, BeforeValidator(as_integer), Field(ge=0, le=_STAGES)] = _STAGES
    """Backbone stages that are trained, counted from the last; 5 is all of it."""
    fpn_channels: Width = 256
    """Width of the feature pyramid and of the heads."""
    nms_threshold: Fraction = 0.5
    """Overlap above which the weaker detection of a class is dropped."""
    topk_candidates: Detected = 1000
    """Maximum number of candidates per pyramid level before suppression."""

    def implied(self, described: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> Overrides:
        """The width of the residual network in a detector's or classifier's weights."""
        found = (shapes.get(f"{prefix}conv1.weight") for prefix in _PREFIXES)
        return next(({"backbone_width": sides[0]} for sides in found if sides), {})

    def freezing(self) -> Overrides:
        """Return the options that freeze loaded weights, each with the value that trains them."""
        frozen = {"norm": "batch"} if self.norm == "frozen" else {}
        return frozen | ({"trainable_layers": _STAGES} if self.trainable_layers < _STAGES else {})
