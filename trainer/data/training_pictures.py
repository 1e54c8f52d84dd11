"""What a training sees: samples of an epoch as the loader gives them, with sizes, mosaics and colours."""

import dataclasses

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from trainer.base.errors import ConfigError
from trainer.config.schema import Config
from trainer.data.batch import PADDING
from trainer.data.data_views import Picture
from trainer.data.loader import TrainLoader
from trainer.data.sampling import image_weights
from trainer.data.shard_index import ShardDataset
from trainer.launching.distributed import World


def training_pictures(dataset: ShardDataset, config: Config, count: int, epoch: int = 0) -> list[Picture]:
    """Return the first samples of an epoch as a training on one CPU sees them.

    Args:
        dataset: the training split.
        config: of the training.
        count: how many, at most.
        epoch: from 0.

    Raises:
        ConfigError: the training has no such epoch.
        DataError, StorageError: the samples cannot be read.
    """
    if epoch >= config.train.epochs:
        raise ConfigError(
            f"there is no epoch {epoch}: the training has {config.train.epochs}",
            fix=f"name one from 0 to {config.train.epochs - 1}, or set train.epochs",
        )
    samples = len(dataset)
    whole = min(config.train.global_batch or config.train.batch_size * config.train.accumulate, samples)
    loader = TrainLoader(
        dataset, dataclasses.replace(config.loader, decoder="cpu"), global_batch=whole,
        batch_size=config.train.batch_size, seed=config.train.seed, world=World(0, 1, torch.device("cpu")),
        max_bad_fraction=config.data.max_bad_fraction, epochs=config.train.epochs,
        weights=image_weights(dataset, config.loader),
    )  # fmt: skip
    # The first step that begins in the epoch.
    batches = loader.batches(-(-epoch * samples // whole) * whole)
    pictures: list[Picture] = []
    try:
        while len(pictures) < min(count, samples):
            batch = next(batches)
            for row, image_id in enumerate(batch.image_ids):
                boxes = [
                    (label, [x1, y1, x2 - x1, y2 - y1], False)
                    for label, (x1, y1, x2, y2) in zip(
                        batch.labels[row].tolist(), batch.boxes[row].tolist(), strict=True
                    )
                    if label != PADDING
                ]
                image = _colored(batch.images[row], batch.color[row] if batch.color is not None else None)
                name = f"image id {image_id}, at {batch.images.shape[-1]} px"
                pictures.append(Picture(name, image, boxes))
    finally:
        batches.close()
        loader.close()
    return pictures[:count]


def _colored(image: Tensor, color: Tensor | None) -> Image.Image:
    pixels = image.permute(1, 2, 0).numpy()
    if color is not None:
        values = pixels @ color[:, :3].numpy().T + 255 * color[:, 3].numpy()
        pixels = np.clip(np.round(values), 0, 255).astype(np.uint8)
    return Image.fromarray(np.ascontiguousarray(pixels))
