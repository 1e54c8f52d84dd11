"""Options and recipe of FCOS."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from trainer.config.schema import Config, LoaderConfig, TrainConfig
from trainer.config.types import STRICT, Fraction, Positive
from trainer.model.pyramid_options import PyramidOptions


@dataclass(config=STRICT, frozen=True)
class FcosOptions(PyramidOptions):
    """FCOS: every location of the pyramid finds the object around it, without anchors."""

    stride: ClassVar[int] = 32
    published: ClassVar[str] = "FCOS_"

    architecture: Literal["fcos"] = "fcos"
    head_depth: Positive = 4
    """Number of convolutions in each head before the last one."""
    center_radius: Annotated[float, Field(gt=0)] = 1.5
    """Maximum distance of a location from the center of its object, in strides of its level."""
    score_threshold: Fraction = 0.2
    nms_threshold: Fraction = 0.6


def fcos_r50() -> Config:
    """FCOS on COCO: torchvision's recipe of 26 epochs for 8 GPUs (39.2 AP, published).

    Source: torchvision's references/detection/README.md; docs/published.md compares all settings.
    """
    return Config(
        recipe="fcos_r50",
        loader=LoaderConfig(image_size=1120),
        model=FcosOptions(
            norm="frozen", trainable_layers=3, weights="torchvision:ResNet50_Weights.IMAGENET1K_V1"
        ),
        train=TrainConfig(
            epochs=26, batch_size=2, global_batch=16, lr_batch=16, optimizer="sgd", lr=0.01, momentum=0.9,
            weight_decay=1e-4, norm_weight_decay=1e-4, bias_weight_decay=1e-4, schedule="multistep",
            milestones=[16 / 26, 22 / 26],
        ),
    )  # fmt: skip
