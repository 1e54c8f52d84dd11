"""Differences between a source and earlier raw tables, and images that data.exclude leaves out."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from trainer.base.errors import DataError
from trainer.config.schema import DataConfig
from trainer.data import dataset_diff, download
from trainer.data import problem_counts as reasons
from trainer.data.shards import shard

CONFIG = DataConfig(processes=1, threads=2, val_fraction=0.2, max_bad_fraction=0.1)


@pytest.fixture
def coco(make_coco):
    """A COCO set of twenty images."""
    return make_coco("pets", train=[f"{number:04}.jpg" for number in range(20)])


@pytest.fixture
def root(tmp_path):
    return str(tmp_path / "root")


def make(coco, root, config=CONFIG):
    return download.download(f"coco:{coco}", root, config)


def diff(coco, root, before, config=CONFIG):
    return dataset_diff.compare(download.plan(f"coco:{coco}", root, config), before)


def test_new_changed_and_removed_images_are_counted_before_any_is_fetched(coco, root, edit_json, make_jpeg):
    (coco / "train" / "0003.jpg").write_bytes(b"no image")
    before = make(coco, root)
    assert diff(coco, root, before).image_count == 0  # Also the one that was no use then.

    def change(form):
        form["annotations"][14]["bbox"] = [1, 1, 30, 28]  # Of 0007.jpg.
        del form["images"][4]
        form["annotations"] = [box for box in form["annotations"] if box["image_id"] != 104]
        for number in (20, 21):
            name = f"{number:04}.jpg"
            (coco / "train" / name).write_bytes(make_jpeg(seed=number))
            form["images"].append({"id": number, "file_name": name, "width": 40, "height": 30})
            form["annotations"].append({"image_id": number, "category_id": 3, "bbox": [5, 5, 20, 20]})

    edit_json(coco / "annotations" / "instances_train.json", change)
    found = diff(coco, root, before)
    assert (found.new, found.changed, found.removed, found.other_classes) == (2, 1, 1, False)
    assert not list(Path(root, "images").rglob("0020*"))
    # Other bytes of an image, where the source tells.
    (coco / "train" / "0009.jpg").write_bytes(make_jpeg(44, 44))
    assert diff(coco, root, before).changed == 2


def test_excluded_images_are_in_no_later_data(coco, root, tmp_path):
    before = make(coco, root)
    hashed = hashlib.sha256((coco / "train" / "0011.jpg").read_bytes()).hexdigest()
    listed = tmp_path / "exclude.txt"
    listed.write_text(f"# asked for on Monday\n0005.jpg\n\n{hashed.upper()}\n")
    config = replace(CONFIG, exclude=str(listed))
    found = diff(coco, root, before, config)
    assert (found.new, found.changed, found.removed, found.other_exclusions) == (0, 0, 1, True)
    raw = make(coco, root, config)
    assert raw.fingerprint != before.fingerprint and raw.unfetched == 0
    assert raw.problems[reasons.IMAGE_EXCLUDED].count == 2
    assert sum(split.images for split in raw.splits.values()) == 18
    index = shard(raw, root, config)
    assert sum(index.samples.values()) == 18
    # The file's content counts, not its name.
    moved = listed.rename(tmp_path / "other.txt")
    assert make(coco, root, replace(CONFIG, exclude=str(moved))).fingerprint == raw.fingerprint
    moved.write_text("0005.jpg\n")
    assert make(coco, root, replace(CONFIG, exclude=str(moved))).fingerprint != raw.fingerprint


def test_excluded_names_that_are_of_no_image_are_reported(coco, root, tmp_path, caplog):
    listed = tmp_path / "exclude.txt"
    listed.write_text(f"0005.jpg\n0006\n0007.jpeg\n{'0' * 64}\n")
    raw = make(coco, root, replace(CONFIG, exclude=str(listed)))
    assert sum(split.images for split in raw.splits.values()) == 18
    assert "1 names in data.exclude match no image (first: 0007.jpeg)" in caplog.text
    assert len(raw.warnings) == 1


def test_an_image_that_its_hash_excludes_is_not_stored(coco, root, tmp_path):
    hashed = hashlib.sha256((coco / "train" / "0011.jpg").read_bytes()).hexdigest()
    (tmp_path / "exclude.txt").write_text(hashed)
    make(coco, root, replace(CONFIG, exclude=str(tmp_path / "exclude.txt")))
    assert len(list(Path(root, "images").rglob("*.jpg"))) == 19
    assert not list(Path(root, "images").rglob("0011*"))


def test_a_missing_file_of_excluded_images_is_an_error(coco, root, tmp_path):
    with pytest.raises(DataError, match=r"data\.exclude"):
        make(coco, root, replace(CONFIG, exclude=str(tmp_path / "none.txt")))
