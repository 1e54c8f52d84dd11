"""Recipes of Faster R-CNN."""

from trainer.config.schema import Config, LoaderConfig, TrainConfig
from trainer.model.architectures.faster_rcnn.faster_rcnn_options import FasterRcnnOptions


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
