"""Training settings by the authors of D-FINE and RT-DETRv2, which DEIMv2's authors also use."""

from trainer.config.schema import LoaderConfig, TrainConfig


def published_augmentation(size: int, draws: int, plain_epochs: int) -> LoaderConfig:
    """Return the augmentation by D-FINE's and RT-DETR's authors.

    Input sizes are drawn from the multiples of 32 between 3/4 and 5/4 of `size`, where `size` itself occurs
    `draws` times. If `draws` is 0, all inputs have this size. docs/published.md lists the sources.
    """
    around = [*range(int(size * 0.75 / 32) * 32, int(size * 1.25 / 32) * 32 + 1, 32)]
    return LoaderConfig(
        image_size=size,
        resize="squash",
        fill=0,
        zoom_out=0.5,
        iou_crop=0.8,
        brightness=0.125,
        contrast=0.5,
        saturation=0.5,
        hue=0.05,
        color_probability=0.5,
        channel_shuffle=0.5,
        plain_epochs=plain_epochs,
        sizes=[*around, *[size] * (draws - 1)] if draws else [],
    )


def published_training(
    epochs: int,
    lr: float,
    *,
    weight_decay: float = 1e-4,
    bias_decay: float = 0.0,
    images: int = 32,
    warmup: int = 500,
    ema: int = 1000,
) -> TrainConfig:
    """Return the training settings by the same authors: a constant learning rate and averaged weights."""
    return TrainConfig(
        epochs=epochs,
        batch_size=max(4, images // 8),
        global_batch=images,
        lr_batch=images,
        lr_scaling="linear",
        scale_steps=True,
        optimizer="adamw",
        lr=lr,
        weight_decay=weight_decay,
        bias_weight_decay=bias_decay,
        schedule="multistep",
        milestones=[],
        warmup_steps=warmup,
        clip_norm=0.1,
        ema_decay=0.9999,
        ema_ramp="exponential",
        ema_steps=ema,
        compile="off",
    )
