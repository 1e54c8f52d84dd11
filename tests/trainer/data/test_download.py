import logging
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trainer import storage
from trainer.base.errors import DataError
from trainer.config.schema import DataConfig
from trainer.data import problem_counts as reasons
from trainer.data.download import download
from trainer.data.image_keys import place
from trainer.data.raw_folder import SplitCounts, Table, read_manifest

CONFIG = DataConfig(processes=1, threads=4)


def raw_folder(manifest: dict) -> Path:
    return Path(manifest.uri)


def rows_of(manifest: dict, split: str) -> list[dict]:
    table = Table(f"{manifest.uri}/{split}.parquet")
    return [row for block in range(table.blocks) for row in table.batch(block).to_pylist()]


def image_of(manifest: dict, row: dict) -> str:
    return f"{manifest.images}/{place(row['key'], row['file_name'], row['origin'], row['version'])}"


def sizes_of(manifest: dict) -> list[int]:
    return np.load(raw_folder(manifest) / f"sizes-{manifest.content}.npy").tolist()


def test_what_it_writes(make_coco, tmp_path):
    root = make_coco(train=["a.jpg", "sub/b.jpg"], val=["c.jpg"])
    manifest = download(str(root), str(tmp_path / "data"), CONFIG)
    folder = raw_folder(manifest)
    assert folder.parent == tmp_path / "data" / "raw" and folder.name == manifest.fingerprint
    assert read_manifest(str(folder)) == manifest
    assert manifest.splits == {"train": SplitCounts(2, 4), "val": SplitCounts(1, 2)}
    assert [item.name for item in manifest.categories] == ["cat", "dog"]
    assert manifest.source == f"coco:{root}" and len(storage.list_files(manifest.images)) == 3
    for split, names in (("train", ["a.jpg", "sub/b.jpg"]), ("val", ["c.jpg"])):
        rows = rows_of(manifest, split)
        assert [row["file_name"] for row in rows] == names
        for row in rows:
            written = storage.read_bytes(image_of(manifest, row))
            assert written == (root / split / row["file_name"]).read_bytes()
            assert sizes_of(manifest)[row["image_id"] - 1] == len(written)
    assert (folder / "failed.csv").read_text() == "split,file_name,origin,reason,detail\n"


def test_a_second_call_finds_it(make_coco, tmp_path, caplog):
    root = make_coco(train=["a.jpg"] + [f"{n}.jpg" for n in range(10)])
    first = download(str(root), str(tmp_path / "data"), CONFIG)
    stamps = {path: path.stat().st_mtime_ns for path in raw_folder(first).rglob("*")}
    with caplog.at_level(logging.INFO):
        assert download(f"coco:{root}/", str(tmp_path / "data") + "/", CONFIG) == first
    assert "are there already" in caplog.text
    assert {path: path.stat().st_mtime_ns for path in raw_folder(first).rglob("*")} == stamps


def test_what_changes_the_fingerprint(make_coco, make_jpeg, tmp_path):
    root = make_coco(train=["a.jpg", "b.jpg", "c.jpg"])

    def name(config: DataConfig = CONFIG) -> str:
        return download(str(root), str(tmp_path / "data"), config).fingerprint

    names = [name(), name(replace(CONFIG, max_bad_fraction=0.5, threads=1, jpeg_quality=50))]
    assert names[0] == names[1]
    names.append(name(replace(CONFIG, val_fraction=0.5)))
    names.append(name(replace(CONFIG, classes=["dog"])))
    (root / "train" / "a.jpg").write_bytes(make_jpeg(50, 50))
    names.append(name())
    assert len(set(names)) == 4


def test_an_empty_file_that_a_power_cut_left_is_fetched_again(make_coco, tmp_path):
    root = make_coco(train=["a.jpg", "b.jpg"])
    manifest = download(str(root), str(tmp_path / "data"), CONFIG)
    (raw_folder(manifest) / "manifest.json").unlink()
    shutil.rmtree(raw_folder(manifest) / "fetched")
    emptied = Path(image_of(manifest, rows_of(manifest, "train")[0]))
    emptied.write_bytes(b"")
    download(str(root), str(tmp_path / "data"), CONFIG)
    assert emptied.stat().st_size > 100


def test_missing_images_are_recorded_and_left_out(make_coco, tmp_path):
    root = make_coco(train=[f"{number}.jpg" for number in range(20)], val=["v.jpg"])
    (root / "train" / "7.jpg").unlink()
    manifest = download(str(root), str(tmp_path / "data"), replace(CONFIG, max_bad_fraction=0.05))
    assert manifest.splits["train"] == SplitCounts(19, 38)
    assert manifest.problems[reasons.IMAGE_MISSING].count == 1
    assert "train/7.jpg" in manifest.problems[reasons.IMAGE_MISSING].examples[0]
    (absent,) = [row for row in rows_of(manifest, "train") if row["file_name"] == "7.jpg"]
    assert [number for number, size in enumerate(sizes_of(manifest), 1) if not size] == [absent["image_id"]]
    (line,) = (raw_folder(manifest) / "failed.csv").read_text().splitlines()[1:]
    assert line.startswith("train,7.jpg,") and reasons.IMAGE_MISSING in line
    with pytest.raises(DataError, match="1 of 21 images are bad"):
        download(str(root), str(tmp_path / "data"), replace(CONFIG, max_bad_fraction=0.01))


def test_too_many_missing_images_are_an_error_that_leaves_no_manifest(make_coco, tmp_path):
    root = make_coco(train=[f"{number}.jpg" for number in range(40)])
    for number in range(20):
        (root / "train" / f"{number}.jpg").unlink()
    with pytest.raises(DataError, match="images are bad") as caught:
        download(str(root), str(tmp_path / "data"), CONFIG)
    assert caught.value.message.count("image missing:") == 10
    assert "data.max_bad_fraction" in caught.value.fix
    assert list((tmp_path / "data").rglob("manifest.json")) == []


def test_a_class_without_boxes_is_warned_of(make_coco, edit_json, tmp_path, caplog):
    root = make_coco(train=["a.jpg", "b.jpg"])
    path = root / "annotations" / "instances_train.json"
    edit_json(path, lambda form: form["categories"].append({"id": 20, "name": "unicorn"}))
    manifest = download(str(root), str(tmp_path / "data"), CONFIG)
    assert [item.name for item in manifest.categories] == ["cat", "dog", "unicorn"]
    assert manifest.problems[reasons.CLASS_WITHOUT_BOXES].examples == ["unicorn"]
    assert "unicorn" in caplog.text and "data.classes" in caplog.text


def test_a_changed_source_fetches_only_what_is_new(make_coco, make_jpeg, tmp_path):
    root = make_coco(train=["a.jpg", "b.jpg", "c.jpg"])
    first = download(str(root), str(tmp_path / "data"), CONFIG)
    before = {path: path.stat().st_mtime_ns for path in Path(first.images).rglob("*.jpg")}
    (root / "train" / "b.jpg").write_bytes(make_jpeg(50, 50))
    second = download(str(root), str(tmp_path / "data"), CONFIG)
    assert second.fingerprint != first.fingerprint and second.images == first.images
    after = {path: path.stat().st_mtime_ns for path in Path(second.images).rglob("*.jpg")}
    assert before.items() < after.items() and len(after) == 4
    rows = [row for split in ("train", "val") for row in rows_of(second, split)]
    (row,) = [row for row in rows if row["file_name"] == "b.jpg"]
    assert storage.read_bytes(image_of(second, row)) == make_jpeg(50, 50)


def test_boxes_of_unlisted_categories_are_named(make_coco, edit_json, tmp_path):
    root = make_coco(train=["a.jpg", "b.jpg"])

    def change(form: dict) -> None:
        for number, box in enumerate(form["annotations"]):
            box["category_id"] = 9 if number else "x"

    edit_json(root / "annotations" / "instances_train.json", change)
    with pytest.raises(
        DataError, match=r'cat, dog, but 4 boxes are of .* not listed: 9 \(3\), "x" \(1\)'
    ) as caught:
        download(str(root), str(tmp_path / "data"), CONFIG)
    assert "`categories`" in caught.value.fix
