"""Recipes of FCOS."""

from trainer.config.schema import Config, LoaderConfig, TrainConfig
from trainer.model.architectures.fcos.fcos_options import FcosOptions


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
