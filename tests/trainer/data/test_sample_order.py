"""The order of training: complete, without repetition, the same however it is cut up."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from trainer.base.errors import ConfigError, DataError
from trainer.data.sample_order import SampleStream, epoch_order, forward_passes, global_batch, rank_positions


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


@pytest.mark.parametrize("whole", [12, 13, 17])
@pytest.mark.parametrize(("world", "batch"), [(1, 12), (1, 3), (2, 2), (3, 4), (4, 3), (5, 1), (12, 8)])
def test_any_division_reads_the_same_global_batches(whole, world, batch):
    for step in range(3):
        parts = [
            rank_positions(step * whole, whole, batch, world_size=world, rank=rank) for rank in range(world)
        ]
        read = [position for rank in parts for turn in rank for position in turn]
        assert read == list(range(step * whole, (step + 1) * whole))
        shares = [sum(map(len, rank)) for rank in parts]
        assert max(shares) - min(shares) <= 1
        passes = [len(turn) for rank in parts for turn in rank]
        # Every rank makes as many, and none without an image: SyncBatchNorm would wait for ever.
        assert {len(rank) for rank in parts} == {forward_passes(whole, batch, world)}
        assert min(passes) >= 1 and max(passes) <= max(batch, 2)


@pytest.mark.parametrize(
    ("whole", "world", "batch"), [(16, 3, 4), (7, 2, 2), (32, 5, 4), (9, 4, 1), (8, 2, 4)]
)
def test_a_rank_has_the_same_one_or_two_batch_sizes_in_every_step(whole, world, batch):
    # Compiled code and CUDA graphs are made for each size that occurs: few, and none new later on.
    for rank in range(world):
        steps = [
            [len(part) for part in rank_positions(start, whole, batch, world_size=world, rank=rank)]
            for start in range(0, 40 * whole, whole)
        ]
        assert all(sizes == steps[0] for sizes in steps)
        assert max(steps[0]) - min(steps[0]) <= 1


def test_accumulation_is_what_an_even_share_needs():
    assert forward_passes(24, 4, 2) == 3 and forward_passes(24, 4, 1) == 6 and forward_passes(24, 8, 3) == 1


def test_the_global_batch_is_the_one_asked_for_or_the_product():
    assert global_batch(100, batch_size=4, accumulate=2, processes=3) == 24
    assert global_batch(100, batch_size=4, accumulate=2, processes=3, configured=10) == 10
    with pytest.raises(DataError, match=r"24 images.*2 processes x batch 4 x accumulation 4 = 32"):
        global_batch(24, batch_size=4, accumulate=4, processes=2)
    with pytest.raises(ConfigError, match="2 images cannot be shared by 3 processes"):
        global_batch(100, batch_size=4, accumulate=1, processes=3, configured=2)
    with pytest.raises(DataError, match=r"9 images.*train\.global_batch = 10"):
        global_batch(9, batch_size=4, accumulate=1, processes=1, configured=10)


def test_batches_over_the_end_of_an_epoch_lose_and_repeat_nothing():
    stream = SampleStream([5, 6], seed=0)
    read = [stream[position] for position in range(33)]
    for epoch in range(3):
        assert sorted(index for e, index in read if e == epoch) == list(range(11))


def test_a_stream_can_be_entered_anywhere():
    from_start = SampleStream([4, 9], seed=7)
    whole = [from_start[position] for position in range(40)]
    assert [SampleStream([4, 9], seed=7)[position] for position in range(40)] == whole


SHARDS = some.lists(some.integers(1, 9), min_size=1, max_size=90)


def read(sizes, seed, start, steps, whole, batch, world):
    """What all ranks read in some steps from a place on, in the order of the stream."""
    streams = [SampleStream(sizes, seed) for _ in range(world)]
    indices = []
    for step in range(steps):
        for rank, stream in enumerate(streams):
            passes = rank_positions(start + step * whole, whole, batch, world_size=world, rank=rank)
            indices += [stream[position] for turn in passes for position in turn]
    return indices


@given(SHARDS, some.integers(0, 5), some.integers(1, 7), some.integers(1, 5), some.data())
def test_every_sample_is_read_once_an_epoch_at_any_world_size(sizes, seed, world, batch, data):
    samples = sum(sizes)
    whole = data.draw(some.integers(world, world + 20), "global batch")
    indices = read(sizes, seed, 0, -(-2 * samples // whole), whole, batch, world)
    for epoch in range(2):
        assert sorted(index for e, index in indices if e == epoch) == list(range(samples))


@given(SHARDS, some.integers(0, 5), some.lists(some.integers(1, 7), min_size=1, max_size=4), some.data())
def test_a_run_that_stops_anywhere_goes_on_at_any_world_size(sizes, seed, worlds, data):
    whole = data.draw(some.integers(max(worlds), max(worlds) + 20), "global batch")
    indices, start = [], 0
    for world in worlds:
        steps = data.draw(some.integers(0, 6), "steps")
        indices += read(sizes, seed, start, steps, whole, data.draw(some.integers(1, 5), "batch"), world)
        start += steps * whole
    stream = SampleStream(sizes, seed)
    assert indices == [stream[position] for position in range(start)]


@given(SHARDS, some.integers(0, 5), some.integers(0, 300))
def test_what_is_announced_is_what_comes(sizes, seed, position):
    stream = SampleStream(sizes, seed)
    ahead = stream.ahead(position)
    assert ahead.tolist() == [stream[position + place][1] for place in range(len(ahead))]
    assert 1 <= len(ahead) <= sum(sizes)


def test_an_epoch_is_entered_in_the_middle_of_millions():
    sizes = [220] * 7900
    epoch, index = SampleStream(sizes, seed=0)[6 * sum(sizes) + 1000]
    assert epoch == 6 and index == epoch_order(sizes, 0, 6)[1000]
