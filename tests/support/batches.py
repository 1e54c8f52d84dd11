"""Batches of a training, without a training."""

import torch

from trainer.config.schema import LoaderConfig
from trainer.data.batch import Batch
from trainer.data.loader import TrainLoader
from trainer.data.shard_index import ShardDataset
from trainer.launching.distributed import World


def take(
    dataset: ShardDataset,
    config: LoaderConfig,
    count: int,
    *,
    start: int = 0,
    rank: int = 0,
    size: int = 1,
    device: str = "cpu",
    **options: object,
) -> list[Batch]:
    """Read batches of four images, or as the loader's options say, from a position on."""
    options = {"global_batch": 4, "batch_size": 4, "seed": 5, "max_bad_fraction": 0.0} | options
    loader = TrainLoader(dataset, config, world=World(rank, size, torch.device(device)), **options)
    batches = loader.batches(start)
    try:
        return [next(batches) for _ in range(count)]
    finally:
        batches.close()
        loader.close()
