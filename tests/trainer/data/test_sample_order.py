"""The order of training: complete, the same however it is divided, and weighted for rare classes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from trainer.base.errors import ConfigError, DataError
from trainer.config.schema import LoaderConfig
from trainer.data.sample_order import (
    SampleStream,
    class_balanced_weights,
    count_forward_passes,
    epoch_order,
    global_batch_size,
    image_weights,
    rank_positions,
    repeat_factors,
)
from trainer.data.shard_index import ShardDataset
from trainer.launching.distributed import World


def test_reads_stay_within_a_window_of_shards():
    order = epoch_order([10] * 640, seed=0, epoch=0)
    for first in range(0, 6400, 640):
        assert len(set((order[first : first + 640] // 10).tolist())) == 64


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


def test_the_global_batch_is_the_one_asked_for_or_the_product():
    assert global_batch_size(100, batch_size=4, processes=3) == 12
    assert global_batch_size(100, batch_size=4, processes=3, configured=10) == 10
    with pytest.raises(DataError, match=r"6 images.*2 processes x batch 4 = 8"):
        global_batch_size(6, batch_size=4, processes=2)
    with pytest.raises(ConfigError, match="2 images cannot be split among 3 processes"):
        global_batch_size(100, batch_size=4, processes=3, configured=2)
    with pytest.raises(DataError, match=r"9 images.*train\.global_batch = 10"):
        global_batch_size(9, batch_size=4, processes=1, configured=10)


patient = settings(deadline=None)  # other processes may need the processor
SHARDS = some.lists(some.integers(1, 9), min_size=1, max_size=90)


def read(sizes, seed, start, steps, whole, batch, world):
    """What all ranks read in some steps from a place on, in the order of the stream."""
    streams = [SampleStream(sizes, seed) for _ in range(world)]
    indices = []
    for step in range(steps):
        shares = []
        for rank, stream in enumerate(streams):
            passes = rank_positions(start + step * whole, whole, batch, world_size=world, rank=rank)
            # Every rank makes as many, and none without an image: SyncBatchNorm would wait for ever.
            assert len(passes) == count_forward_passes(whole, batch, world)
            assert all(1 <= len(turn) <= max(batch, 2) for turn in passes)
            indices += [stream[position] for turn in passes for position in turn]
            shares.append(sum(map(len, passes)))
        assert max(shares) - min(shares) <= 1
    return indices


@patient
@given(SHARDS, some.integers(0, 5), some.integers(1, 7), some.integers(1, 5), some.data())
def test_every_sample_is_read_once_an_epoch_at_any_world_size(sizes, seed, world, batch, data):
    samples = sum(sizes)
    whole = data.draw(some.integers(world, world + 20), "global batch")
    indices = read(sizes, seed, 0, -(-2 * samples // whole), whole, batch, world)
    for epoch in range(2):
        assert sorted(index for e, index in indices if e == epoch) == list(range(samples))


@patient
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


@patient
@given(SHARDS, some.integers(0, 5), some.integers(0, 300))
def test_what_is_announced_is_what_comes(sizes, seed, position):
    stream = SampleStream(sizes, seed)
    ahead = stream.next_window(position)
    assert ahead.tolist() == [stream[position + place][1] for place in range(len(ahead))]
    assert 1 <= len(ahead) <= sum(sizes)


IMAGES = np.array([0, 1, 2, 3, 3, 4])
LABELS = np.array([0, 0, 0, 0, 1, 2])
"""Class 0 in four images of six, 1 and 2 in one each; image 5 has none."""


def test_repeat_factors_are_those_of_the_paper():
    """r(c) = max(1, sqrt(t / f(c))), and an image has the largest of its classes."""
    rare = np.sqrt(0.6 / (1 / 6))
    assert repeat_factors(IMAGES, LABELS, 6, 0.6).tolist() == pytest.approx([1, 1, 1, rare, rare, 1])
    assert repeat_factors(IMAGES, LABELS, 6, 0.001).tolist() == [1] * 6
    assert repeat_factors(IMAGES[:0], LABELS[:0], 2, 0.5).tolist() == [1, 1]


def test_classes_are_drawn_alike():
    weights = class_balanced_weights(IMAGES, LABELS, 6)
    assert weights.tolist() == pytest.approx([0.25, 0.25, 0.25, 1.25, 1, 1])
    # Each class has a weight of 1 over its images, and those without any are one class more.
    assert weights.sum() == pytest.approx(4)


def test_the_weights_of_a_split_follow_from_its_boxes(shards):
    dataset = ShardDataset(shards, "train")
    classes = [
        {box["category_id"] for box in dataset.read(index)[1]["annotations"] if not box["iscrowd"]}
        for index in range(len(dataset))
    ]
    images, labels = dataset.class_pairs()
    world = World(0, 1, torch.device("cpu"))
    assert [set(labels[images == index].tolist()) for index in range(len(dataset))] == classes
    assert len(images) == sum(map(len, classes))
    assert image_weights(dataset, LoaderConfig(), world) is None
    config = LoaderConfig(sampling="repeat_factor", repeat_threshold=0.9)
    assert np.array_equal(
        image_weights(dataset, config, world), repeat_factors(images, labels, len(dataset), 0.9)
    )
    balanced = image_weights(dataset, LoaderConfig(sampling="class_balanced"), world)
    assert balanced.sum() == pytest.approx(len(dataset.categories) + ([] in map(list, classes)))


def test_an_epoch_reads_each_sample_as_often_as_its_weight_says():
    sizes, weights = [40, 30, 30], np.linspace(0.1, 4, 100)
    expected = weights * 100 / weights.sum()
    counts = []
    for epoch in range(400):
        order = epoch_order(sizes, 7, epoch, weights)
        assert len(order) == 100
        counts.append(np.bincount(order % 100, minlength=100))
        assert (np.abs(counts[-1] - expected) < 1).all(), "rounded up or down"
        # Every time that an image comes has a number of its own.
        assert len(np.unique(order)) == 100
    assert np.mean(counts, axis=0) == pytest.approx(expected, abs=0.12)
    assert not np.array_equal(epoch_order(sizes, 8, 0, weights), epoch_order(sizes, 7, 0, weights))


def test_without_weights_the_order_is_what_it_was():
    assert epoch_order([3, 4], 1, 2).tolist() == [2, 3, 5, 1, 4, 0, 6]  # Written down on 2026-11-22.
    assert sorted(epoch_order([3, 4], 1, 2, np.ones(7))) == list(range(7))
