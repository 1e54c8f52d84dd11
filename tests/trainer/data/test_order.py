"""The order of training: complete, without repetition, the same however it is cut up."""

import numpy as np
import pytest

from trainer.data.order import SampleStream, epoch_order, rank_positions


def test_an_epoch_has_every_sample_once():
    sizes = [3, 7, 1, 5] * 40
    order = epoch_order(sizes, seed=1, epoch=2)
    assert sorted(order.tolist()) == list(range(sum(sizes)))


def test_order_is_a_function_of_seed_and_epoch():
    sizes = [10, 10, 10]
    assert np.array_equal(epoch_order(sizes, 1, 2), epoch_order(sizes, 1, 2))
    assert not np.array_equal(epoch_order(sizes, 1, 2), epoch_order(sizes, 1, 3))
    assert not np.array_equal(epoch_order(sizes, 1, 2), epoch_order(sizes, 2, 2))


def test_reads_stay_within_a_window_of_shards():
    order = epoch_order([10] * 640, seed=0, epoch=0)
    for first in range(0, 6400, 640):
        assert len(set((order[first : first + 640] // 10).tolist())) == 64


@pytest.mark.parametrize(("world", "accumulate", "batch"), [(1, 1, 12), (2, 3, 2), (3, 2, 2), (4, 1, 3)])
def test_any_division_reads_the_same_global_batches(world, accumulate, batch):
    stream = SampleStream([5, 6, 6], seed=3)
    reached = []
    for step in range(4):
        parts = [
            rank_positions(step * 12, batch, accumulate=accumulate, world_size=world, rank=rank)
            for rank in range(world)
        ]
        reached.append(sorted(stream[p] for rank in parts for turn in rank for p in turn))
    alone = [sorted(stream[p] for p in range(step * 12, step * 12 + 12)) for step in range(4)]
    assert reached == alone


def test_batches_over_the_end_of_an_epoch_lose_and_repeat_nothing():
    stream = SampleStream([5, 6], seed=0)
    read = [stream[position] for position in range(33)]
    for epoch in range(3):
        assert sorted(index for e, index in read if e == epoch) == list(range(11))


def test_a_stream_can_be_entered_anywhere():
    from_start = SampleStream([4, 9], seed=7)
    whole = [from_start[position] for position in range(40)]
    assert [SampleStream([4, 9], seed=7)[position] for position in range(40)] == whole
