"""The loop's training step on batches from anywhere, for the benchmarks that time one."""

import dataclasses

import numpy as np
import torch
from torch import Tensor

from trainer.config.schema import Config, LoaderConfig
from trainer.data.batch import Batch
from trainer.data.transforms import color_map
from trainer.model import recipes
from trainer.training.schedule import Schedule
from trainer.training.state import TrainState
from trainer.training.step import TrainStep

PHOTOGRAPHS = recipes.load("finetune").loader
"""The strongest augmentation that a recipe for photographs has: sizes, crops, flips, colors."""
_PLANNED = 100_000  # Steps of the training that those measured begin: all of them belong to its warm-up.


def batch_of(images: Tensor, boxes: Tensor, labels: Tensor, color: Tensor | None = None) -> Batch:
    """A batch without padding, of images [B, 3, S, S], boxes [B, M, 4], labels [B, M], colors [B, 3, 4]."""
    count, targets = labels.shape
    return Batch(images, boxes, labels, color, list(range(count)), [1.0] * count, [targets] * count)


def step_of(state: TrainState, config: Config, images: int) -> TrainStep:
    """The step of a new training with `images` per process; a collective call."""
    whole = images * state.world.size
    schedule = Schedule(config, _PLANNED * whole, whole, state)
    return TrainStep(state, state.wrap_ddp(), config.train, schedule=schedule, global_batch=whole)


def like_photographs(config: LoaderConfig) -> LoaderConfig:
    """The same, with the augmentation of photographs."""
    parts = ("image_size", "workers", "prefetch")
    return dataclasses.replace(PHOTOGRAPHS, **{part: getattr(config, part) for part in parts})


def without_weights(config: Config) -> Config:
    """The configuration, with random weights where it would fetch trained ones."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, weights=""))


def color_maps(config: LoaderConfig, images: int, device: torch.device) -> Tensor | None:
    """Color maps [B, 3, 4] as the loader draws them; None where the configuration has none."""
    draws = np.random.default_rng(0).random((images, 4))
    maps = [one for one in (color_map(config, row) for row in draws) if one is not None]
    return torch.from_numpy(np.stack(maps)).to(device) if maps else None
