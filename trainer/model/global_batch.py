"""Describes the global batch of a step, for detectors whose loss is not a mean over images.

Such a loss is divided by the number of boxes in the global batch. A detector's random numbers must not depend
on how the images are distributed over processes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.data.batch import Batch, to_device
from trainer.launching.distributed import SINGLE, World, all_reduce_sum, gather_integers

_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, made odd: the increment of SplitMix64.
_MIX = ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1))
"""Shifts and factors of SplitMix64's output function."""


class BatchContext(NamedTuple):
    """A batch and the global batch that it belongs to."""

    keys: Tensor  # int64 [B], seeds of the random numbers of each image: a hash of seed, step and image
    counts: list[int]  # number of targets of each image
    target_count: int  # in the global batch
    max_targets: int  # largest number of targets of any image in the global batch
    image_count: int  # in the global batch
    world: World = SINGLE  # the processes that share the global batch
    matches: Any = None  # `Architecture.match_targets` of this batch, if the step has several passes
    pair_count: Tensor | None = None  # the scalar of `match_targets`, summed over the global batch

    def sum_over_step(self, count: Tensor) -> Tensor:
        """Return the sum of a count over the global batch.

        This is a collective if the step has one pass; otherwise `pair_count` is already known.
        """
        return all_reduce_sum(count, self.world) if self.pair_count is None else self.pair_count.to(count)


def batch_contexts(
    batches: Sequence[Batch], seed: int, step: int, image_count: int, world: World
) -> list[BatchContext]:
    """Return the context of each batch of this rank; the step has `image_count` images. A CPU collective."""
    counts = [count for batch in batches for count in batch.counts]
    every = gather_integers([sum(counts), max(counts)], world)
    target_count, max_targets = int(every[:, 0].sum()), int(every[:, 1].max())
    keys = [random_keys(seed, step, batch.image_ids, batch.images.device) for batch in batches]
    return [
        BatchContext(key, batch.counts, target_count, max_targets, image_count, world)
        for key, batch in zip(keys, batches, strict=True)
    ]


def random_keys(seed: int, step: int, image_ids: Sequence[int], device: torch.device) -> Tensor:
    """Return a key for each image, int64 [B]: a hash of the run's seed, the step and the image id."""
    run = _mix(_mix(torch.tensor([seed])) ^ step)
    return to_device(_mix(run ^ torch.tensor(image_ids, dtype=torch.int64)), device)


def draw_uniform(keys: Tensor, count: int) -> Tensor:
    """Return `count` random numbers in [0, 1) for each of B keys: fp32 [B, count], the same on every device.

    Uses SplitMix64 (Steele et al. 2014) with each key as a seed; integers wrap around.
    """
    counter = torch.arange(1, count + 1, device=keys.device) * _GOLDEN
    # Use the upper 24 bits, which fp32 represents exactly.
    return _shift_right(_mix(keys[:, None] + counter), 40).float() / 2**24


def _mix(values: Tensor) -> Tensor:
    values = values + _GOLDEN
    for shift, factor in _MIX:
        values = (values ^ _shift_right(values, shift)) * factor
    return values


def _shift_right(values: Tensor, bits: int) -> Tensor:
    """Shift right without copying the sign bit, unlike torch's `>>`."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)
