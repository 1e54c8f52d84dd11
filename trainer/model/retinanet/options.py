"""Options of RetinaNet."""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from trainer.config.schema import ModelConfig
from trainer.config.types import STRICT, Depth, Fraction, Overrides, Shapes, Sizes, Width, as_integer

Backbone = Literal[
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnext50_32x4d",
    "resnext101_32x8d",
    "resnext101_64x4d",
]

_STAGES = 5
_PREFIXES = ("", "backbone.body.", "module.", "module.backbone.body.")


@dataclass(config=STRICT, frozen=True)
class RetinaNetOptions(ModelConfig):
    """RetinaNet: backbone, feature pyramid, heads, anchors, postprocessing."""

    library: ClassVar[str] = "torchvision"

    architecture: Literal["retinanet"] = "retinanet"
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
    """Overlap above which the weaker detection of a class is dropped. Raise it if objects of a class overlap
    in crowds, lower it if objects are found twice."""
    version: Literal["v1", "v2"] = "v2"
    """torchvision's retinanet_*_fpn (v1) or retinanet_*_fpn_v2: in v2 the heads have
    GroupNorm, P6 comes from C5 instead of P5, and boxes are trained on GIoU, not L1."""
    head_depth: Depth = 4
    """Number of convolutions in each head before the last one."""
    anchor_sizes: Annotated[Sizes, Field(min_length=5, max_length=5)] = field(
        default_factory=lambda: [32.0, 64.0, 128.0, 256.0, 512.0]
    )
    """Side of the smallest of three anchors on P3, P4, ...; five levels. For small objects halve them: an
    object should overlap an anchor by at least half."""
    aspect_ratios: Sizes = field(default_factory=lambda: [0.5, 1.0, 2.0])
    """Height over width of the anchors. For long objects, such as text or ships, add ratios like theirs."""

    def options_from_weights(self, config_json: Mapping[str, Any], shapes: Shapes) -> Overrides:
        """Return the ResNet width in the weights of a detector or classifier."""
        found = (shapes.get(f"{prefix}conv1.weight") for prefix in _PREFIXES)
        return next(({"backbone_width": sides[0]} for sides in found if sides), {})

    def unfreezing_options(self) -> Overrides:
        """Return overrides that disable the active freezing options, so that all weights are trained."""
        frozen = {"norm": "batch"} if self.norm == "frozen" else {}
        return frozen | ({"trainable_layers": _STAGES} if self.trainable_layers < _STAGES else {})
