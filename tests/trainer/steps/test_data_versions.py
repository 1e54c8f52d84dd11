"""A version of the data: the same images and boxes again, whatever has become of the source."""

import json
import shutil
from dataclasses import replace

import pytest
from PIL import Image

from trainer import storage
from trainer.base.errors import ConfigError, DataError, StorageError, check_name
from trainer.config.schema import DataConfig
from trainer.data.shards import shard
from trainer.steps import data_versions
from trainer.steps.data_versions import fetch

CONFIG = DataConfig(processes=1, threads=2, val_fraction=0.5)


@pytest.fixture
def source(tmp_path):
    """A COCO folder; calling it writes it anew with so many images."""
    root = tmp_path / "source"

    def write(images):
        for split in ("train", "val"):
            (root / split).mkdir(parents=True, exist_ok=True)
        (root / "annotations").mkdir(exist_ok=True)
        for split in ("train", "val"):
            names = [f"{number}.png" for number in range(images)]
            for name in names:
                Image.new("RGB", (8, 8)).save(root / split / name)
            listed = [
                {"id": n, "file_name": name, "width": 8, "height": 8} for n, name in enumerate(names, start=1)
            ]
            boxes = [
                {"id": n, "image_id": n, "category_id": 1, "bbox": [1, 1, 4, 4], "area": 16, "iscrowd": 0}
                for n in range(1, images + 1)
            ]
            content = {"images": listed, "annotations": boxes, "categories": [{"id": 1, "name": "cat"}]}
            (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
        return f"coco:{root}"

    return write


def images_of(manifest):
    return manifest.splits["train"].images


def test_a_known_version_brings_its_data_back(source, tmp_path):
    root = str(tmp_path / "data")
    first = fetch(source(2), root, CONFIG, "monday")
    assert images_of(first) == 2
    changed = source(3)
    assert images_of(fetch(changed, root, CONFIG, "monday")) == 2
    assert images_of(fetch(changed, root, CONFIG, "tuesday")) == 3
    assert images_of(fetch(changed, root, CONFIG, "")) == 3
    # How it was fetched is no matter, what was asked for is.
    assert images_of(fetch(changed, root, DataConfig(threads=3, val_fraction=0.5), "monday")) == 2
    assert images_of(fetch(changed, root, DataConfig(classes=["cat"]), "monday")) == 3
    shutil.rmtree(tmp_path / "source")
    assert images_of(fetch(changed, root, CONFIG, "monday")) == 2


def test_images_that_are_excluded_since_are_not_brought_back(source, tmp_path):
    root, listed = str(tmp_path / "data"), tmp_path / "exclude.txt"
    same = source(2)
    assert images_of(fetch(same, root, CONFIG, "monday")) == 2
    listed.write_text("1.png\n")
    excluding = replace(CONFIG, exclude=str(listed))
    assert images_of(fetch(same, root, excluding, "monday")) == 1
    assert images_of(fetch(source(3), root, excluding, "monday")) == 1


def test_deleted_data_come_back_only_as_they_were(source, tmp_path):
    root = str(tmp_path / "data")
    same = source(2)
    first = fetch(same, root, CONFIG, "monday")
    shutil.rmtree(first.uri)
    assert fetch(same, root, CONFIG, "monday").fingerprint == first.fingerprint
    shutil.rmtree(first.uri)
    with pytest.raises(DataError, match=r"version monday was deleted, and .* has changed since"):
        fetch(source(3), root, CONFIG, "monday")


@pytest.mark.slow
def test_what_a_later_run_gets_belongs_to_later_versions(source, tmp_path, monkeypatch):
    root, uri, config = str(tmp_path / "data"), source(20), replace(CONFIG, max_bad_fraction=0.2)
    refused = {"3.png"}

    read_listed = storage.read_listed

    def read(uri):
        if uri.rpartition("/")[2] in refused:
            raise StorageError("refused")
        return read_listed(uri)

    monkeypatch.setattr(storage, "read_listed", read)
    first = fetch(uri, root, config, "monday")
    refused.clear()
    second = fetch(uri, root, config, "tuesday")
    assert first.uri == second.uri and (images_of(first), images_of(second)) == (19, 20)
    again = fetch(uri, root, config, "monday")
    assert again == first
    manifests = [shard(raw, root, config) for raw in (again, second)]
    assert [found.splits["train"].samples for found in manifests] == [19, 20]
    assert len(data_versions.find(uri, root, config, "monday").problems) == 1
    # The images are all there now: what is deleted comes back with one more.
    shutil.rmtree(first.uri)
    for _ in range(2):
        with pytest.raises(DataError, match=r"version monday was deleted, and .* has changed since"):
            fetch(uri, root, config, "monday")
        assert images_of(fetch(uri, root, config, "tuesday")) == 20


def test_a_version_is_part_of_a_files_name(source, tmp_path):
    for bad in ("../up", "a b", "", ".hidden", "x" * 101):
        with pytest.raises(ConfigError, match="not a valid name"):
            check_name(bad, "data_version")
    with pytest.raises(ConfigError, match="not a valid name"):
        fetch("sample", str(tmp_path), CONFIG, "a/b")
