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
    """Number of channels of the backbone's first stage; 64 in published networks."""
    norm: Literal["batch", "frozen", "group"] = "batch"
    """Normalization of the backbone: BatchNorm, frozen BatchNorm or GroupNorm."""
    trainable_layers: Annotated[int, BeforeValidator(as_integer), Field(ge=0, le=_STAGES)] = _STAGES
    """Number of backbone stages to train, counted from the last; 5 trains all of them."""
    fpn_channels: Width = 256
    """Number of channels in the feature pyramid and the heads."""
    nms_threshold: Fraction = 0.5
    """IoU above which NMS drops the detection with the lower score. Raise it if objects of a class overlap in
    crowds; lower it if objects are detected twice."""
    version: Literal["v1", "v2"] = "v2"
    """torchvision's retinanet_*_fpn (v1) or retinanet_*_fpn_v2 (v2): in v2 the heads have GroupNorm, P6 comes
    from C5 instead of P5, and the box loss is GIoU instead of L1."""
    head_depth: Depth = 4
    """Number of convolutions in each head before the output layer."""
    anchor_sizes: Annotated[Sizes, Field(min_length=5, max_length=5)] = field(
        default_factory=lambda: [32.0, 64.0, 128.0, 256.0, 512.0]
    )
    """Sides of the smallest of three anchors on each of the five levels P3 to P7, in pixels. Halve them for
    small objects: an object should overlap an anchor with an IoU of at least 0.5."""
    aspect_ratios: Sizes = field(default_factory=lambda: [0.5, 1.0, 2.0])
    """Aspect ratios of the anchors (height / width). For long objects, such as text or ships, add theirs."""

    def options_from_weights(self, config_json: Mapping[str, Any], shapes: Shapes) -> Overrides:
        """Return `backbone_width` as in the weights of a detector or classifier."""
        found = (shapes.get(f"{prefix}conv1.weight") for prefix in _PREFIXES)
        return next(({"backbone_width": sides[0]} for sides in found if sides), {})

    def unfreezing_options(self) -> Overrides:
        """Return the freezing options in use, with values that train all weights."""
        frozen = {"norm": "batch"} if self.norm == "frozen" else {}
        return frozen | ({"trainable_layers": _STAGES} if self.trainable_layers < _STAGES else {})
