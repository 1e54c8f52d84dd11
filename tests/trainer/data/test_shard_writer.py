"""What is left out when images are sharded."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from trainer.base.errors import DataError
from trainer.config.schema import DataConfig
from trainer.data import problem_counts as reasons
from trainer.data.download import download
from trainer.data.shard_index import ShardDataset
from trainer.data.shards import shard

CONFIG = DataConfig(processes=1)


def test_small_boxes_are_left_out_where_asked(make_coco, tmp_path):
    raw = download(str(make_coco(train=["a.jpg", "b.jpg"])), str(tmp_path), CONFIG)
    indexes = [shard(raw, str(tmp_path), replace(CONFIG, min_box_side=side)) for side in (0.0, 8.0)]
    assert len({index["uri"] for index in indexes}) == 2
    annotations = [ShardDataset(index["uri"], "train").read(0)[1]["annotations"] for index in indexes]
    assert list(map(len, annotations)) == [2, 2]
    with pytest.raises(DataError):
        shard(raw, str(tmp_path), replace(CONFIG, min_box_side=9.0))


def test_small_images_are_left_out_where_asked(make_coco, make_jpeg, tmp_path):
    root = make_coco(train=["a.jpg", "b.jpg", "narrow.jpg"], val=["v.jpg"])
    (root / "train" / "narrow.jpg").write_bytes(make_jpeg(60, 25))
    raw = download(str(root), str(tmp_path), CONFIG)
    config = replace(CONFIG, max_bad_fraction=0)
    indexes = [shard(raw, str(tmp_path), replace(config, min_side=side)) for side in (0, 25, 26)]
    assert len({index["uri"] for index in indexes}) == 3
    assert [index["splits"]["train"]["samples"] for index in indexes] == [3, 3, 2]
    assert indexes[2]["problems"] == {reasons.IMAGE_SMALL: 1} and indexes[2]["quarantined"] == []
    sidecar = json.loads((Path(indexes[2]["uri"]) / "train-00000.json").read_text())
    assert sidecar["problems"][reasons.IMAGE_SMALL]["examples"] == ["narrow.jpg: 60x25"]


def test_the_size_of_an_image_is_that_before_it_is_shrunk(make_coco, tmp_path):
    raw = download(str(make_coco(train=["a.jpg", "b.jpg"])), str(tmp_path), CONFIG)
    index = shard(raw, str(tmp_path), replace(CONFIG, max_side=20, min_side=30))
    assert index["splits"]["train"]["samples"] == 1 and index["problems"] == {}


def test_where_no_image_is_left_it_says_so(make_coco, tmp_path):
    raw = download(str(make_coco(train=["a.jpg", "b.jpg"])), str(tmp_path), CONFIG)
    with pytest.raises(DataError, match=r"no training image is left in .*min_side: 2") as caught:
        shard(raw, str(tmp_path), replace(CONFIG, min_side=31))
    assert "data.min_side" in caught.value.fix
    assert not list((tmp_path / "shards").rglob("index.json"))
