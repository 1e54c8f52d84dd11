"""The order in which training reads the samples, and how often: a pure function of seed, epoch and weights.

Shards are permuted, then samples are shuffled within windows of shards: random enough to
train on and local enough to read from object storage. Nothing else depends on it, so a run
resumes from one number, the samples read so far, at any number of workers and processes. If
images are weighted (`image_weights`), an epoch still has as many places as there are samples.
"""

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trainer.base.errors import ConfigError, DataError
from trainer.config.schema import LoaderConfig
from trainer.data.shard_index import ShardDataset

if TYPE_CHECKING:
    from trainer.launching.distributed import World

WINDOW = 64
"""Shards whose samples are mixed."""


class Place(NamedTuple):
    """A sample in the stream."""

    epoch: int
    sample: int
    """Of the sample in its split; plus the number of samples for each time that its epoch has had it."""


def epoch_order(
    shard_sizes: list[int], seed: int, epoch: int, weights: np.ndarray | None = None
) -> np.ndarray:
    """Order of one epoch.

    Args:
        shard_sizes: samples of each shard; sample indices run through the shards in order.
        seed: seed of the run.
        epoch: number of the epoch, from 0.
        weights: how often each sample is read in relation to others; None reads each once.

    Returns:
        int64 [samples]: without weights a permutation of all sample indices; with weights see `Place`.
    """
    generator = np.random.default_rng([seed, epoch])
    counts = None if weights is None else _turns(weights, seed, epoch)
    starts = np.concatenate([[0], np.cumsum(shard_sizes)])
    shards = generator.permutation(len(shard_sizes))
    windows = []
    for first in range(0, len(shards), WINDOW):
        window = np.concatenate(
            [np.arange(starts[shard], starts[shard + 1]) for shard in shards[first : first + WINDOW]]
        )
        if counts is not None:
            window = _repeated(window, counts[window], len(counts))
        windows.append(generator.permutation(window))
    return np.concatenate(windows) if windows else np.zeros(0, dtype=np.int64)


def _turns(weights: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """How often an epoch reads each sample: int64 [samples], whose sum is the number of samples.

    By systematic sampling (Madow 1949) over the samples in random order: each is read as often as its share
    of the weights says, rounded up or down so that the mean over epochs is exact.
    """
    generator = np.random.default_rng([seed, epoch, 1])
    order = generator.permutation(len(weights))
    ends = np.minimum(np.cumsum(weights[order]) * (len(weights) / weights.sum()), len(weights))
    ends[-1] = len(weights)
    # A start of 20 bits adds to any such number without rounding.
    start = generator.integers(1 << 20) / (1 << 20)
    counts = np.zeros(len(weights), np.int64)
    counts[order] = np.diff(np.floor(ends + start), prepend=0.0)
    return counts


def _repeated(indices: np.ndarray, counts: np.ndarray, samples: int) -> np.ndarray:
    """Each index as often as it counts, every further time `samples` larger."""
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(indices, counts) + (np.arange(len(firsts)) - firsts) * samples


class SampleStream:
    """The endless stream of samples that training reads: epoch after epoch, without a gap.

    A batch may reach over the end of an epoch, so that no sample is left out and none is
    read twice within an epoch whatever the batch size.
    """

    def __init__(self, shard_sizes: list[int], seed: int, weights: np.ndarray | None = None) -> None:
        """See `epoch_order`."""
        self._shard_sizes = shard_sizes
        self._seed = seed
        self._weights = weights
        self._samples = sum(shard_sizes)
        self._orders: dict[int, np.ndarray] = {}

    def __getitem__(self, position: int) -> Place:
        """The sample at a position of the stream (0 is the run's first sample)."""
        epoch, offset = divmod(position, self._samples)
        return Place(epoch, int(self._order(epoch)[offset]))

    def ahead(self, position: int) -> np.ndarray:
        """Indices of the samples from a position on, as many as a window has: int64 [N]."""
        epoch, offset = divmod(position, self._samples)
        count = -(-self._samples * min(WINDOW, len(self._shard_sizes)) // len(self._shard_sizes))
        indices = self._order(epoch)[offset : offset + count]
        if len(indices) < count:
            indices = np.concatenate([indices, self._order(epoch + 1)[: count - len(indices)]])
        return indices if self._weights is None else indices % self._samples

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            # A batch touches two epochs at most; older orders are no longer needed.
            self._orders = {key: order for key, order in self._orders.items() if abs(key - epoch) <= 1}
            self._orders[epoch] = epoch_order(self._shard_sizes, self._seed, epoch, self._weights)
        return self._orders[epoch]


def global_batch(
    samples: int, *, batch_size: int, accumulate: int, processes: int, configured: int = 0
) -> int:
    """Samples that one optimiser step reads over all processes.

    Args:
        samples: size of the training split.
        batch_size: of each process in a forward pass.
        accumulate: forward passes of each process.
        processes: how many there are.
        configured: the number to use instead of the product of these; 0 is that product.

    Raises:
        ConfigError: it is fewer than one for each process.
        DataError: the training split has fewer.
    """
    whole = configured or batch_size * accumulate * processes
    if whole < processes:
        raise ConfigError(
            f"a global batch of {whole} images cannot be shared by {processes} processes",
            fix=f"set train.global_batch to {processes} or more, or use fewer processes",
        )
    if samples < whole:
        parts = f"{processes} processes x batch {batch_size} x accumulation {accumulate} = {whole}"
        raise DataError(
            f"the training split has {samples} images, fewer than one step reads: "
            + (f"train.global_batch = {configured}" if configured else parts),
            fix="use fewer processes (--nproc), a smaller train.batch_size, or more images"
            if not configured
            else "set a smaller train.global_batch, or use more images",
        )
    return whole


def forward_passes(whole: int, batch_size: int, world_size: int) -> int:
    """Forward passes that every rank makes for a step of `whole` samples.

    As many as the largest share needs, but none without an image on some rank: where
    `batch_size` is 1 and the shares are uneven, a pass may have two images.
    """
    largest_share = -(-whole // world_size)
    return min(-(-largest_share // batch_size), whole // world_size)


def rank_positions(start: int, whole: int, batch_size: int, *, world_size: int, rank: int) -> list[range]:
    """Stream positions that one rank reads for the step that begins at `start`.

    A step takes the next `whole` samples. Every rank has a share of them in a row, and
    divides it into forward passes; shares, and the passes of one, differ by one at most.

    Returns:
        One range of positions for each forward pass, none of them empty.
    """
    passes = forward_passes(whole, batch_size, world_size)
    first, last = (start + whole * edge // world_size for edge in (rank, rank + 1))
    edges = [first + (last - first) * turn // passes for turn in range(passes + 1)]
    return [range(*edge) for edge in pairwise(edges)]


_LOOKED_AT = 64
"""Images that are enough to see what a source tells."""


def image_weights(dataset: ShardDataset, config: LoaderConfig) -> np.ndarray | None:
    """Return how often each sample is read in relation to others; None where all are read alike.

    Args:
        dataset: the training split, whose annotations are read.
        config: sampling and its threshold.

    Raises:
        StorageError: they cannot be read.
    """
    if config.sampling == "plain":
        return None
    images, labels = dataset.classes()
    if config.sampling == "repeat_factor":
        return repeat_factors(images, labels, len(dataset), config.repeat_threshold)
    return class_shares(images, labels, len(dataset))


def shared_weights(dataset: ShardDataset, config: LoaderConfig, world: "World") -> np.ndarray | None:
    """Return `image_weights` in every process: rank 0 reads the annotations for all.

    Raises:
        StorageError: they cannot be read.
    """
    if config.sampling == "plain":
        return None
    from trainer.launching.distributed import broadcast  # PyTorch, which `global_batch` does without

    weights: np.ndarray | None = broadcast(image_weights(dataset, config) if world.is_main else None, world)
    return weights


def check_verified(dataset: ShardDataset) -> None:
    """Check that images tell which classes people looked for in them, by a few of them.

    Raises:
        DataError: none does.
        StorageError: they cannot be read.
    """
    few = np.unique(np.linspace(0, len(dataset) - 1, _LOOKED_AT).astype(int)).tolist()
    if not any("verified" in dataset.read(index)[1].get("extra", {}) for index in few):
        raise DataError(
            f"train.negatives=verified: of {len(few)} images in {dataset.uri} none says which classes were "
            "looked for in it",
            fix="take a source that does (openimages:labels=all), or set train.negatives=all",
        )


def repeat_factors(images: np.ndarray, labels: np.ndarray, samples: int, threshold: float) -> np.ndarray:
    """Repeat factors of images by their rarest class (Gupta, Dollar, Girshick 2019, arXiv:1908.03195).

    A class c in a share f(c) of the images has r(c) = max(1, sqrt(threshold / f(c))); an image has the
    largest r of its classes, and 1 where it has none.

    Args:
        images: index of an image, int64 [K], ...
        labels: ... and a class that it has, int64 [K]; each pair once.
        samples: images there are.
        threshold: share below which a class is rare; LVIS takes 0.001.

    Returns:
        fp64 [samples].
    """
    factors = np.ones(samples)
    if len(labels):
        share = np.bincount(labels) / samples
        of_class = np.maximum(1.0, np.sqrt(threshold / np.where(share > 0, share, 1.0)))
        np.maximum.at(factors, images, of_class[labels])
    return factors


def class_shares(images: np.ndarray, labels: np.ndarray, samples: int) -> np.ndarray:
    """Weights by which every class is drawn alike (class-aware sampling, Shen et al. 2016, arXiv:1512.05830).

    An image has 1 / n(c) of each class c that it has, where n(c) images have it; those without any count
    as one class more.

    Args:
        images: see `repeat_factors`.
        labels: see `repeat_factors`.
        samples: images there are.

    Returns:
        fp64 [samples].
    """
    weights = np.zeros(samples)
    if len(labels):
        np.add.at(weights, images, 1.0 / np.bincount(labels)[labels])
    empty = weights == 0
    if empty.any():
        weights[empty] = 1.0 / empty.sum()
    return weights
