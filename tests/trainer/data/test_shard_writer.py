"""What is left out when images are sharded, and which boxes are clipped or dropped."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from trainer.base.errors import DataError
from trainer.config.schema import DataConfig
from trainer.data import problem_counts as reasons
from trainer.data.download import download
from trainer.data.problem_counts import Problems
from trainer.data.shard_index import ShardDataset
from trainer.data.shard_writer import clean
from trainer.data.shards import shard

CONFIG = DataConfig(processes=1)


def test_small_boxes_are_left_out_where_asked(make_coco, tmp_path):
    raw = download(str(make_coco(train=["a.jpg", "b.jpg"])), str(tmp_path), CONFIG)
    indexes = [shard(raw, str(tmp_path), replace(CONFIG, min_box_side=side)) for side in (0.0, 8.0)]
    assert len({index.uri for index in indexes}) == 2
    annotations = [ShardDataset(index.uri, "train").read(0)[1]["annotations"] for index in indexes]
    assert list(map(len, annotations)) == [2, 2]
    with pytest.raises(DataError):
        shard(raw, str(tmp_path), replace(CONFIG, min_box_side=9.0))


def test_small_images_are_left_out_where_asked(make_coco, make_jpeg, tmp_path):
    root = make_coco(train=["a.jpg", "b.jpg", "narrow.jpg"], val=["v.jpg"])
    (root / "train" / "narrow.jpg").write_bytes(make_jpeg(60, 25))
    raw = download(str(root), str(tmp_path), CONFIG)
    config = replace(CONFIG, max_bad_fraction=0)
    indexes = [shard(raw, str(tmp_path), replace(config, min_side=side)) for side in (0, 25, 26)]
    assert len({index.uri for index in indexes}) == 3
    assert [index.splits["train"].samples for index in indexes] == [3, 3, 2]
    assert indexes[2].problems == {reasons.IMAGE_SMALL: 1} and indexes[2].quarantined == []
    sidecar = json.loads((Path(indexes[2].uri) / "train-00000.json").read_text())
    assert sidecar["problems"][reasons.IMAGE_SMALL]["examples"] == ["narrow.jpg: 60x25"]


def test_where_no_image_is_left_it_says_so(make_coco, tmp_path):
    raw = download(str(make_coco(train=["a.jpg", "b.jpg"])), str(tmp_path), CONFIG)
    with pytest.raises(DataError, match=r"no training image is left in .*min_side: 2") as caught:
        shard(raw, str(tmp_path), replace(CONFIG, min_side=31))
    assert "data.min_side" in caught.value.fix
    assert not list((tmp_path / "shards").rglob("index.json"))


NAN = float("nan")


def annotation(*bbox: float, category: int = 0, area: float = 0.0) -> dict:
    return {"category_id": category, "bbox": list(bbox), "area": area, "iscrowd": 0}


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (annotation(1, 1, 0, 5), reasons.BOX_WITHOUT_AREA),
        (annotation(1, 1, 0.05, 5), reasons.BOX_WITHOUT_AREA),
        (annotation(20, 1, 5, 5), reasons.BOX_OUTSIDE),
        (annotation(-9, 1, 9, 5), reasons.BOX_OUTSIDE),
        (annotation(1, 1, 5, 5, category=-1), reasons.BOX_UNKNOWN_CATEGORY),
        (annotation(1, 1, 5, 5, category=2), reasons.BOX_UNKNOWN_CATEGORY),
        (annotation(1, 1, NAN, 5), reasons.BOX_NOT_FINITE),
        (annotation(1, float("inf"), 5, 5), reasons.BOX_NOT_FINITE),
    ],
)
def test_bad_boxes_are_dropped_and_counted(bad, reason):
    problems = Problems()
    kept = clean([bad, annotation(1, 2, 3, 4)], 20, 10, 2, problems, "x.jpg")
    assert [box["bbox"] for box in kept] == [[1, 2, 3, 4]]
    assert problems.counts == {reason: 1}
    assert problems.examples[reason][0].startswith("x.jpg")
    assert reason in reasons.BAD_BOXES


def test_boxes_that_stick_out_are_clipped():
    problems = Problems()
    kept = clean([annotation(-2, -3, 30, 8, area=200.0)], 20, 10, 1, problems, "x.jpg")
    assert kept[0]["bbox"] == [0.0, 0.0, 20.0, 5.0]
    assert kept[0]["area"] == 100.0
    assert problems.counts == {reasons.BOX_CLIPPED: 1}
    problems.check("x", images=1, boxes=1, max_bad_fraction=0.0)


def test_the_area_of_the_source_is_kept():
    kept = clean([annotation(0, 0, 5, 5, area=7.5), annotation(0, 0, 5, 5)], 20, 10, 1, Problems(), "x")
    assert [box["area"] for box in kept] == [7.5, 25]


def test_boxes_below_a_side_are_left_out_and_are_no_error():
    problems = Problems()
    boxes = [annotation(1, 1, 3, 9), annotation(1, 1, 4, 4), annotation(18, 1, 4, 9)]
    kept = clean(boxes, 20, 10, 2, problems, "x.jpg", min_side=4)
    assert [box["bbox"] for box in kept] == [[1, 1, 4, 4]]
    assert problems.counts == {reasons.BOX_SMALL: 2} and reasons.BOX_SMALL not in reasons.BAD_BOXES


def test_what_arithmetic_leaves_outside_is_not_counted():
    problems = Problems()
    box = {"category_id": 0, "bbox": [0.1, -1e-13, 9.9, 10 + 2e-13], "area": 0.0, "iscrowd": 0}
    (kept,) = clean([box], 10, 10, 1, problems, "a.jpg")
    assert kept["bbox"] == [0.1, 0, 9.9, 10] and problems.counts == {}
    clean([box | {"bbox": [0.1, 0, 9.91, 10]}], 10, 10, 1, problems, "a.jpg")
    assert problems.counts == {reasons.BOX_CLIPPED: 1}
