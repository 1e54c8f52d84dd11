"""A step of training as the loop makes it, on batches from anywhere, for the benchmarks that time one.

`trainer.loop` itself takes its batches from shards, and so needs all that reads them. A test holds the
two together: the same operations, and the same weights after them.
"""

import dataclasses
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainer import recipes
from trainer.config import Config, LoaderConfig
from trainer.data.transforms import color_map
from trainer.model.loss import Losses
from trainer.optim import gradient_norm, learning_rate, set_learning_rate
from trainer.precision import autocast
from trainer.state import TrainState
from trainer.step import StepGuard, not_finite

PHOTOGRAPHS = recipes.finetune().loader
"""The strongest augmentation that a recipe for photographs has: sizes, crops, flips, colours."""
_PLANNED = 100_000
"""Steps of the training that those measured begin: all of them belong to its warm-up."""


class Inputs(NamedTuple):
    """What a step reads of a batch: see `trainer.data.loader.Batch`."""

    images: Tensor
    boxes: Tensor
    labels: Tensor
    color: Tensor | None = None


class Trained:
    """A state that is trained by the step."""

    def __init__(self, state: TrainState, config: Config) -> None:
        """Begin; in several processes this is a collective."""
        self.state, self._config = state, config.train
        self._model = state.distributed()
        self._guard = StepGuard(state.optimizer, state.world)

    def loss(self, inputs: Inputs) -> Losses:
        """The forward pass."""
        with autocast(self.state.world.device, self._config.precision):
            losses: Losses = self._model(*inputs)
        return losses

    def step(self, inputs: Inputs) -> Tensor:
        """One step of the optimiser, of one forward pass.

        Returns:
            [4] on the device: total, classification and box loss, norm of the gradient.

        Raises:
            TrainingError: the step before was left out, since a loss or gradient was not finite: what
                is measured would be no training.
        """
        state = self.state
        set_learning_rate(state.optimizer, learning_rate(state.step, _PLANNED, self._config))
        sums = torch.zeros(2, device=state.world.device)
        losses = self.loss(inputs)
        share = 1.0  # of these images in the global batch
        state.scaler.scale((losses.classification + losses.boxes) * share).backward()
        sums += torch.stack([losses.classification.detach(), losses.boxes.detach()]) * share
        state.scaler.unscale_(state.optimizer)
        norm = gradient_norm(state.parameters, self._config.clip_norm).float()[None]
        found = torch.cat([sums, norm])
        if state.scaler.is_enabled():
            found = torch.cat([sums, sums.new_zeros(1)])
            norm = torch.where(norm.isfinite(), norm, 0.0)
        verdict = self._guard.judge(state.step + 1, found, [], stopping=False)
        if verdict and verdict.broken:
            raise not_finite(f"step {verdict.step}", [(state.world.rank, verdict.losses, [])])
        state.scaler.step(state.optimizer)
        state.scaler.update()
        state.optimizer.zero_grad(set_to_none=True)
        if state.ema:
            state.ema.update(state.step)
        state.step += 1
        return torch.cat([sums.sum()[None], sums, norm])


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
