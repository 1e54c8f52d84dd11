"""Recipes of RetinaNet."""

from dataclasses import replace

from trainer.config.schema import Config, DataConfig, EvaluationConfig, LoaderConfig, TrainConfig
from trainer.model.retinanet.options import RetinaNetOptions

_RESNET18 = "torchvision:ResNet18_Weights.IMAGENET1K_V1"
_RESNET50 = "torchvision:ResNet50_Weights.IMAGENET1K_V2"

_SLIM = RetinaNetOptions(
    backbone="resnet18",
    backbone_width=24,
    fpn_channels=32,
    head_depth=2,
    anchor_sizes=[16.0, 32.0, 64.0, 128.0, 256.0],
)


def debug() -> Config:
    """A narrow detector that learns the built-in sample data in less than four minutes on two cores."""
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
    """A narrow detector trained from scratch, for a few hundred images on a CPU."""
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
    """`small` with a ResNet18 of standard width and its ImageNet weights (45 MB)."""
    scratch, model = small(), replace(_SLIM, backbone_width=64, weights=_RESNET18)
    return replace(scratch, recipe="small_pretrained", model=model, train=replace(scratch.train, lr=1e-3))


def coco_r50() -> Config:
    """RetinaNet v2 on COCO: torchvision's recipe of 26 epochs on 8 GPUs, whose weights reach 41.5 AP.

    Source: https://github.com/pytorch/vision/pull/5756; docs/published.md compares all settings. The recipe
    has not been run with this code.
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
    """RetinaNet on Open Images V7: 600 classes, with a backbone pretrained on ImageNet."""
    return Config(
        recipe="openimages_r50",
        loader=LoaderConfig(image_size=800, workers=4, scale=[0.8, 1.25]),
        model=RetinaNetOptions(weights=_RESNET50, detections_per_image=300),
        train=TrainConfig(
            epochs=12, batch_size=4, optimizer="sgd", lr=0.02, schedule="cosine", warmup_steps=2000
        ),
    )


def mlperf() -> Config:
    """MLPerf Training's detector, ResNeXt50-32x4d on 264 classes: 34.0 mAP in 4 to 6 epochs.

    Source: single_stage_detector of github.com/mlcommons/training; docs/published.md compares all settings.
    All 20 reference runs reached 0.34 after 4 epochs at 256 images per step, and all 10 after 6 at 1024
    (mlcommons/logging, rcp_checker/training_3.0.0/rcps_ssd.json). The recipe has not been run with this code.
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
