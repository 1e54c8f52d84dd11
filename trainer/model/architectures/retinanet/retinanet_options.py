"""Options and recipes of RetinaNet."""

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from trainer.config.schema import Config, DataConfig, EvaluationConfig, LoaderConfig, ModelConfig, TrainConfig
from trainer.config.types import STRICT, Depth, Detected, Fraction, Overrides, Sizes, Width, as_integer

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
_RESNET18 = "torchvision:ResNet18_Weights.IMAGENET1K_V1"
_RESNET50 = "torchvision:ResNet50_Weights.IMAGENET1K_V2"


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
    """Overlap above which the weaker detection of a class is dropped."""
    topk_candidates: Detected = 1000
    """Maximum number of candidates per pyramid level before suppression."""
    version: Literal["v1", "v2"] = "v2"
    """torchvision's retinanet_*_fpn (v1) or retinanet_*_fpn_v2: in v2 the heads have
    GroupNorm, P6 comes from C5 instead of P5, and boxes are trained on GIoU, not L1."""
    head_depth: Depth = 4
    """Number of convolutions in each head before the last one."""
    anchor_sizes: Annotated[Sizes, Field(min_length=5, max_length=5)] = field(
        default_factory=lambda: [32.0, 64.0, 128.0, 256.0, 512.0]
    )
    """Side of the smallest anchor on P3, P4, ...; five levels."""
    anchor_scales: Sizes = field(default_factory=lambda: [1.0, 2 ** (1 / 3), 2 ** (2 / 3)])
    """Sizes at each location, relative to the level's smallest anchor."""
    aspect_ratios: Sizes = field(default_factory=lambda: [0.5, 1.0, 2.0])
    """Height over width of the anchors."""
    box_loss: Literal["default", "l1", "smooth_l1", "giou"] = "default"
    """Box regression loss; default is the version's."""
    background_class: bool = False
    """Keep an output for class 0 that is never a target, as torchvision's own models have it
    (91 outputs for COCO, 601 for Open Images). Not needed to load their weights, nor to write
    weights for them: `python -m trainer weights`."""

    def misfit(self) -> str:
        """Return whether the weights are those of another detector of torchvision, judging by their name."""
        scheme, _, name = self.weights.partition(":")
        other = scheme == "torchvision" and "_FPN_" in name and not name.startswith("RetinaNet_")
        return f"{self.weights} are of another detector, not of {self.architecture}" if other else ""

    def implied(self, described: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> Overrides:
        """The width of the residual network in a detector's or classifier's weights."""
        found = (shapes.get(f"{prefix}conv1.weight") for prefix in _PREFIXES)
        return next(({"backbone_width": sides[0]} for sides in found if sides), {})

    def freezing(self) -> Overrides:
        """Return the options that freeze loaded weights, each with the value that trains them."""
        frozen = {"norm": "batch"} if self.norm == "frozen" else {}
        return frozen | ({"trainable_layers": _STAGES} if self.trainable_layers < _STAGES else {})


_SLIM = RetinaNetOptions(
    backbone="resnet18",
    backbone_width=24,
    fpn_channels=32,
    head_depth=2,
    anchor_sizes=[16.0, 32.0, 64.0, 128.0, 256.0],
)


def debug() -> Config:
    """A narrow detector that learns the built-in sample in less than four minutes on two cores."""
    return Config(
        recipe="debug",
        data=DataConfig(shard_bytes=2 * 1024 * 1024, processes=2),
        loader=LoaderConfig(image_size=128, workers=1, scale=[0.9, 1.1]),
        model=_SLIM,
        train=TrainConfig(
            epochs=30,
            minutes=3.0,
            batch_size=4,
            optimizer="adamw",
            lr=3e-3,
            weight_decay=0.01,
            warmup_steps=50,
            clip_norm=5.0,
            ema_decay=0.98,
            validate_every=10,
            checkpoint_minutes=1.0,
            compile="off",
        ),
        evaluation=EvaluationConfig(gate=["coco/AP50 >= 0.1"]),
    )


def small() -> Config:
    """A slim detector from scratch, for a set of a few hundred images on a CPU."""
    quick = debug()
    return replace(
        quick,
        recipe="small",
        data=DataConfig(shard_bytes=8 * 1024 * 1024),
        loader=LoaderConfig(
            image_size=320,
            workers=1,
            scale=[0.8, 1.25],
            brightness=0.2,
            contrast=0.2,
            saturation=0.2,
            hue=0.02,
        ),
        train=replace(quick.train, epochs=45, minutes=30.0, ema_decay=0.99, validate_every=9),
        evaluation=EvaluationConfig(gate=["coco/AP50 >= 0.1"]),
    )


def small_pretrained() -> Config:
    """`small` on a ResNet18 of the usual width, from its ImageNet weights (45 MB)."""
    scratch, model = small(), replace(_SLIM, backbone_width=64, weights=_RESNET18)
    return replace(scratch, recipe="small_pretrained", model=model, train=replace(scratch.train, lr=1e-3))


def coco_r50() -> Config:
    """RetinaNet v2 on COCO: torchvision's recipe of 26 epochs on 8 GPUs, whose weights have 41.5 AP.

    https://github.com/pytorch/vision/pull/5756; docs/published.md compares all settings. It was not run with
    this code.
    """
    return Config(
        recipe="coco_r50",
        loader=LoaderConfig(image_size=1120, scale=[0.6, 1.0], scale_draw="uniform"),
        model=RetinaNetOptions(
            weights=_RESNET50, trainable_layers=3, sync_batchnorm=True, detections_per_image=300
        ),
        train=TrainConfig(
            epochs=26,
            batch_size=4,
            global_batch=16,
            lr_batch=16,
            optimizer="adamw",
            lr=1e-4,
            weight_decay=0.05,
            bias_weight_decay=0.05,
            schedule="multistep",
            milestones=[16 / 26, 22 / 26],
            checkpoint_minutes=10.0,
        ),
    )


def openimages_r50() -> Config:
    """RetinaNet on Open Images V7: an output for each of the 600 classes, a backbone from ImageNet."""
    return Config(
        recipe="openimages_r50",
        loader=LoaderConfig(image_size=800, workers=4, scale=[0.8, 1.25]),
        model=RetinaNetOptions(weights=_RESNET50, detections_per_image=300),
        train=TrainConfig(
            epochs=12, batch_size=4, optimizer="sgd", lr=0.02, schedule="cosine", warmup_steps=2000
        ),
    )


def mlperf() -> Config:
    """MLPerf Training's detector: ResNeXt50-32x4d on 264 classes, 34.0 mAP in 4 to 6 epochs there.

    single_stage_detector of github.com/mlcommons/training; docs/published.md compares all settings. 20 of 20
    reference runs had 0.34 after 4 epochs at 256 images a step, 10 of 10 after 6 at 1024 (mlcommons/logging,
    rcp_checker/training_3.0.0/rcps_ssd.json). It was not run with this code.
    """
    return Config(
        recipe="mlperf",
        loader=LoaderConfig(image_size=800, resize="squash"),
        model=RetinaNetOptions(
            version="v1",
            backbone="resnext50_32x4d",
            norm="frozen",
            trainable_layers=3,
            weights="torchvision:ResNeXt50_32X4D_Weights.IMAGENET1K_V1",
            detections_per_image=300,
        ),
        train=TrainConfig(
            epochs=6,
            batch_size=32,
            global_batch=256,
            lr_batch=256,
            optimizer="adam",
            lr=1e-4,
            weight_decay=0.0,
            warmup_epochs=1.0,
            schedule="multistep",
            milestones=[],
        ),
    )


def finetune() -> Config:
    """Fine-tune torchvision's COCO weights on your data, on one or a few GPUs."""
    return Config(
        recipe="finetune",
        loader=LoaderConfig(image_size=800, scale=[0.7, 1.4], brightness=0.1, contrast=0.1),
        model=RetinaNetOptions(
            norm="frozen",
            trainable_layers=3,
            weights="torchvision:RetinaNet_ResNet50_FPN_V2_Weights.COCO_V1",
        ),
        train=TrainConfig(
            epochs=20,
            minutes=240.0,
            batch_size=4,
            optimizer="adamw",
            lr=1e-4,
            weight_decay=0.05,
            warmup_steps=200,
            clip_norm=1.0,
            ema_decay=0.999,
        ),
        evaluation=EvaluationConfig(gate=["coco/AP50 >= 0.1"]),
    )
