"""Named whole configurations. Each recipe is a function that returns all of it."""

from typing import Any

import yaml

from trainer import storage
from trainer.base.bounded_text import yaml_value
from trainer.base.errors import ConfigError
from trainer.config.parsing import check_frozen, with_overrides
from trainer.config.schema import (
    Config,
    DataConfig,
    EvaluationConfig,
    LoaderConfig,
    TrainConfig,
    architectures,
)
from trainer.model.architectures.detr.detr_options import DFineOptions
from trainer.model.architectures.faster_rcnn.faster_rcnn_options import FasterRcnnOptions
from trainer.model.architectures.fcos.fcos_options import FcosOptions
from trainer.model.architectures.retinanet.retinanet_options import RetinaNetOptions

_FLOOR = ["coco/AP50 >= 0.1"]
"""Gate of recipes for sets of one's own: what an untrained detector finds by chance stays below it."""
_MINUTES, _GPU_MINUTES = 30.0, 240.0
"""How long a run of such a recipe may take: on a CPU, from scratch; on GPUs, from published weights."""
_RESNET50 = "torchvision:ResNet50_Weights.IMAGENET1K_V2"


def debug() -> Config:
    """A narrow detector that learns the built-in sample in two to four minutes on two cores."""
    return Config(
        recipe="debug",
        data=DataConfig(shard_bytes=2 * 1024 * 1024, processes=2),
        loader=LoaderConfig(image_size=160, workers=1, scale=[0.9, 1.1]),
        model=_narrow(width=24, anchor_sizes=[16.0, 32.0, 64.0, 128.0, 256.0]),
        train=TrainConfig(
            epochs=12, batch_size=4, optimizer="adamw", lr=3e-3, weight_decay=0.01, warmup_steps=50,
            clip_norm=5.0, ema_decay=0.98, validate_every=3, checkpoint_minutes=1.0,
            compile="off",
        ),
        evaluation=EvaluationConfig(gate=["coco/AP50 >= 0.3"]),
    )  # fmt: skip


def small() -> Config:
    """A slim detector from scratch, for a set of a few hundred images on a CPU."""
    return Config(
        recipe="small",
        data=DataConfig(shard_bytes=8 * 1024 * 1024),
        loader=LoaderConfig(
            image_size=320, workers=1, scale=[0.8, 1.25],
            brightness=0.2, contrast=0.2, saturation=0.2, hue=0.02,
        ),
        model=_narrow(width=24, anchor_sizes=[16.0, 32.0, 64.0, 128.0, 256.0]),
        train=TrainConfig(
            epochs=45, minutes=_MINUTES, batch_size=4, optimizer="adamw", lr=3e-3, weight_decay=0.01,
            warmup_steps=50, clip_norm=5.0, ema_decay=0.99, validate_every=9, checkpoint_minutes=1.0,
            compile="off",
        ),
        evaluation=EvaluationConfig(gate=list(_FLOOR)),
    )  # fmt: skip


def _narrow(width: int, anchor_sizes: list[float]) -> RetinaNetOptions:
    return RetinaNetOptions(
        backbone="resnet18", backbone_width=width, fpn_channels=32, head_depth=2, anchor_sizes=anchor_sizes
    )


def coco_r50() -> Config:
    """RetinaNet v2 on COCO: torchvision's recipe of 26 epochs on 8 GPUs, whose weights have 41.5 AP.

    https://github.com/pytorch/vision/pull/5756: AdamW 1e-4, drops at epochs 16 and 22, decay 0.05 (norms 0),
    multi-scale (shorter sides from 480 to 800, the longer one 1333 at most), SyncBN, 8 x 2 images, the
    backbone of IMAGENET1K_V2 of which the last three stages are trained. Here images lie in a square: 1088
    holds 800 x 1088, a photograph of 3:4, the shorter sides of wider ones are smaller. bf16 in place of
    fp32. It was not run with this code.
    """
    return Config(
        recipe="coco_r50",
        loader=LoaderConfig(image_size=1088, scale=[0.6, 1.0], scale_draw="uniform"),
        model=RetinaNetOptions(weights=_RESNET50, trainable_layers=3, sync_batchnorm=True),
        train=TrainConfig(
            epochs=26, batch_size=4, global_batch=16, lr_batch=16, optimizer="adamw", lr=1e-4,
            weight_decay=0.05, bias_weight_decay=0.05, schedule="multistep", milestones=[16 / 26, 22 / 26],
            checkpoint_minutes=10.0,
        ),
    )  # fmt: skip


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

    https://github.com/mlcommons/training/tree/master/single_stage_detector: Adam 1e-4, no decay, one epoch
    of warm-up and then no change, 8 x 32 images of 800 x 800, FrozenBN, the last three of the backbone's five
    stages trained. 20 of 20 runs of the reference had 0.34 after 4 epochs at 256 images a step, and 10
    of 10 after 6 at 1024 (mlcommons/logging, rcp_checker/training_3.0.0/rcps_ssd.json). It squeezes images
    into the square, here their aspect is kept; bf16 in place of fp16. It was not run with this code.
    """
    return Config(
        recipe="mlperf",
        loader=LoaderConfig(image_size=800),
        model=RetinaNetOptions(
            version="v1", backbone="resnext50_32x4d", norm="frozen", trainable_layers=3,
            weights="torchvision:ResNeXt50_32X4D_Weights.IMAGENET1K_V1", detections_per_image=300,
        ),
        train=TrainConfig(
            epochs=6, batch_size=32, global_batch=256, lr_batch=256, optimizer="adam", lr=1e-4,
            weight_decay=0.0, warmup_epochs=1.0, schedule="multistep", milestones=[],
        ),
    )  # fmt: skip


def fcos_r50() -> Config:
    """FCOS on COCO: torchvision's recipe of 26 epochs for 8 GPUs (39.2 AP, published).

    Source: torchvision's references/detection/README.md and FCOS_ResNet50_FPN_Weights.COCO_V1. There the
    shorter side has 800 pixels, here the image fits into a square of 1024.
    """
    return Config(
        recipe="fcos_r50",
        loader=LoaderConfig(image_size=1024),
        model=FcosOptions(
            norm="frozen", trainable_layers=3, weights="torchvision:ResNet50_Weights.IMAGENET1K_V1"
        ),
        train=TrainConfig(
            epochs=26, batch_size=2, optimizer="sgd", lr=0.01, momentum=0.9, weight_decay=1e-4,
            norm_weight_decay=1e-4, bias_weight_decay=1e-4, schedule="multistep",
            milestones=[16 / 26, 22 / 26], lr_batch=16,
        ),
    )  # fmt: skip


def faster_rcnn_r50() -> Config:
    """Faster R-CNN v2 on COCO: torchvision's recipe of 400 epochs for 32 GPUs (46.7 AP, published).

    Source: pull request 5763 of pytorch/vision and FasterRCNN_ResNet50_FPN_V2_Weights.COCO_V1. Its
    large-scale jitter and its length are for random weights, which it starts from. There the shorter side
    has 800 pixels in the evaluation, here the image fits into a square of 1024.
    """
    return Config(
        recipe="faster_rcnn_r50",
        loader=LoaderConfig(image_size=1024, scale=[0.1, 2.0], scale_draw="uniform"),
        model=FasterRcnnOptions(sync_batchnorm=True),
        train=TrainConfig(
            epochs=400, batch_size=2, optimizer="sgd", lr=0.1, momentum=0.9, weight_decay=4e-5,
            norm_weight_decay=4e-5, bias_weight_decay=4e-5, schedule="multistep",
            milestones=[352 / 400, 384 / 400], validate_every=10, lr_batch=64,
        ),
    )  # fmt: skip


def finetune() -> Config:
    """From torchvision's COCO weights to a set of one's own, on one or a few GPUs."""
    return Config(
        recipe="finetune",
        loader=LoaderConfig(image_size=800, scale=[0.7, 1.4], brightness=0.1, contrast=0.1),
        model=RetinaNetOptions(
            norm="frozen", trainable_layers=3,
            weights="torchvision:RetinaNet_ResNet50_FPN_V2_Weights.COCO_V1",
        ),
        train=TrainConfig(
            epochs=20, minutes=_GPU_MINUTES, batch_size=4, optimizer="adamw", lr=1e-4, weight_decay=0.05,
            warmup_steps=200, clip_norm=1.0, ema_decay=0.999,
        ),
        evaluation=EvaluationConfig(gate=list(_FLOOR)),
    )  # fmt: skip


def dfine_small() -> Config:
    """A narrow D-FINE-N from scratch, for a set of a few hundred images on a CPU.

    In fp32: bf16 makes its many small operations slower. Fewer queries than published, which cost time each.
    """
    return Config(
        recipe="dfine_small",
        data=DataConfig(shard_bytes=8 * 1024 * 1024),
        loader=LoaderConfig(
            image_size=320, workers=1, scale=[0.8, 1.25],
            brightness=0.2, contrast=0.2, saturation=0.2, hue=0.02,
        ),
        model=DFineOptions(size="n", width=0.5, queries=60, denoising=30, backbone_lr=1.0),
        train=TrainConfig(
            epochs=45, minutes=_MINUTES, batch_size=4, optimizer="adamw", lr=1e-3, weight_decay=1e-4,
            warmup_steps=50, clip_norm=0.1, ema_decay=0.99, validate_every=9, checkpoint_minutes=1.0,
            compile="off", precision="fp32",
        ),
        evaluation=EvaluationConfig(gate=list(_FLOOR)),
    )  # fmt: skip


def dfine_s() -> Config:
    """D-FINE-S on COCO by its authors' schedule: 48.5 AP with theirs, on 8 GPUs.

    github.com/Peterande/D-FINE (4a1f73a), configs/dfine/dfine_hgnetv2_s_coco.yml and its README: 132 epochs,
    the last 12 plain, 32 images a step. Theirs goes back to the best weights before the plain epochs, changes
    the images' sides, and draws 640 more often than the other sizes; ours keeps the sides' proportion.
    """
    return Config(
        recipe="dfine_s",
        loader=_dfine_views([576, 608, 640, 672, 704], plain_epochs=12),
        model=DFineOptions(
            size="s", weights="hf:timm/hgnetv2_b0.ssld_stage1_in22k_in1k", backbone_lr=0.5,
            sync_batchnorm=True, score_threshold=0.001,
        ),
        train=_dfine_training(epochs=132, lr=2e-4, weight_decay=1e-4),
    )  # fmt: skip


def dfine_l() -> Config:
    """D-FINE-L on COCO by its authors' schedule: 54.0 AP with theirs, on 8 GPUs.

    github.com/Peterande/D-FINE (4a1f73a), configs/dfine/dfine_hgnetv2_l_coco.yml and its README: 80 epochs,
    the last 8 plain, 32 images a step; what differs is as for dfine_s.
    """
    return Config(
        recipe="dfine_l",
        loader=_dfine_views([480, 544, 608, 640, 672, 736, 800], plain_epochs=8),
        model=DFineOptions(
            size="l", weights="hf:timm/hgnetv2_b4.ssld_stage1_in22k_in1k", backbone_lr=0.05,
            frozen_norm=True, frozen_stem=True, sync_batchnorm=True, score_threshold=0.001,
        ),
        train=_dfine_training(epochs=80, lr=2.5e-4, weight_decay=1.25e-4),
    )  # fmt: skip


def dfine_finetune() -> Config:
    """From D-FINE-S's weights of Objects365 and COCO to a set of one's own, on one or a few GPUs."""
    return Config(
        recipe="dfine_finetune",
        loader=LoaderConfig(
            image_size=640, scale=[0.7, 1.4], brightness=0.1, contrast=0.1, saturation=0.1, plain_epochs=4
        ),
        model=DFineOptions(size="s", weights="hf:ustc-community/dfine-small-obj2coco", backbone_lr=0.5),
        train=TrainConfig(
            epochs=30, minutes=_GPU_MINUTES, batch_size=8, global_batch=16, optimizer="adamw", lr=1e-4,
            weight_decay=1e-4, warmup_steps=200, clip_norm=0.1, ema_decay=0.999, compile="off",
        ),
        evaluation=EvaluationConfig(gate=list(_FLOOR)),
    )  # fmt: skip


def _dfine_views(sizes: list[int], plain_epochs: int) -> LoaderConfig:
    """What D-FINE's authors do to images, as near as our views come: zoom out, crop, colours, sizes."""
    return LoaderConfig(
        image_size=640, scale=[0.5, 2.0], brightness=0.125, contrast=0.5, saturation=0.5, hue=0.05,
        sizes=sizes, plain_epochs=plain_epochs,
    )  # fmt: skip


def _dfine_training(epochs: int, lr: float, weight_decay: float) -> TrainConfig:
    """A constant learning rate, and averaged weights that make up for its noise."""
    return TrainConfig(
        epochs=epochs, batch_size=4, global_batch=32, lr_batch=32, optimizer="adamw", lr=lr,
        weight_decay=weight_decay, schedule="multistep", milestones=[1.0], warmup_steps=500, clip_norm=0.1,
        ema_decay=0.9999, compile="off",
    )  # fmt: skip


RECIPES = {
    recipe.__name__: recipe
    for recipe in (
        debug, small, coco_r50, openimages_r50, mlperf, finetune,
        fcos_r50, faster_rcnn_r50, dfine_small, dfine_s, dfine_l, dfine_finetune,
    )
}  # fmt: skip

WITH_WEIGHTS: dict[str, dict[str, Any]] = {
    "small": {"model.weights": "torchvision:ResNet18_Weights.IMAGENET1K_V1", "train.lr": 1e-3}
}
"""Published weights that recipes start from where they are to be had, and what else is different then."""


def load(name: str, overrides: dict[str, Any] | None = None) -> Config:
    """Return the recipe of that name with dotted overrides applied.

    Raises:
        ConfigError: there is no such recipe, no such key, a value does not fit, or random weights
            would be frozen.
    """
    if name not in RECIPES:
        raise ConfigError(f"no recipe {name!r}", fix=f"use one of: {', '.join(RECIPES)}")
    config = with_overrides(RECIPES[name](), overrides or {}, where=f"overrides of recipe {name}")
    check_frozen(config)
    return config


_LONGEST = 100_000
_FILE_FIX = "write `recipe: small` and below it `set:` with lines like `  train.lr: 0.001`"


def named(name: str) -> tuple[str, dict[str, Any]]:
    """Return what a name or a file (*.yaml, *.yml) stands for: the recipe, and overrides of it.

    A file holds `recipe: NAME` and `set:`, dotted keys with their values, as `kubedet tune` writes it.

    Raises:
        ConfigError: the file is not of that form.
        StorageError: it cannot be read.
    """
    if not name.endswith((".yaml", ".yml")):
        return name, {}
    try:
        tree = yaml_value(storage.read_bytes(name), _LONGEST)
    except ValueError as error:
        raise ConfigError(f"{name} is not YAML: {str(error).splitlines()[0]}", fix=_FILE_FIX) from None
    sound = (
        isinstance(tree, dict) and isinstance(tree.get("recipe"), str) and not tree.keys() - {"recipe", "set"}
    )
    overrides = (tree.get("set") or {}) if sound else None
    if not isinstance(overrides, dict) or not all(isinstance(key, str) for key in overrides):
        raise ConfigError(f"{name} is not a recipe's file", fix=_FILE_FIX)
    load(tree["recipe"], overrides)
    return tree["recipe"], overrides


def file_text(name: str, overrides: dict[str, Any]) -> str:
    """Return the text of a file that `named` reads."""
    return yaml.safe_dump({"recipe": name, "set": overrides}, sort_keys=False)


def load_here(name: str, overrides: dict[str, Any] | None = None) -> Config:
    """Return what `load` does, where it is to be used: before hours of work that come first.

    Raises:
        ConfigError: as `load`, or what the detector needs is not installed here.
    """
    config = load(name, overrides)
    architectures.require(config.model.architecture)
    return config
