import io
import json
import logging
import os
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from source_rows import shards_of

from trainer import storage
from trainer.base.errors import DataError
from trainer.config.schema import DataConfig
from trainer.data import problem_counts as reasons
from trainer.data.download import download, plan
from trainer.data.problem_counts import Problems
from trainer.data.raw_manifest import Category
from trainer.data.shard_folder import ShardIndex, read_index
from trainer.data.shard_index import ShardDataset
from trainer.data.shards import clean_boxes, shard, shards_uri

CONFIG = DataConfig(processes=1, shard_bytes=4000)


def made(source: Path | str, root: Path | str, config: DataConfig = CONFIG) -> ShardIndex:
    return shards_of(source, root, config)


def contents(index: dict) -> dict[str, bytes]:
    return {name: (Path(index.uri) / name).read_bytes() for name in storage.list_files(index.uri)}


def test_shards_are_standard_tars(make_coco, tmp_path):
    names = [f"{number}.jpg" for number in range(12)]
    root = make_coco(train=names, val=["a.jpg"])
    index = made(root, tmp_path / "data")
    assert len(index.splits["train"].shards) > 2
    seen = {}
    for item in index.splits["train"].shards:
        path = Path(index.uri) / item.name
        assert path.stat().st_size == item.bytes and item.bytes % 512 == 0
        with tarfile.open(path) as tar:
            members = tar.getmembers()
            assert [(m.mtime, m.uid, m.gid, m.mode) for m in members] == [(0, 0, 0, 0o644)] * len(members)
            for image, record in zip(members[::2], members[1::2], strict=True):
                assert image.name.removesuffix(".jpg") == record.name.removesuffix(".json")
                seen[image.name] = (tar.extractfile(image).read(), json.load(tar.extractfile(record)))
        listed = subprocess.run(["tar", "-tf", str(path)], capture_output=True, text=True, check=True)
        assert listed.stdout.split() == [member.name for member in members]
    assert set(seen) == set(names)
    for name, (data, record) in seen.items():
        assert data == (root / "train" / name).read_bytes()
        assert (record["file_name"], record["width"], record["height"]) == (name, 40, 30)
        assert [box["bbox"] for box in record["annotations"]] == [[1, 2, 10, 8], [2, 2, 10, 8]]


def test_the_index_and_the_ground_truth(make_coco, tmp_path):
    index = made(make_coco(train=["a.jpg", "b.jpg"], val=["v.jpg"]), tmp_path / "data")
    assert read_index(index.uri) == index
    assert index.kind == "shards" and index.problems == {} and index.quarantined == []
    assert index.categories[1] == Category(1, "dog", 17)
    assert index.class_counts == {"train": {"cat": 2, "dog": 2}, "val": {"cat": 1, "dog": 1}}
    assert {split: (part.samples, part.boxes) for split, part in index.splits.items()} == {
        "train": (2, 4),
        "val": (1, 2),
    }
    truth = ShardDataset(index.uri, "train").annotations()
    assert [image["id"] for image in truth["images"]] == [1, 2]
    assert {(box["image_id"], box["category_id"]) for box in truth["annotations"]} == {
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
    }


@pytest.mark.slow
def test_the_result_does_not_depend_on_the_processes_nor_on_the_place(make_coco, tmp_path):
    root = make_coco(train=[f"{number}.jpg" for number in range(20)])
    one, other = (
        made(root, tmp_path / name, replace(CONFIG, processes=count)) for name, count in (("a", 1), ("b", 2))
    )
    first, second = contents(one), contents(other)
    assert first.pop("index.json") != b"" and second.pop("index.json") != b""
    assert first == second
    assert replace(one, uri="") == replace(other, uri="")


def test_a_second_call_finds_them(make_coco, tmp_path, caplog):
    root = make_coco(train=["a.jpg", "b.jpg"])
    first = made(root, tmp_path)
    before = {name: os.stat(Path(first.uri) / name).st_mtime_ns for name in contents(first)}
    with caplog.at_level(logging.INFO):
        assert made(root, tmp_path, replace(CONFIG, processes=2)) == first
    assert "shards of coco:" in caplog.text and "are there already" in caplog.text
    after = {name: os.stat(Path(first.uri) / name).st_mtime_ns for name in contents(first)}
    assert {name for name in after if after[name] != before[name]} == {"index.json"}, "it is marked as used"


def test_only_settings_that_decide_on_shards_change_the_fingerprint(make_coco, tmp_path):
    raw = download(str(make_coco(train=["a.jpg"])), str(tmp_path), CONFIG)
    same = [CONFIG, replace(CONFIG, max_bad_fraction=0.5), replace(CONFIG, threads=2)]
    others = [replace(CONFIG, shard_bytes=1), replace(CONFIG, max_side=20), replace(CONFIG, jpeg_quality=50)]
    assert len({shards_uri(raw, str(tmp_path), config) for config in same}) == 1
    assert len({shards_uri(raw, str(tmp_path), config) for config in same + others}) == 4


def test_a_plan_without_images_is_refused(make_coco, tmp_path):
    planned = plan(str(make_coco(train=["a.jpg", "b.jpg"])), str(tmp_path), CONFIG)
    with pytest.raises(DataError) as caught:
        shard(planned, str(tmp_path), CONFIG)
    assert "download step" in caught.value.fix


def test_bad_boxes_are_dropped_clipped_and_told(make_coco, edit_json, tmp_path):
    root = make_coco(train=["a.jpg"], val=["b.jpg"])
    boxes = [[1, 1, 0, 5], [100, 1, 5, 5], [30, 20, 50, 50], [1, 1, float("nan"), 2]]

    def change(form):
        form["annotations"] += [{"image_id": 100, "category_id": 3, "bbox": box} for box in boxes]
        form["annotations"].append({"image_id": 100, "category_id": 4, "bbox": [1, 1, 2, 2]})

    edit_json(root / "annotations" / "instances_train.json", change)
    index = made(root, tmp_path / "data", replace(CONFIG, max_bad_fraction=0.5))
    assert index.problems == {
        reasons.BOX_WITHOUT_AREA: 1,
        reasons.BOX_OUTSIDE: 1,
        reasons.BOX_CLIPPED: 1,
        reasons.BOX_NOT_FINITE: 1,
        reasons.BOX_UNKNOWN_CATEGORY: 1,
    }
    assert index.splits["train"].boxes == 3
    truth = ShardDataset(index.uri, "train").annotations()
    assert truth["annotations"][2]["bbox"] == [30, 20, 10, 10]
    with pytest.raises(DataError, match="4 of 9 boxes are bad"):
        made(root, tmp_path / "data", replace(CONFIG, max_bad_fraction=0.4))
    with pytest.raises(DataError, match=r"box without area: a\.jpg \[1"):
        made(root, tmp_path / "fresh", replace(CONFIG, max_bad_fraction=0.4))
    assert list((tmp_path / "fresh").rglob("index.json")) == []


def test_unreadable_images_are_quarantined(make_coco, tmp_path):
    root = make_coco(train=[f"{number}.jpg" for number in range(10)], val=["v.jpg"])
    (root / "train" / "3.jpg").write_bytes((root / "train" / "3.jpg").read_bytes()[:-300])
    (root / "train" / "5.jpg").write_bytes(b"<html>404</html>")
    index = made(root, tmp_path / "data", replace(CONFIG, max_bad_fraction=0.2))
    assert index.problems == {reasons.IMAGE_UNREADABLE: 2}
    reason_by_name = {item.file_name: item.reason for item in index.quarantined}
    assert reason_by_name.keys() == {"3.jpg", "5.jpg"} and "cut off" in reason_by_name["3.jpg"]
    assert index.splits["train"].samples == 8
    with pytest.raises(DataError, match="2 of 11 images are bad"):
        made(root, tmp_path / "other", replace(CONFIG, max_bad_fraction=0.1))


def test_turned_shrunk_and_png_images(make_coco, edit_json, tmp_path):
    root = make_coco(train=["turned.jpg", "large.jpg", "x.png"], val=["v.jpg"])
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 30)).save(root / "train" / "turned.jpg", exif=exif)
    Image.new("L", (400, 300)).save(root / "train" / "large.jpg")
    Image.new("RGBA", (40, 30)).save(root / "train" / "x.png")

    path = root / "annotations" / "instances_train.json"
    edit_json(path, lambda form: form["images"][1].update(width=400, height=300))
    index = made(root, tmp_path / "data", replace(CONFIG, max_side=100))
    truth = ShardDataset(index.uri, "train").annotations()
    by_name = {image["file_name"]: image for image in truth["images"]}
    assert {name: (image["width"], image["height"]) for name, image in by_name.items()} == {
        "turned.jpg": (30, 40),
        "large.jpg": (100, 75),
        "x.png": (40, 30),
    }
    first = {box["image_id"]: (box["bbox"], box["area"]) for box in reversed(truth["annotations"])}
    assert first[by_name["turned.jpg"]["id"]] == ([20, 1, 8, 10], 80)  # annotated in stored pixels
    assert first[by_name["large.jpg"]["id"]] == ([0.25, 0.5, 2.5, 2], 5)
    assert first[by_name["x.png"]["id"]] == ([1, 2, 10, 8], 80)
    for name, image in by_name.items():
        with tarfile.open(Path(index.uri) / "train-00000.tar") as tar:
            data = tar.extractfile(name.partition(".")[0] + ".jpg").read()
        assert Image.open(io.BytesIO(data)).size == (image["width"], image["height"])


def test_workers_do_not_import_torch():
    code = "import sys, trainer.data.download, trainer.data.shards\n"
    code += "assert not {'torch', 'minio', 'kfp'} & sys.modules.keys(), sorted(sys.modules)\n"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_a_data_root_in_an_object_store_gives_the_same_shards(make_coco, bucket, tmp_path):
    root = make_coco(train=[f"{number}.jpg" for number in range(6)])
    local = made(root, tmp_path / "data")
    remote = made(root, "s3://bucket/data")
    assert remote.uri.startswith("s3://bucket/data/shards/")
    assert remote.splits == local.splits
    folder = bucket / "data" / "shards" / remote.fingerprint
    for item in local.splits["train"].shards:
        assert (folder / item.name).read_bytes() == (Path(local.uri) / item.name).read_bytes()
    assert made(root, "s3://bucket/data") == remote
    storage.delete(f"{remote.uri}/index.json")
    storage.delete(f"{remote.uri}/train-00000.json")
    assert made(root, "s3://bucket/data") == remote


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
    kept = clean_boxes([bad, annotation(1, 2, 3, 4)], 20, 10, 2, problems, "x.jpg")
    assert [box["bbox"] for box in kept] == [[1, 2, 3, 4]]
    assert problems.counts == {reason: 1}
    assert problems.examples[reason][0].startswith("x.jpg")
    assert reason in reasons.BAD_BOXES


def test_boxes_that_stick_out_are_clipped():
    problems = Problems()
    kept = clean_boxes([annotation(-2, -3, 30, 8, area=200.0)], 20, 10, 1, problems, "x.jpg")
    assert kept[0]["bbox"] == [0.0, 0.0, 20.0, 5.0]
    assert kept[0]["area"] == 100.0
    assert problems.counts == {reasons.BOX_CLIPPED: 1}
    problems.check("x", images=1, boxes=1, max_bad_fraction=0.0)


def test_the_area_of_the_source_is_kept():
    kept = clean_boxes([annotation(0, 0, 5, 5, area=7.5), annotation(0, 0, 5, 5)], 20, 10, 1, Problems(), "x")
    assert [box["area"] for box in kept] == [7.5, 25]


def test_what_arithmetic_leaves_outside_is_not_counted():
    problems = Problems()
    box = {"category_id": 0, "bbox": [0.1, -1e-13, 9.9, 10 + 2e-13], "area": 0.0, "iscrowd": 0}
    (kept,) = clean_boxes([box], 10, 10, 1, problems, "a.jpg")
    assert kept["bbox"] == [0.1, 0, 9.9, 10] and problems.counts == {}
    clean_boxes([box | {"bbox": [0.1, 0, 9.91, 10]}], 10, 10, 1, problems, "a.jpg")
    assert problems.counts == {reasons.BOX_CLIPPED: 1}
