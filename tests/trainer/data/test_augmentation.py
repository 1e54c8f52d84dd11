"""Sizes, mosaics and mix-up: boxes follow the pixels, draws follow from seed, epoch and index."""

import dataclasses
import json
from collections import Counter

import numpy as np
import pytest
import torch
from batches import take
from PIL import Image
from source_rows import shards_of

from trainer.config.schema import LoaderConfig
from trainer.data.augmentation import Augmentation
from trainer.data.batch import PADDING
from trainer.data.sample_order import SampleStream
from trainer.data.shard_index import ShardDataset
from trainer.data.transforms import FILL
from trainer.model import recipes

STRONG = LoaderConfig(
    image_size=128,
    workers=2,
    prefetch=2,
    scale=[0.7, 1.4],
    brightness=0.2,
    flip_vertical=0.5,
    mosaic=0.5,
    mixup=0.5,
    sizes=[96, 128, 160],
    zoom_out=0.3,
    iou_crop=0.5,
    color_probability=0.5,
    channel_shuffle=0.5,
)

# Crops leave objects without boxes; zooming out leaves few pixels.
NO_WINDOWS = {"zoom_out": 0.0, "iou_crop": 0.0}


@pytest.fixture(scope="module")
def dataset(shards):
    return ShardDataset(shards, "train")


@pytest.fixture(scope="module")
def rectangles(tmp_path_factory):
    """Black images with one white rectangle each, which is the box."""
    folder = tmp_path_factory.mktemp("rectangles")
    generator = np.random.default_rng(0)
    images, boxes = [], []
    for number in range(1, 25):
        width, height = (int(side) for side in generator.integers(100, 300, 2))
        w, h = (
            int(side * share)
            for side, share in zip((width, height), generator.uniform(0.3, 0.6, 2), strict=True)
        )
        x, y = int(generator.integers(0, width - w)), int(generator.integers(0, height - h))
        pixels = np.zeros((height, width), np.uint8)
        pixels[y : y + h, x : x + w] = 255
        Image.fromarray(pixels).save(folder / f"{number}.jpg", quality=98)
        images.append({"id": number, "file_name": f"{number}.jpg", "width": width, "height": height})
        boxes.append({"id": number, "image_id": number, "category_id": 1, "bbox": [x, y, w, h],
                      "area": w * h, "iscrowd": 0})  # fmt: skip
    form = {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "white"}]}
    (folder / "train.json").write_text(json.dumps(form))
    config = recipes.load("debug", {"data.processes": 1}).data
    return ShardDataset(shards_of(f"coco:{folder}/train.json", folder / "root", config).uri, "train")


def targets(batch, row):
    return [
        (label, *box)
        for label, box in zip(batch.labels[row].tolist(), batch.boxes[row].tolist(), strict=True)
        if label != PADDING
    ]


def pictures(batches):
    """Every sample by itself: id, size, pixels, targets, colors."""
    return [
        (
            image_id,
            batch.images.shape[-1],
            batch.images[row].numpy().tobytes(),
            targets(batch, row),
            batch.color[row].tolist(),
        )
        for batch in batches
        for row, image_id in enumerate(batch.image_ids)
    ]


@pytest.mark.parametrize("changes", [
    {"mosaic": 1.0, "mixup": 0.0}, {"mosaic": 0.0, "mixup": 1.0}, {"mosaic": 1.0, "mixup": 1.0},
    {"mosaic": 0.0, "mixup": 0.0, "scale": [0.1, 2.0], "scale_draw": "uniform"},
    {"mosaic": 0.0, "mixup": 0.0, "resize": "squash", "zoom_out": 0.5, "fill": 0},
])  # fmt: skip
def test_boxes_follow_the_pixels(rectangles, changes):
    """What is bright is in a box, but for boxes of which too little is left; what a box holds is bright."""
    config = dataclasses.replace(
        STRONG, brightness=0.0, sizes=[], image_size=320, **{**NO_WINDOWS, **changes}
    )
    # With half of each picture a rectangle on black is still lighter than gray on black.
    floor = 130 if config.mixup else 190
    visible = lost = 0
    for batch in take(rectangles, config, 6):
        for row in range(4):
            image = batch.images[row, 0].int()
            covered = torch.zeros_like(image, dtype=torch.bool)
            for _, x1, y1, x2, y2 in targets(batch, row):
                assert 0 <= x1 < x2 <= 320 and 0 <= y1 < y2 <= 320
                inside = image[round(y1) + 2 : round(y2) - 2, round(x1) + 2 : round(x2) - 2]
                assert not inside.numel() or inside.min() >= (95 if config.mixup else floor)
                covered[max(0, round(y1) - 2) : round(y2) + 2, max(0, round(x1) - 2) : round(x2) + 2] = True
                visible += 1
            lost += int(((image > max(floor, FILL + 40)) & ~covered).sum())
    assert visible > (60 if config.mosaic else 20)
    # Slivers of boxes of which less than a quarter is seen.
    assert lost < 24 * 320 * 320 * 0.01


def test_the_draw_is_a_function_of_seed_epoch_and_index(dataset):
    """Workers, passes, ranks and the place where the stream is entered change nothing."""
    weights = np.linspace(0.5, 3, len(dataset))
    whole = pictures(take(dataset, STRONG, 16, weights=weights))
    assert len({size for _, size, *_ in whole}) == 3
    other = dataclasses.replace(STRONG, workers=3, prefetch=1)
    assert pictures(take(dataset, other, 16, weights=weights)) == whole
    assert pictures(take(dataset, STRONG, 9, start=28, weights=weights)) == whole[28:]
    assert pictures(take(dataset, STRONG, 32, batch_size=2, weights=weights)) == whole
    ranks = [take(dataset, STRONG, 16, rank=rank, size=2, weights=weights) for rank in (0, 1)]
    assert pictures([batch for pair in zip(*ranks, strict=True) for batch in pair]) == whole
    uneven = [take(dataset, STRONG, 16, rank=rank, size=3, weights=weights) for rank in range(3)]
    assert pictures([batch for step in zip(*uneven, strict=True) for batch in step]) == whole


def test_the_first_step_has_the_largest_size_and_all_occur(dataset):
    config = dataclasses.replace(STRONG, sizes=[96, 160, 128], mosaic=0.0, mixup=0.0)
    augmentation = Augmentation(config, SampleStream([9], 0), np.full((9, 2), 50), seed=3, epochs=None)
    sizes = [augmentation.input_size(step, 0) for step in range(600)]
    assert sizes[0] == 160
    assert all(150 < count < 250 for count in Counter(sizes).values()) and set(sizes) == {96, 128, 160}
    often = dataclasses.replace(config, sizes=[96, 160, 160, 160])
    repeated = Augmentation(often, SampleStream([9], 0), np.full((9, 2), 50), seed=3, epochs=None)
    assert 400 < [repeated.input_size(step, 0) for step in range(600)].count(160) < 500
    other = Augmentation(config, SampleStream([9], 0), np.full((9, 2), 50), seed=4, epochs=None)
    assert [other.input_size(step, 0) for step in range(600)] != sizes


def test_the_last_epochs_are_plain(dataset):
    """Three epochs of 24 in steps of 4, the last one plain: only flips, and colors that stay."""
    config = dataclasses.replace(STRONG, plain_epochs=1)
    batches = take(dataset, config, 18, epochs=3)
    assert pictures(batches[:12]) == pictures(take(dataset, STRONG, 12))
    last = pictures(batches[12:])
    alone = dataclasses.replace(
        STRONG,
        mosaic=0.0,
        mixup=0.0,
        sizes=[],
        scale=[1.0, 1.0],
        brightness=0.0,
        zoom_out=0.0,
        iou_crop=0.0,
        channel_shuffle=0.0,
    )
    expected = [
        (image_id, 128, batch.images[row].numpy().tobytes(), targets(batch, row), np.eye(3, 4).tolist())
        for batch in take(dataset, alone, 6, start=48)
        for row, image_id in enumerate(batch.image_ids)
    ]
    assert last == expected
    assert all(batch.color is None for batch in take(dataset, alone, 1))


def test_a_batch_over_the_border_of_the_plain_epochs(dataset):
    config = dataclasses.replace(STRONG, plain_epochs=1)
    batch = take(dataset, config, 4, global_batch=7, batch_size=7, epochs=2)[3]  # positions 21 to 27
    assert batch.color.shape == (7, 3, 4)
    plain = [(color == torch.eye(3, 4)).all().item() for color in batch.color]
    assert plain == [False] * 3 + [True] * 4


def test_a_damaged_image_leaves_a_gray_tile_without_boxes(rectangles, monkeypatch):
    config = dataclasses.replace(STRONG, brightness=0.0, sizes=[], image_size=320, mosaic=1.0, mixup=0.0)
    read, chosen = rectangles.read, int(rectangles.image_ids[2])
    whole = take(rectangles, config, 6)

    def damaged(index):
        data, record = read(index)
        return (data[:20] if record["image_id"] == chosen else data), record

    monkeypatch.setattr(rectangles, "read", damaged)
    broken = take(rectangles, config, 6, max_bad_fraction=0.1)
    fewer = 0
    for one, other in zip(whole, broken, strict=True):
        for row in range(4):
            before, after = targets(one, row), targets(other, row)
            assert set(after) <= set(before)
            fewer += len(before) - len(after)
            assert torch.equal(one.images[row], other.images[row]) == (before == after)
    assert fewer >= 2
