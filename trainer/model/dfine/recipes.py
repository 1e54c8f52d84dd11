"""Recipes of D-FINE and RT-DETRv2; docs/published.md lists their sources."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from trainer.config.schema import Config, EvaluationConfig
from trainer.model.detr.recipes import published_training, published_views
from trainer.model.dfine.options import DFineOptions, RTDetrOptions
from trainer.model.retinanet.recipes import small

_STORAGE = "https://github.com/lyuwenyu/storage/releases/download/v0.1/"
"""Backbones of RT-DETR's authors: `src/nn/backbone/presnet.py`."""


def dfine_small() -> Config:
    """A narrow D-FINE-N from scratch, for a set of a few hundred images on a CPU.

    With the views and schedule of `small`; in fp32, since bf16 slows its many small operations down, and with
    fewer queries than published.
    """
    slim = small()
    return replace(
        slim,
        recipe="dfine_small",
        model=DFineOptions(size="n", width=0.5, queries=60, denoising=30, backbone_lr=1.0),
        train=replace(slim.train, lr=1e-3, weight_decay=1e-4, clip_norm=0.1, precision="fp32"),
    )


def dfine_finetune() -> Config:
    """Fine-tune D-FINE-S's weights of Objects365 and COCO on your data, on one or a few GPUs."""
    return Config(
        recipe="dfine_finetune",
        loader=published_views(640, draws=10, plain_epochs=8),
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


def _published(
    options: Any,
    size: str,
    title: str,
    net: str,
    *,
    epochs: int,
    plain: int,
    draws: int,
    backbone_lr: float,
    frozen: bool = False,
    **training: Any,
) -> Callable[[], Config]:
    """Return the recipe of a size by its authors' schedule, from their backbone."""
    if options is DFineOptions:
        place, gpus = f"hf:timm/hgnetv2_{net}.ssld_stage1_in22k_in1k", 8
    else:
        place, gpus = f"{_STORAGE}{net}_from_paddle.pth", 4
        training = {"lr": 1e-4, "bias_decay": 1e-4, "images": 16, "warmup": 2000, "ema": 2000} | training

    def recipe() -> Config:
        return Config(
            recipe=recipe.__name__,
            loader=published_views(640, draws, plain),
            model=options(
                size=size,
                weights=place,
                backbone_lr=backbone_lr,
                frozen_norm=frozen,
                frozen_stem=frozen,
                sync_batchnorm=True,
                score_threshold=0.0,
                detections_per_image=300,
            ),
            train=published_training(epochs, **training),
        )

    name, _, score = title.partition(", ")
    recipe.__name__ = f"{options.architecture}_{size}"
    recipe.__doc__ = f"{name} on COCO by its authors' schedule for {gpus} GPUs ({score} AP, published)."
    return recipe


_DECAY = {"weight_decay": 1.25e-4, "bias_decay": 1.25e-4}
_dfine, _rtdetr = partial(_published, DFineOptions), partial(_published, RTDetrOptions)
PUBLISHED = (
    _dfine("n", "D-FINE-N, 42.8", "b0", epochs=160, plain=12, draws=0, backbone_lr=0.5, lr=8e-4, images=128),
    _dfine("s", "D-FINE-S, 48.5", "b0", epochs=132, plain=12, draws=20, backbone_lr=0.5, lr=2e-4),
    _dfine("m", "D-FINE-M, 52.3", "b2", epochs=132, plain=12, draws=6, backbone_lr=0.1, lr=2e-4),
    _dfine(
        "l",
        "D-FINE-L, 54.0",
        "b4",
        epochs=80,
        plain=8,
        draws=4,
        backbone_lr=0.05,
        frozen=True,
        lr=2.5e-4,
        **_DECAY,
    ),
    _dfine(
        "x",
        "D-FINE-X, 55.8",
        "b5",
        epochs=80,
        plain=8,
        draws=3,
        backbone_lr=0.01,
        frozen=True,
        lr=2.5e-4,
        **_DECAY,
    ),
    _rtdetr(
        "r18", "RT-DETRv2-S, 48.1", "ResNet18_vd_pretrained", epochs=120, plain=3, draws=0, backbone_lr=1.0
    ),
    _rtdetr(
        "r34",
        "RT-DETRv2-M*, 49.9",
        "ResNet34_vd_pretrained",
        epochs=120,
        plain=3,
        draws=3,
        backbone_lr=0.5,
        bias_decay=0.0,
    ),
    _rtdetr(
        "r50",
        "RT-DETRv2-L, 53.4",
        "ResNet50_vd_ssld_v2_pretrained",
        epochs=72,
        plain=1,
        draws=3,
        backbone_lr=0.1,
        frozen=True,
    ),
    _rtdetr(
        "r101",
        "RT-DETRv2-X, 54.3",
        "ResNet101_vd_ssld_pretrained",
        epochs=72,
        plain=1,
        draws=3,
        backbone_lr=0.01,
        frozen=True,
    ),
)
"""Recipes of the published trainings; docs/published.md lists the sources."""
