"""Tiles of large images: where they are, which boxes they keep, and shards of them."""

import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from source_rows import shards_of

from trainer.config.schema import DataConfig
from trainer.data import tiles
from trainer.data.shard_index import ShardDataset

CONFIG = DataConfig(processes=1, shard_bytes=100_000, tile=100, tile_overlap=0.2, jpeg_quality=100)


def ground(seed):
    """Smooth colors, which a JPEG keeps, uint8 [180, 250, 3]."""
    small = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(small).resize((250, 180), Image.Resampling.BICUBIC))


@pytest.mark.parametrize("overlap", [0.0, 0.2, 0.5, 0.8])
@pytest.mark.parametrize("side", [30, 100, 101, 180, 999, 1000])
def test_tiles_cover_an_image_and_share_what_they_must(side, overlap):
    found = tiles.tiling(side, 60, 100, overlap)
    assert len(set(found)) == len(found) and {(top, height) for _, top, _, height in found} == {(0, 60)}
    assert {width for _, _, width, _ in found} == {min(side, 100)}
    starts = [left for left, *_ in found]
    assert starts[0] == 0 and starts[-1] + found[-1][2] == side
    steps = np.diff(starts)
    assert (steps <= 100 - round(100 * overlap)).all()
    # One tile less would share too little.
    assert len(steps) < 2 or (side - 100) / (len(steps) - 1) > 100 - round(100 * overlap)
    assert tiles.tiling(side, 60, 0, overlap) == [(0, 0, side, 60)]


def test_boxes_at_the_border_of_a_tile():
    boxes = [[10, 0, 40, 8], [35, 0, 20, 8], [45, 0, 20, 8], [46, 0, 20, 8], [0, 20, 100, 1.5], [60, 0, 9, 9]]
    items = [{"category_id": 0, "bbox": box, "area": box[2] * box[3] / 2, "iscrowd": 0} for box in boxes]
    kept = tiles.crop_boxes(items, (20, 0, 30, 100))
    # Three quarters, the same, exactly a quarter; less than that, and outside, are dropped.
    assert [item["bbox"] for item in kept] == [[0, 0, 30, 8], [15, 0, 15, 8], [25, 0, 5, 8], [0, 20, 30, 1.5]]
    assert [item["area"] for item in kept] == [120, 60, 20, 22.5]
    crowd = tiles.crop_boxes([{**items[3], "iscrowd": 1}], (20, 0, 30, 100))
    assert [item["bbox"] for item in crowd] == [[26, 0, 4, 8]]


@pytest.fixture
def large(tmp_path):
    """A COCO set of two training images and one for validation, 250x180, with three boxes each."""
    for split, names in (("train", ["a", "b"]), ("val", ["v"])):
        form = {"images": [], "annotations": [], "categories": [{"id": 3, "name": "cat"}]}
        for number, name in enumerate(names, 1):
            folder = tmp_path / "coco" / split
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(ground(number)).save(folder / f"{name}.png")
            form["images"].append({"id": number, "file_name": f"{name}.png", "width": 250, "height": 180})
            for box in ([5, 5, 20, 20], [90, 60, 30, 30], [230, 160, 20, 20]):
                item = {"id": len(form["annotations"]) + 1, "image_id": number, "category_id": 3}
                form["annotations"].append({**item, "bbox": box, "area": box[2] * box[3], "iscrowd": 0})
        (tmp_path / "coco" / "annotations").mkdir(exist_ok=True)
        (tmp_path / "coco" / "annotations" / f"instances_{split}.json").write_text(json.dumps(form))
    return str(tmp_path / "coco")


def made(source, root, config=CONFIG):
    return shards_of(source, root, config)


def test_training_images_are_cut_and_others_stay_whole(large, tmp_path):
    index = made(large, tmp_path / "data", replace(CONFIG, max_side=120))
    places = tiles.tiling(250, 180, 100, 0.2)
    assert index.samples == {"train": 2 * len(places), "val": 1} and len(places) == 6
    train, val = ShardDataset(index.uri, "train"), ShardDataset(index.uri, "val")
    assert val.sizes.tolist() == [[250, 180]] and len(val.annotations()["annotations"]) == 3
    assert len(set(train.image_ids.tolist())) == len(train)
    found = []
    for number in range(len(train)):
        jpeg, record = train.read(number)
        left, top, width, height = record["tile"]
        image = ground(1 if record["file_name"] == "a.png" else 2)
        pixels = np.asarray(Image.open(io.BytesIO(jpeg)), int)
        assert pixels.shape == (height, width, 3) == (100, 100, 3)
        assert np.abs(pixels - image[top : top + height, left : left + width]).mean() < 3
        for item in record["annotations"]:
            x, y, w, h = item["bbox"]
            found.append((record["file_name"], x + left, y + top, w, h))
    # The box in the middle: whole in a tile of the second column, and cut in others.
    assert ("a.png", 90, 60, 30, 30) in found and ("b.png", 90, 60, 10, 30) in found
    assert {item for item in found if item[1] == 5} == {("a.png", 5, 5, 20, 20), ("b.png", 5, 5, 20, 20)}
    with tarfile.open(Path(index.uri) / index.splits["train"].shards[0].name) as tar:
        assert "a@75x0.jpg" in tar.getnames() or "b@75x0.jpg" in tar.getnames()
    dropped = made(large, tmp_path / "data", replace(CONFIG, empty_images="drop"))
    assert dropped.samples["train"] < 12 and dropped.splits["train"].boxes == index.splits["train"].boxes
