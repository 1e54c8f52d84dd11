"""What int8 is calibrated on."""

import torch

from trainer.data.decoding import read_sample
from trainer.data.shard_index import ShardDataset
from trainer.data.transforms import letterbox
from trainer.export.quantize import CalibrationImages

SIZE = 96


def _all(images):
    found = []
    while (item := images.get_next()) is not None:
        found.append(item)
    return found


def test_calibration_images_are_of_the_training_split(shards):
    images = CalibrationImages(shards, SIZE, 100)
    found = _all(images)
    train = ShardDataset(shards, "train")
    assert images.count == len(found) == len(train)  # All, where there are fewer than asked for.
    for index, item in enumerate(found):
        expected = letterbox(read_sample(train, index)[0], SIZE)[0]
        assert list(item) == ["images"] and item["images"].shape == (1, 3, SIZE, SIZE)
        assert torch.equal(torch.from_numpy(item["images"][0]), expected)


def test_calibration_images_are_spread_over_the_split(shards):
    images = CalibrationImages(shards, SIZE, 2)
    found = _all(images)
    train = ShardDataset(shards, "train")
    assert images.count == len(found) == 2
    last = letterbox(read_sample(train, len(train) - 1)[0], SIZE)[0]
    assert torch.equal(torch.from_numpy(found[1]["images"][0]), last)
