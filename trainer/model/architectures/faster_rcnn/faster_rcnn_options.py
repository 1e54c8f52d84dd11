"""Options and recipe of Faster R-CNN."""

from dataclasses import field
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from trainer.config.schema import Config, LoaderConfig, TrainConfig
from trainer.config.types import STRICT, Positive, Sizes
from trainer.model.pyramid_options import PyramidOptions


@dataclass(config=STRICT, frozen=True)
class FasterRcnnOptions(PyramidOptions):
    """Faster R-CNN v2: a first stage proposes boxes, a second one classifies them."""

    stride: ClassVar[int] = 32
    published: ClassVar[str] = "FasterRCNN_"

    architecture: Literal["faster_rcnn"] = "faster_rcnn"
    anchor_sizes: Annotated[Sizes, Field(min_length=5, max_length=5)] = field(
        default_factory=lambda: [32.0, 64.0, 128.0, 256.0, 512.0]
    )
    """Side of the anchors on P2, P3, ...; five levels."""
    aspect_ratios: Sizes = field(default_factory=lambda: [0.5, 1.0, 2.0])
    """Height over width of the anchors."""
    proposals: Positive = 1000
    """Proposals of each level before their suppression, and of an image after it; twice as many in
    training."""
    trained_proposals: Positive = 512
    """Number of proposals per image that train the second stage; a quarter of them are objects."""
    head_depth: Positive = 4
    """Convolutions of the second stage."""
    head_width: Positive = 1024
    """Features of a proposal after the convolutions."""
    topk_candidates: Positive = 2000
    """Maximum number of pairs of proposal and class before suppression."""


def faster_rcnn_r50() -> Config:
    """Faster R-CNN v2 on COCO: torchvision's recipe of 400 epochs for 32 GPUs (46.7 AP, published).

    Source: pull request 5763 of pytorch/vision; docs/published.md compares all settings. It starts from
    random weights.
    """
    return Config(
        recipe="faster_rcnn_r50",
        loader=LoaderConfig(image_size=1120, sizes=[1024], scale=[0.1, 2.0], scale_draw="uniform"),
        model=FasterRcnnOptions(sync_batchnorm=True),
        train=TrainConfig(
            epochs=400, batch_size=2, global_batch=64, lr_batch=64, optimizer="sgd", lr=0.1, momentum=0.9,
            weight_decay=4e-5, norm_weight_decay=4e-5, bias_weight_decay=4e-5, schedule="multistep",
            milestones=[352 / 400, 384 / 400], validate_every=10,
        ),
    )  # fmt: skip
