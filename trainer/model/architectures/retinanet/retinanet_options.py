"""RetinaNet's options."""

from dataclasses import field
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from trainer.config.types import STRICT, Positive, Sizes
from trainer.model.pyramid_options import PyramidOptions


@dataclass(config=STRICT, frozen=True)
class RetinaNetOptions(PyramidOptions):
    """RetinaNet: backbone, feature pyramid, heads, anchors, postprocessing."""

    published: ClassVar[str] = "RetinaNet_"
    federated: ClassVar[bool] = True

    architecture: Literal["retinanet"] = "retinanet"
    """Kind of detector. Each has its own options: those of another are refused."""
    version: Literal["v1", "v2"] = "v2"
    """torchvision's retinanet_*_fpn (v1) or retinanet_*_fpn_v2: in v2 the heads have
    GroupNorm, P6 comes from C5 instead of P5, and boxes are trained on GIoU, not L1."""
    head_depth: Positive = 4
    """Convolutions in each head before its last."""
    anchor_sizes: Annotated[Sizes, Field(min_length=5, max_length=5)] = field(
        default_factory=lambda: [32.0, 64.0, 128.0, 256.0, 512.0]
    )
    """Side of the smallest anchor on P3, P4, ...; five levels."""
    anchor_scales: Sizes = field(default_factory=lambda: [1.0, 2 ** (1 / 3), 2 ** (2 / 3)])
    """Sizes at each place, relative to the level's smallest anchor."""
    aspect_ratios: Sizes = field(default_factory=lambda: [0.5, 1.0, 2.0])
    """Height over width of the anchors."""
    box_loss: Literal["default", "l1", "smooth_l1", "giou"] = "default"
    """Box regression loss; default is the version's."""
    background_class: bool = False
    """Keep an output for class 0 that is never a target, as torchvision's own models have it
    (91 outputs for COCO, 601 for Open Images). Not needed to load their weights, nor to write
    weights for them: `python -m trainer weights`."""
