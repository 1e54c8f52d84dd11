"""Defines the order in which training reads samples, a pure function of seed, epoch and weights.

Shards are permuted, and samples are shuffled within windows of shards. This is random enough for training and
local enough to read from object storage. To resume, a run needs only the number of samples read so far.
"""

from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trainer.base.errors import ConfigError, DataError
from trainer.config.schema import LoaderConfig
from trainer.data.shard_index import ShardDataset

if TYPE_CHECKING:
    from trainer.launching.distributed import World

WINDOW = 64  # shards whose samples are shuffled together


class SamplePosition(NamedTuple):
    """A sample in the stream."""

    epoch: int
    sample: int  # index in the split, plus the size of the split for each earlier repetition in the epoch


def epoch_order(
    shard_sizes: list[int], seed: int, epoch: int, weights: np.ndarray | None = None
) -> np.ndarray:
    """Return the samples of one epoch (from 0) in order, int64 [samples]; see `SamplePosition.sample`.

    Samples are numbered in shard order. `weights` give how often each sample is read relative to others; None
    reads each once.
    """
    generator = np.random.default_rng([seed, epoch])
    counts = None if weights is None else _draw_repetitions(weights, seed, epoch)
    starts = np.concatenate([[0], np.cumsum(shard_sizes)])
    shards = generator.permutation(len(shard_sizes))
    windows = []
    for first in range(0, len(shards), WINDOW):
        window = np.concatenate(
            [np.arange(starts[shard], starts[shard + 1]) for shard in shards[first : first + WINDOW]]
        )
        if counts is not None:
            # Repeat each index by its count; each repetition adds the number of samples.
            times = counts[window]
            turns = np.arange(times.sum()) - np.repeat(np.cumsum(times) - times, times)
            window = np.repeat(window, times) + turns * len(counts)
        windows.append(generator.permutation(window))
    return np.concatenate(windows) if windows else np.zeros(0, dtype=np.int64)


def _draw_repetitions(weights: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """Return how often an epoch reads each sample, int64 [samples], by systematic sampling (Madow 1949).

    Each sample's share of the weights is rounded up or down at random; its mean over epochs is exact.
    """
    generator = np.random.default_rng([seed, epoch, 1])
    order = generator.permutation(len(weights))
    ends = np.minimum(np.cumsum(weights[order]) * (len(weights) / weights.sum()), len(weights))
    ends[-1] = len(weights)
    # A start with 20 bits can be added without rounding errors.
    start = generator.integers(1 << 20) / (1 << 20)
    counts = np.zeros(len(weights), np.int64)
    counts[order] = np.diff(np.floor(ends + start), prepend=0.0)
    return counts


class SampleStream:
    """The endless sequence of samples, epoch after epoch; a batch may span two epochs."""

    def __init__(self, shard_sizes: list[int], seed: int, weights: np.ndarray | None = None) -> None:
        """Set the arguments of `epoch_order`."""
        self._shards, self._samples, self._weighted = len(shard_sizes), sum(shard_sizes), weights is not None
        # A batch spans at most two epochs.
        self._order = lru_cache(2)(lambda epoch: epoch_order(shard_sizes, seed, epoch, weights))

    def __getitem__(self, position: int) -> SamplePosition:
        epoch, offset = divmod(position, self._samples)
        return SamplePosition(epoch, int(self._order(epoch)[offset]))

    def next_window(self, position: int) -> np.ndarray:
        """Return the indices of about one window of shards from a position on, int64 [N]."""
        epoch, offset = divmod(position, self._samples)
        count = -(-self._samples * min(WINDOW, self._shards) // self._shards)
        indices = self._order(epoch)[offset : offset + count]
        if len(indices) < count:
            indices = np.concatenate([indices, self._order(epoch + 1)[: count - len(indices)]])
        return indices % self._samples if self._weighted else indices


def global_batch_size(samples: int, *, batch_size: int, processes: int, configured: int = 0) -> int:
    """Return the samples per optimizer step: `configured`, or if it is 0 one batch per process."""
    global_batch = configured or batch_size * processes
    if global_batch < processes:
        problem = f"a global batch of {global_batch} images cannot be split among {processes} processes"
        fix = f"set train.global_batch to {processes} or more, or use fewer processes"
        raise ConfigError(problem, fix=fix)
    if samples < global_batch:
        parts = f"{processes} processes x batch {batch_size} = {global_batch}"
        smaller = "fewer processes (--nproc), a smaller train.batch_size"
        if configured:
            parts, smaller = f"train.global_batch = {configured}", "a smaller train.global_batch"
        problem = f"the training split has {samples} images, fewer than one step reads: {parts}"
        raise DataError(problem, fix=f"use {smaller}, or more images")
    return global_batch


def count_forward_passes(total: int, batch_size: int, world_size: int) -> int:
    """Return the number of forward passes of each rank in a step of `total` samples.

    Every pass has an image on every rank. So if `batch_size` is 1 and the shares are uneven, a pass may have
    two images.
    """
    largest_share = -(-total // world_size)
    return min(-(-largest_share // batch_size), total // world_size)


def rank_positions(start: int, total: int, batch_size: int, *, world_size: int, rank: int) -> list[range]:
    """Return the stream positions of one rank in the step that begins at `start`, for each forward pass.

    A step uses the next `total` samples. Sizes of ranks' shares, and of passes, differ by at most one.
    """
    passes = count_forward_passes(total, batch_size, world_size)
    first, last = (start + total * edge // world_size for edge in (rank, rank + 1))
    edges = [first + (last - first) * turn // passes for turn in range(passes + 1)]
    return [range(*edge) for edge in pairwise(edges)]


def image_weights(dataset: ShardDataset, config: LoaderConfig, world: "World") -> np.ndarray | None:
    """Return how often each sample is read relative to others; None if all are read equally often.

    This is a collective call: rank 0 reads the annotations for all processes.
    """
    from trainer.launching.distributed import broadcast  # imports PyTorch

    if config.sampling == "plain":
        return None
    weights: np.ndarray | None = None
    if world.is_main:
        images, labels = dataset.class_pairs()
        if config.sampling == "repeat_factor":
            weights = repeat_factors(images, labels, len(dataset), config.repeat_threshold)
        else:
            weights = class_balanced_weights(images, labels, len(dataset))
    weights = broadcast(weights, world)
    return weights


def repeat_factors(images: np.ndarray, labels: np.ndarray, samples: int, threshold: float) -> np.ndarray:
    """Return repeat factors of images by their rarest class, fp64 [samples].

    A class c in a fraction f(c) of the images has the factor r(c) = max(1, sqrt(threshold / f(c))). An image
    has the largest factor of its classes, or 1 (Gupta, Dollar, Girshick 2019, arXiv:1908.03195).

    `images` and `labels`, int64 [K], are pairs of an image and a class in it.
    """
    factors = np.ones(samples)
    if len(labels):
        share = np.bincount(labels) / samples
        class_factors = np.maximum(1.0, np.sqrt(threshold / np.where(share > 0, share, 1.0)))
        np.maximum.at(factors, images, class_factors[labels])
    return factors


def class_balanced_weights(images: np.ndarray, labels: np.ndarray, samples: int) -> np.ndarray:
    """Return weights that sample every class equally often, fp64 [samples]; see `repeat_factors`.

    The weight of an image is the sum of 1 / n(c) over its classes c, where n(c) is the number of images with
    class c. Images without boxes form one more class (Shen et al. 2016, arXiv:1512.05830).
    """
    weights = np.zeros(samples)
    if len(labels):
        np.add.at(weights, images, 1.0 / np.bincount(labels)[labels])
    empty = weights == 0
    if empty.any():
        weights[empty] = 1.0 / empty.sum()
    return weights
