"""Images of rare classes are read more often: the formulas, and what an epoch then has."""

import numpy as np
import pytest

from trainer.config.schema import LoaderConfig
from trainer.data.sample_order import SampleStream, class_shares, epoch_order, image_weights, repeat_factors
from trainer.data.shard_index import ShardDataset

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
    weights = class_shares(IMAGES, LABELS, 6)
    assert weights.tolist() == pytest.approx([0.25, 0.25, 0.25, 1.25, 1, 1])
    # Each class has a weight of 1 over its images, and those without any are one class more.
    assert weights.sum() == pytest.approx(4)


def test_the_weights_of_a_split_follow_from_its_boxes(shards):
    dataset = ShardDataset(shards, "train")
    classes = [
        {box["category_id"] for box in dataset.read(index)[1]["annotations"] if not box["iscrowd"]}
        for index in range(len(dataset))
    ]
    images, labels = dataset.classes()
    assert [set(labels[images == index].tolist()) for index in range(len(dataset))] == classes
    assert len(images) == sum(map(len, classes))
    assert image_weights(dataset, LoaderConfig()) is None
    config = LoaderConfig(sampling="repeat_factor", repeat_threshold=0.9)
    assert np.array_equal(image_weights(dataset, config), repeat_factors(images, labels, len(dataset), 0.9))
    balanced = image_weights(dataset, LoaderConfig(sampling="class_balanced"))
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


def test_what_is_announced_is_what_comes():
    stream = SampleStream([4] * 90, 3, np.linspace(0.2, 3, 360))
    ahead = stream.ahead(300)
    assert ahead.tolist() == [stream[300 + place].sample % 360 for place in range(len(ahead))]
    assert ahead.max() < 360
