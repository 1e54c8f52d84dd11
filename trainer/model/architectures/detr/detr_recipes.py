"""Recipes of D-FINE."""

from trainer.config.schema import Config, DataConfig, EvaluationConfig, LoaderConfig, TrainConfig
from trainer.model.architectures.detr.detr_options import DFineOptions


def dfine_small() -> Config:
    """A narrow D-FINE-N from scratch, for a set of a few hundred images on a CPU.

    In fp32, since bf16 slows its many small operations down, and with fewer queries than published.
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
            epochs=45, minutes=30.0, batch_size=4, optimizer="adamw", lr=1e-3, weight_decay=1e-4,
            warmup_steps=50, clip_norm=0.1, ema_decay=0.99, validate_every=9, checkpoint_minutes=1.0,
            compile="off", precision="fp32",
        ),
        evaluation=EvaluationConfig(gate=["coco/AP50 >= 0.1"]),
    )  # fmt: skip


def dfine_s() -> Config:
    """D-FINE-S on COCO by its authors' schedule: 48.5 AP with theirs, on 8 GPUs.

    github.com/Peterande/D-FINE (4a1f73a), configs/dfine/dfine_hgnetv2_s_coco.yml and its README: 132 epochs,
    the last 12 plain, 32 images a step. Theirs resets to the best weights before the plain epochs, changes
    the aspect of images, and draws 640 more often than other sizes.
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
    the last 8 plain, 32 images a step; the differences are those of dfine_s.
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
    """Fine-tune D-FINE-S's weights of Objects365 and COCO on your data, on one or a few GPUs."""
    return Config(
        recipe="dfine_finetune",
        loader=LoaderConfig(
            image_size=640, scale=[0.7, 1.4], brightness=0.1, contrast=0.1, saturation=0.1, plain_epochs=4
        ),
        model=DFineOptions(size="s", weights="hf:ustc-community/dfine-small-obj2coco", backbone_lr=0.5),
        train=TrainConfig(
            epochs=30, minutes=240.0, batch_size=8, global_batch=16, optimizer="adamw", lr=1e-4,
            weight_decay=1e-4, warmup_steps=200, clip_norm=0.1, ema_decay=0.999, compile="off",
        ),
        evaluation=EvaluationConfig(gate=["coco/AP50 >= 0.1"]),
    )  # fmt: skip


def _dfine_views(sizes: list[int], plain_epochs: int) -> LoaderConfig:
    """The augmentation of D-FINE's authors, approximately: zoom out, crop, colours, sizes."""
    return LoaderConfig(
        image_size=640, scale=[0.5, 2.0], brightness=0.125, contrast=0.5, saturation=0.5, hue=0.05,
        sizes=sizes, plain_epochs=plain_epochs,
    )  # fmt: skip


def _dfine_training(epochs: int, lr: float, weight_decay: float) -> TrainConfig:
    """A constant learning rate, whose noise averaged weights reduce."""
    return TrainConfig(
        epochs=epochs, batch_size=4, global_batch=32, lr_batch=32, optimizer="adamw", lr=lr,
        weight_decay=weight_decay, schedule="multistep", milestones=[1.0], warmup_steps=500, clip_norm=0.1,
        ema_decay=0.9999, compile="off",
    )  # fmt: skip
