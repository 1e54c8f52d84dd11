"""The loop's training step on batches from anywhere, for the benchmarks that time one."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainer.config.schema import Config, LoaderConfig
from trainer.data.transforms import color_map
from trainer.model import recipes
from trainer.training.state import TrainState
from trainer.training.step import TrainStep

PHOTOGRAPHS = recipes.load("finetune").loader
"""The strongest augmentation that a recipe for photographs has: sizes, crops, flips, colours."""
_PLANNED = 100_000
"""Steps of the training that those measured begin: all of them belong to its warm-up."""


class Inputs(NamedTuple):
    """What a step reads of a batch: see `trainer.data.loader.Batch`."""

    images: Tensor
    boxes: Tensor
    labels: Tensor
    color: Tensor | None = None
    image_ids: Sequence[int] = ()
    """One for each image."""
    verified: Tensor | None = None


def step_of(state: TrainState, config: Config, images: int) -> TrainStep:
    """The step of a training that begins; in several processes this is a collective.

    Args:
        state: what is trained.
        config: how.
        images: of this process in a step; all have as many.
    """
    return TrainStep(
        state, state.distributed(), config.train, steps=_PLANNED, global_batch=images * state.world.size
    )


def like_photographs(config: LoaderConfig) -> LoaderConfig:
    """The same, with the augmentation of photographs."""
    parts = ("image_size", "workers", "prefetch", "decoder")
    return dataclasses.replace(PHOTOGRAPHS, **{part: getattr(config, part) for part in parts})


def without_weights(config: Config) -> Config:
    """The configuration, with random weights where it would fetch trained ones."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, weights=""))


def color_maps(config: LoaderConfig, images: int, device: torch.device) -> Tensor | None:
    """Colour maps [B, 3, 4] as the loader draws them; None where the configuration has none."""
    draws = np.random.default_rng(0).random((images, 4))
    maps = [one for one in (color_map(config, row) for row in draws) if one is not None]
    return torch.from_numpy(np.stack(maps)).to(device) if maps else None
