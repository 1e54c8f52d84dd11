"""Recipes of RF-DETR."""

from dataclasses import replace
from typing import Literal

from trainer.config.schema import Config, EvaluationConfig, LoaderConfig, TrainConfig
from trainer.model.rfdetr.options import RFDetrOptions

_STORAGE = "https://storage.googleapis.com/rfdetr/"
"""Weights by RF-DETR's authors, from `rfdetr/main.py`."""


def rfdetr_finetune() -> Config:
    """Fine-tune RF-DETR nano, pretrained on COCO, on your data with one or a few GPUs."""
    config = _rfdetr("nano", 384)
    return replace(
        config,
        recipe="rfdetr_finetune",
        model=replace(config.model, score_threshold=0.05),
        train=replace(config.train, minutes=240.0),
        evaluation=EvaluationConfig(gate=["coco/AP50 >= 0.1"]),
    )


def rfdetr_m() -> Config:
    """RF-DETR medium from its authors' weights, with their settings, which gave them 54.7 AP on COCO."""
    return replace(_rfdetr("medium", 576), recipe="rfdetr_m")


def _rfdetr(size: Literal["nano", "medium"], side: int) -> Config:
    return Config(
        loader=LoaderConfig(
            image_size=side, resize="squash", sizes=[*range(side - 160, side + 161, 32)], plain_epochs=0
        ),
        model=RFDetrOptions(
            size=size,
            weights=f"{_STORAGE}{size}_coco/checkpoint_best_regular.pth",
            score_threshold=0.0,
            detections_per_image=300,
        ),
        train=TrainConfig(
            epochs=100,
            batch_size=4,
            global_batch=16,
            optimizer="adamw",
            lr=1e-4,
            weight_decay=1e-4,
            norm_weight_decay=1e-4,
            bias_weight_decay=1e-4,
            schedule="multistep",
            milestones=[],
            warmup_steps=0,
            clip_norm=0.1,
            ema_decay=0.993,
            ema_ramp="exponential",
            ema_steps=100,
            compile="off",
        ),
    )
