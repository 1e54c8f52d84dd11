"""The loop's training step on given batches, for the benchmarks that time it."""

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
"""The strongest augmentation of the recipes for photographs: sizes, crops, flips, colors."""
_PLANNED_STEPS = 100_000  # So many that all measured steps belong to the warm-up.


def make_batch(images: Tensor, boxes: Tensor, labels: Tensor, color: Tensor | None = None) -> Batch:
    """Make a batch without padding: images [B, 3, S, S], boxes [B, M, 4], labels [B, M], colors [B, 3, 4]."""
    count, targets = labels.shape
    return Batch(images, boxes, labels, color, list(range(count)), [1.0] * count, [targets] * count)


def make_step(state: TrainState, config: Config, images: int) -> TrainStep:
    """Return the step of a new training run with `images` per process; a collective call."""
    whole = images * state.world.size
    schedule = Schedule(config, _PLANNED_STEPS * whole, whole, state)
    return TrainStep(state, state.wrap_ddp(), config.train, schedule=schedule, global_batch=whole)


def with_photo_augmentation(config: LoaderConfig) -> LoaderConfig:
    """Return the configuration with the augmentation for photographs."""
    parts = ("image_size", "workers", "prefetch")
    return dataclasses.replace(PHOTOGRAPHS, **{part: getattr(config, part) for part in parts})


def without_weights(config: Config) -> Config:
    """Return the configuration with random instead of pretrained weights."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, weights=""))


def color_maps(config: LoaderConfig, images: int, device: torch.device) -> Tensor | None:
    """Return color maps [B, 3, 4] as the loader draws them; None if colors do not change."""
    draws = np.random.default_rng(0).random((images, 4))
    maps = [color for color in (color_map(config, row) for row in draws) if color is not None]
    return torch.from_numpy(np.stack(maps)).to(device) if maps else None
