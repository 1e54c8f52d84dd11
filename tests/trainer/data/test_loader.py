"""Batches: the same whatever the workers and ranks, complete, padded, and clear when data is broken."""

import shutil

import pytest
import torch
from batches import take

from trainer.config.schema import LoaderConfig
from trainer.config.types import NetworkInput
from trainer.data.batch import PADDING
from trainer.data.decoding import read_sample
from trainer.data.loader import EvalLoader
from trainer.data.shard_index import ShardCache, ShardDataset
from trainer.data.transforms import full_view, transform_boxes
from trainer.launching.distributed import World

CONFIG = LoaderConfig(image_size=96, workers=2, prefetch=3, scale=[0.7, 1.4], brightness=0.2)


@pytest.fixture(scope="module")
def dataset(shards):
    return ShardDataset(shards, "train")


def assert_equal(one, other):
    assert one.image_ids == other.image_ids
    assert torch.equal(one.images, other.images) and torch.equal(one.color, other.color)
    rows = min(one.labels.shape[1], other.labels.shape[1])
    assert torch.equal(one.labels[:, :rows], other.labels[:, :rows])
    assert torch.equal(one.boxes[:, :rows], other.boxes[:, :rows])


def test_batches_are_padded_and_crowds_are_no_targets(dataset):
    for batch in take(dataset, CONFIG, 6):
        assert batch.images.dtype == torch.uint8 and batch.images.shape == (4, 3, 96, 96)
        padded = batch.labels == PADDING
        assert (batch.boxes[padded] == 0).all()
        sides = batch.boxes[~padded][:, 2:] - batch.boxes[~padded][:, :2]
        assert (sides > 0).all()
    records = [read_sample(dataset, index)[1] for index in range(len(dataset))]
    crowds = [record for record in records if any(item["iscrowd"] for item in record["annotations"])]
    assert crowds, "the sample has crowd regions"
    for record in crowds:
        view = full_view(record["width"], record["height"], NetworkInput(96))
        assert len(transform_boxes(record["annotations"], view, (96, 96))[1]) == sum(
            not item["iscrowd"] for item in record["annotations"]
        )


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_evaluation_reads_every_image_once_over_all_ranks(dataset, size):
    read = [
        image_id
        for rank in range(size)
        for batch in EvalLoader(
            dataset, CONFIG, batch_size=3, world=World(rank, size, torch.device("cpu")), max_bad_fraction=0.0
        )
        for image_id in batch.image_ids
    ]
    assert sorted(read) == sorted(dataset.image_ids.tolist())


def test_a_reader_that_ends_anywhere_and_starts_again_reads_the_same_from_a_store(shards, bucket, tmp_path):
    shutil.copytree(shards, bucket / "shards")
    dataset = ShardDataset("s3://bucket/shards", "train", ShardCache(tmp_path / "cache"))
    expected = take(ShardDataset(shards, "train"), CONFIG, 30)
    batches_read = []
    while len(batches_read) < 30:
        start = len(batches_read)
        batches_read += take(dataset, CONFIG, min(7, 30 - start), start=4 * start)
    for one, other in zip(expected, batches_read, strict=True):
        assert_equal(one, other)
