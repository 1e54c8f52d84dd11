"""Recipes of D-FINE and RT-DETRv2; docs/published.md lists their sources."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trainer.config.schema import Config, EvaluationConfig
from trainer.model.detr.recipes import published_augmentation, published_training
from trainer.model.dfine.options import DFineOptions, RTDetrOptions
from trainer.model.retinanet.recipes import small

PublishedSettings = tuple[str, str, int, int, int, float, dict[str, Any]]
_STORAGE = "https://github.com/lyuwenyu/storage/releases/download/v0.1/"
"""Backbone weights by RT-DETR's authors, from `src/nn/backbone/presnet.py`."""


def dfine_small() -> Config:
    """A narrow D-FINE-N from scratch, for a few hundred images on a CPU.

    It uses the augmentation and schedule of `small`, fewer queries than published, and fp32, because bf16
    slows down its many small operations.
    """
    slim = small()
    return replace(
        slim,
        recipe="dfine_small",
        model=DFineOptions(size="n", width=0.5, queries=60, denoising=30, backbone_lr=1.0),
        train=replace(slim.train, lr=1e-3, weight_decay=1e-4, clip_norm=0.1, precision="fp32"),
    )


def dfine_finetune() -> Config:
    """Fine-tune D-FINE-S, pretrained on Objects365 and COCO, on your data with one or a few GPUs."""
    return Config(
        recipe="dfine_finetune",
        loader=published_augmentation(640, draws=10, plain_epochs=8),
        model=DFineOptions(
            size="s",
            weights="hf:ustc-community/dfine-small-obj2coco",
            backbone_lr=0.5,
            detections_per_image=300,
        ),
        train=replace(
            published_training(64, 2.5e-4, weight_decay=1.25e-4),
            minutes=240.0,
            batch_size=8,
            warmup_steps=0,
            ema_ramp="inverse",
        ),
        evaluation=EvaluationConfig(gate=["coco/AP50 >= 0.1"]),
    )


_DECAY = {"weight_decay": 1.25e-4, "bias_decay": 1.25e-4}
_DFINE: dict[str, PublishedSettings] = {
    "n": ("42.8", "b0", 160, 12, 0, 0.5, {"lr": 8e-4, "images": 128}),
    "s": ("48.5", "b0", 132, 12, 20, 0.5, {"lr": 2e-4}),
    "m": ("52.3", "b2", 132, 12, 6, 0.1, {"lr": 2e-4}),
    "l": ("54.0", "b4", 80, 8, 4, 0.05, {"lr": 2.5e-4, **_DECAY}),
    "x": ("55.8", "b5", 80, 8, 3, 0.01, {"lr": 2.5e-4, **_DECAY}),
}  # fmt: skip
"""Published AP, backbone, epochs, plain epochs and draws of `published_augmentation`, learning rate of the
backbone, and further arguments of `published_training`."""
_RTDETR: dict[str, PublishedSettings] = {
    "r18": ("48.1", "ResNet18_vd_pretrained", 120, 3, 0, 1.0, {}),
    "r34": ("49.9", "ResNet34_vd_pretrained", 120, 3, 3, 0.5, {"bias_decay": 0.0}),
    "r50": ("53.4", "ResNet50_vd_ssld_v2_pretrained", 72, 1, 3, 0.1, {}),
    "r101": ("54.3", "ResNet101_vd_ssld_pretrained", 72, 1, 3, 0.01, {}),
}  # fmt: skip
_RTDETR_SIZE_NAMES = {"r18": "S", "r34": "M*", "r50": "L", "r101": "X"}  # names of RT-DETRv2's sizes
_FROZEN = ("l", "x", "r50", "r101")
"""Sizes whose pretrained BatchNorm layers and first convolutions are frozen."""


def _published_recipe(options: Any, size: str, row: PublishedSettings) -> Callable[[], Config]:
    """Return the recipe of a size with the authors' schedule and pretrained backbone."""
    score, net, epochs, plain, draws, backbone_lr, training = row
    if options is DFineOptions:
        title, weights, gpus = f"D-FINE-{size.upper()}", f"hf:timm/hgnetv2_{net}.ssld_stage1_in22k_in1k", 8
    else:
        title, weights, gpus = f"RT-DETRv2-{_RTDETR_SIZE_NAMES[size]}", f"{_STORAGE}{net}_from_paddle.pth", 4
        training = {"lr": 1e-4, "bias_decay": 1e-4, "images": 16, "warmup": 2000, "ema": 2000} | training

    def recipe() -> Config:
        return Config(
            recipe=recipe.__name__,
            loader=published_augmentation(640, draws, plain),
            model=options(
                size=size,
                weights=weights,
                backbone_lr=backbone_lr,
                frozen_norm=size in _FROZEN,
                frozen_stem=size in _FROZEN,
                sync_batchnorm=True,
                score_threshold=0.0,
                detections_per_image=300,
            ),
            train=published_training(epochs, **training),
        )

    recipe.__name__ = f"{options.architecture}_{size}"
    recipe.__doc__ = f"{title} on COCO with its authors' schedule for {gpus} GPUs (published: {score} AP)."
    return recipe


PUBLISHED = [_published_recipe(DFineOptions, *item) for item in _DFINE.items()]
PUBLISHED += [_published_recipe(RTDetrOptions, *item) for item in _RTDETR.items()]
"""Recipes of the published training runs; docs/published.md lists the sources."""
