"""FCOS' options."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from trainer.config.types import STRICT, Fraction, Positive
from trainer.model.pyramid_options import PyramidOptions


@dataclass(config=STRICT, frozen=True)
class FcosOptions(PyramidOptions):
    """FCOS: every place of the pyramid finds the object that it lies in, without anchors."""

    stride: ClassVar[int] = 32
    published: ClassVar[str] = "FCOS_"

    architecture: Literal["fcos"] = "fcos"
    """Kind of detector. Each has its own options: those of another are refused."""
    head_depth: Positive = 4
    """Convolutions in each head before its last."""
    center_radius: Annotated[float, Field(gt=0)] = 1.5
    """How far from an object's centre a place may be that learns to find it, in strides of its level."""
    score_threshold: Fraction = 0.2
    """Detections below this score are dropped."""
    nms_threshold: Fraction = 0.6
    """Overlap above which the weaker detection of a class is dropped."""
