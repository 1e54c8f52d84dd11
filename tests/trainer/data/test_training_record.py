"""What a run saw: written beside the shards, kept when they are gone, and compared with what there is now."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from trainer.base.errors import DamagedError
from trainer.config.schema import DataConfig
from trainer.data import download, exclusions, training_record
from trainer.data.shards import shard

CONFIG = DataConfig(processes=1, threads=2, val_fraction=0.2, max_bad_fraction=0.1)


class CocoFolder:
    """A COCO set that changes."""

    def __init__(self, root):
        self.root = root
        self.boxes = {}
        (root / "annotations").mkdir(parents=True)
        (root / "train").mkdir()

    def add(self, *numbers):
        for number in numbers:
            pixels = np.full((60, 80, 3), number, np.uint8)
            Image.fromarray(pixels).save(self.root / "train" / f"{number:04}.jpg")
            self.boxes[number] = [5, 5, 20 + number % 7, 20]
        return self.write()

    def remove(self, number):
        (self.root / "train" / f"{number:04}.jpg").unlink()
        del self.boxes[number]
        return self.write()

    def write(self):
        images = [
            {"id": n, "file_name": f"{n:04}.jpg", "width": 80, "height": 60} for n in sorted(self.boxes)
        ]
        boxes = [
            {"id": n, "image_id": n, "category_id": 1, "bbox": box, "area": 400, "iscrowd": 0}
            for n, box in self.boxes.items()
        ]
        categories = [{"id": 1, "name": "square"}]
        text = json.dumps({"images": images, "annotations": boxes, "categories": categories})
        (self.root / "annotations" / "instances_train.json").write_text(text)
        return f"coco:{self.root}"


@pytest.fixture
def coco(tmp_path):
    return CocoFolder(tmp_path / "pets")


@pytest.fixture
def root(tmp_path):
    return str(tmp_path / "root")


def make(source, root):
    raw = download.download(source, root, CONFIG)
    index = shard(raw, root, CONFIG)
    return raw, training_record.place(root, index.fingerprint)


def news(source, root, uri):
    planned = download.plan(source, root, CONFIG)
    return training_record.diff(planned, uri, exclusions.names(root, planned.source))


def test_it_holds_every_image_of_the_shards_and_outlives_them(coco, root):
    source = coco.add(*range(20))
    (coco.root / "train" / "0003.jpg").write_bytes(b"no image")
    raw, uri = make(source, root)
    rows = pq.read_table(uri).to_pylist()
    assert {row["key"] for row in rows} == {f"{n:04}" for n in range(20)}
    assert {row["split"] for row in rows} == set(raw.splits)
    # What could not be used was listed, and not seen.
    assert [row["key"] for row in rows if row["crc32"] is None] == ["0003"]
    shutil.rmtree(Path(root) / "raw")
    shutil.rmtree(Path(root) / "shards")
    found = list(training_record.find(uri, frozenset({"0007.jpg", "0003"})))
    assert [(row.file_name, row.seen) for row in sorted(found, key=lambda row: row.key)] == [
        ("0003.jpg", False), ("0007.jpg", True),
    ]  # fmt: skip
    by_boxes = list(training_record.find(uri, frozenset({found[-1].annotations})))
    assert found[-1].key in {row.key for row in by_boxes}
    assert training_record.header(uri).classes == ["square"]


def test_new_changed_and_removed_images_are_counted_before_any_is_fetched(coco, root):
    source = coco.add(*range(20))
    (coco.root / "train" / "0003.jpg").write_bytes(b"no image")
    _, uri = make(source, root)
    assert news(source, root, uri).images == 0  # Also the one that was no use then.
    coco.add(20, 21)
    coco.remove(4)
    coco.boxes[7] = [1, 1, 30, 30]
    found = news(coco.write(), root, uri)
    assert (found.new, found.changed, found.removed, found.other_classes) == (2, 1, 1, False)
    assert not list(Path(root, "images").rglob("0020*"))
    # Other bytes of an image, where the source tells.
    Image.new("RGB", (80, 60), "red").save(coco.root / "train" / "0009.jpg", quality=99)
    assert news(source, root, uri).changed == 2


def test_an_image_that_is_to_be_forgotten_is_in_no_later_download(coco, root):
    source = coco.add(*range(20))
    raw, uri = make(source, root)
    added = exclusions.add(root, [exclusions.Exclusion("0005", "0005.jpg", raw.source)])
    assert len(added) == 1 and not exclusions.add(root, added)
    found = news(source, root, uri)
    assert (found.new, found.changed, found.removed, found.excluded) == (0, 0, 1, 1)
    again, uri = make(source, root)
    assert again.fingerprint != raw.fingerprint
    assert not list(training_record.find(uri, frozenset({"0005"})))
    # Of the same name in another set it is another image.
    assert exclusions.names(root, "coco:/elsewhere") == frozenset()


def test_what_was_altered_is_named_by_its_hash_and_written_anew(coco, root, caplog):
    source = coco.add(*range(20))
    _, uri = make(source, root)
    file, whole = Path(uri), Path(uri).read_bytes()
    at = whole.rindex(b"square")  # In the footer, which Parquet itself does not check.
    file.write_bytes(whole[:at] + b"squire" + whole[at + 6 :])
    with pytest.raises(DamagedError, match="its sha256 is ") as raised:
        training_record.header(uri)
    assert "run the step of these data again" in raised.value.fix
    make(source, root)
    assert file.read_bytes() == whole and "writing it again" in caplog.text
    # One of an earlier program has no hash beside it.
    Path(f"{uri}.sha256").unlink()
    assert training_record.header(uri).classes == ["square"] and training_record.listed(root) == [file.stem]
    file.write_bytes(whole[:200])
    with pytest.raises(DamagedError, match="is damaged"):
        list(training_record.find(uri, frozenset({"0005"})))
    make(source, root)
    assert file.read_bytes() == whole and training_record.header(uri).classes == ["square"]
