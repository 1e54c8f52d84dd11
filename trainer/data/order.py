"""In which order training reads the samples: a pure function of seed and epoch.

Shards are permuted, then samples are shuffled within windows of shards: random enough to
train on and local enough to read from object storage. Nothing else depends on it, so a run
goes on from one number, the samples read so far, at any number of workers and processes.
"""

import numpy as np

from trainer.errors import DataError

WINDOW = 64
"""Shards whose samples are mixed."""


def epoch_order(shard_sizes: list[int], seed: int, epoch: int) -> np.ndarray:
    """Order of one epoch.

    Args:
        shard_sizes: samples of each shard; sample indices run through the shards in order.
        seed: seed of the run.
        epoch: number of the epoch, from 0.

    Returns:
        int64 [samples], a permutation of all sample indices.
    """
    generator = np.random.default_rng([seed, epoch])
    starts = np.concatenate([[0], np.cumsum(shard_sizes)])
    shards = generator.permutation(len(shard_sizes))
    windows = []
    for first in range(0, len(shards), WINDOW):
        window = np.concatenate(
            [np.arange(starts[shard], starts[shard + 1]) for shard in shards[first : first + WINDOW]]
        )
        windows.append(generator.permutation(window))
    return np.concatenate(windows) if windows else np.zeros(0, dtype=np.int64)


class SampleStream:
    """The endless stream of samples that training reads: epoch after epoch, without a gap.

    A batch may reach over the end of an epoch, so that no sample is left out and none is
    read twice within an epoch whatever the batch size.
    """

    def __init__(self, shard_sizes: list[int], seed: int) -> None:
        self._shard_sizes = shard_sizes
        self._seed = seed
        self._samples = sum(shard_sizes)
        self._orders: dict[int, np.ndarray] = {}

    def __getitem__(self, position: int) -> tuple[int, int]:
        """Epoch and sample index at a position of the stream (0 is the run's first sample)."""
        epoch, offset = divmod(position, self._samples)
        if epoch not in self._orders:
            # A batch touches two epochs at most; older orders are no longer needed.
            self._orders = {key: order for key, order in self._orders.items() if key >= epoch - 1}
            self._orders[epoch] = epoch_order(self._shard_sizes, self._seed, epoch)
        return epoch, int(self._orders[epoch][offset])


def global_batch(samples: int, *, batch_size: int, accumulate: int, processes: int) -> int:
    """Samples that one optimiser step reads over all processes.

    Raises:
        DataError: the training split has fewer.
    """
    whole = batch_size * accumulate * processes
    if samples < whole:
        raise DataError(
            f"the training split has {samples} images, fewer than one step reads: {processes} processes x "
            f"batch {batch_size} x accumulation {accumulate} = {whole}",
            fix="use fewer processes (--nproc), a smaller train.batch_size, or more images",
        )
    return whole


def rank_positions(
    start: int, batch_size: int, *, accumulate: int, world_size: int, rank: int
) -> list[range]:
    """Stream positions that one rank reads for the step that begins at `start`.

    A step takes accumulate x world_size x batch_size samples in a row; in each forward pass
    every rank has its own slice.

    Returns:
        One range of `batch_size` positions for each forward pass.
    """
    whole = world_size * batch_size
    firsts = [start + turn * whole + rank * batch_size for turn in range(accumulate)]
    return [range(first, first + batch_size) for first in firsts]
