"""What a batch is of a step's global batch, for detectors whose loss is no mean over images.

A loss that is divided by the number of boxes needs that of the whole step, on all processes; and random
numbers that a detector draws must be the same however the images are spread.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.data.batch import Batch, to_device
from trainer.launching.distributed import SINGLE, World, summed

_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, odd: the step of SplitMix64.
_MIX = ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1))
"""Shifts and factors of SplitMix64's output function."""


class Part(NamedTuple):
    """One batch of a step."""

    keys: Tensor
    """int64 [B], from which the random numbers of each image follow: a hash of seed, step and image."""
    counts: list[int]
    """Targets of each image."""
    targets: int
    """Targets of the global batch."""
    most: int
    """Targets of the image of the global batch that has most."""
    images: int
    """Images of the global batch."""
    world: World = SINGLE
    """The processes that share the global batch."""
    surveyed: Any = None
    """What `Architecture.survey` found in this batch, if the step has several passes."""
    counted: Tensor | None = None
    """What `survey` counted, over the global batch."""

    def sum_over_step(self, count: Tensor) -> Tensor:
        """The sum of a scalar over the global batch, of which this is the only batch of this process.

        A collective, unless the step has several passes: then it is what a survey of them counted.
        """
        return summed(count, self.world) if self.counted is None else self.counted.to(count)


def parts(batches: Sequence[Batch], seed: int, step: int, images: int, world: World) -> list[Part]:
    """What each batch of this rank's is of the step's. A collective, and with several ranks a wait for them.

    Args:
        batches: of this rank in the step.
        seed: of the run.
        step: number of the step.
        images: of the global batch.
        world: this process.
    """
    counts = [count for batch in batches for count in batch.counts]
    targets, most = sum(counts), max(counts)
    if world.size > 1:
        both = to_device(torch.tensor([targets, most]), world.device)
        summed(both[:1], world)
        dist.all_reduce(both[1:], dist.ReduceOp.MAX)
        targets, most = both.tolist()
    return [
        Part(
            random_keys(seed, step, batch.image_ids, batch.images.device),
            batch.counts,
            targets,
            most,
            images,
            world,
        )
        for batch in batches
    ]


def random_keys(seed: int, step: int, image_ids: Sequence[int], device: torch.device) -> Tensor:
    """Key of each image in a step, int64 [B]: a hash of seed, step and image.

    Args:
        seed: of the run.
        step: number of the optimiser's step.
        image_ids: of the images.
        device: where the keys are needed.
    """
    run = _mixed(_mixed(torch.tensor([seed])) ^ step)
    return to_device(_mixed(run ^ torch.tensor(image_ids, dtype=torch.int64)), device)


def uniform(keys: Tensor, count: int) -> Tensor:
    """Random numbers in [0, 1) that follow from keys alone: fp32 [B, count], the same on every device.

    SplitMix64 (Steele et al. 2014), its integers wrapping around, counted from each key.

    Args:
        keys: int64 [B].
        count: numbers for each key.
    """
    counter = torch.arange(1, count + 1, device=keys.device) * _GOLDEN
    # The upper 24 bits, which fp32 holds exactly.
    return _shifted(_mixed(keys[:, None] + counter), 40).float() / 2**24


def _mixed(values: Tensor) -> Tensor:
    values = values + _GOLDEN
    for shift, factor in _MIX:
        values = (values ^ _shifted(values, shift)) * factor
    return values


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Shift to the right without the sign, which torch's `>>` would copy."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)
