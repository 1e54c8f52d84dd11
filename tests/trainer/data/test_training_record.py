"""What a run saw: written beside the shards, kept when they are gone, and compared with what there is now."""

import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from trainer.base.errors import DamagedError
from trainer.config.schema import DataConfig
from trainer.data import download, exclusions, training_record
from trainer.data.shards import shard

CONFIG = DataConfig(processes=1, threads=2, val_fraction=0.2, max_bad_fraction=0.1)


@pytest.fixture
def coco(make_coco):
    """A COCO set of twenty images."""
    return make_coco("pets", train=[f"{number:04}.jpg" for number in range(20)])


@pytest.fixture
def root(tmp_path):
    return str(tmp_path / "root")


def make(coco, root):
    raw = download.download(f"coco:{coco}", root, CONFIG)
    index = shard(raw, root, CONFIG)
    return raw, training_record.place(root, index.fingerprint)


def news(coco, root, uri):
    planned = download.plan(f"coco:{coco}", root, CONFIG)
    return training_record.diff(planned, uri, exclusions.names(root, planned.source))


def test_it_holds_every_image_of_the_shards_and_outlives_them(coco, root):
    (coco / "train" / "0003.jpg").write_bytes(b"no image")
    raw, uri = make(coco, root)
    rows = pq.read_table(uri).to_pylist()
    assert {row["key"] for row in rows} == {f"{n:04}" for n in range(20)}
    assert {row["split"] for row in rows} == set(raw.splits)
    # What could not be used was listed, and not seen.
    assert [row["key"] for row in rows if row["crc32"] is None] == ["0003"]
    shutil.rmtree(Path(root) / "raw")
    shutil.rmtree(Path(root) / "shards")
    found = list(training_record.find(uri, frozenset({"0007.jpg", "0003"})))
    assert [(row.file_name, row.seen) for row in sorted(found, key=lambda row: row.key)] == [
        ("0003.jpg", False),
        ("0007.jpg", True),
    ]
    by_boxes = list(training_record.find(uri, frozenset({found[-1].annotations})))
    assert found[-1].key in {row.key for row in by_boxes}
    assert training_record.header(uri).classes == ["cat", "dog"]


def test_new_changed_and_removed_images_are_counted_before_any_is_fetched(coco, root, edit_json, make_jpeg):
    (coco / "train" / "0003.jpg").write_bytes(b"no image")
    _, uri = make(coco, root)
    assert news(coco, root, uri).images == 0  # Also the one that was no use then.

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
    found = news(coco, root, uri)
    assert (found.new, found.changed, found.removed, found.other_classes) == (2, 1, 1, False)
    assert not list(Path(root, "images").rglob("0020*"))
    # Other bytes of an image, where the source tells.
    (coco / "train" / "0009.jpg").write_bytes(make_jpeg(44, 44))
    assert news(coco, root, uri).changed == 2


def test_an_image_that_is_to_be_forgotten_is_in_no_later_download(coco, root):
    raw, uri = make(coco, root)
    added = exclusions.add(root, [exclusions.Exclusion("0005", "0005.jpg", raw.source)])
    assert len(added) == 1 and not exclusions.add(root, added)
    found = news(coco, root, uri)
    assert (found.new, found.changed, found.removed, found.excluded) == (0, 0, 1, 1)
    again, uri = make(coco, root)
    assert again.fingerprint != raw.fingerprint
    assert not list(training_record.find(uri, frozenset({"0005"})))
    # Of the same name in another set it is another image.
    assert exclusions.names(root, "coco:/elsewhere") == frozenset()


def test_what_was_altered_is_named_by_its_hash_and_written_anew(coco, root, caplog):
    _, uri = make(coco, root)
    file, whole = Path(uri), Path(uri).read_bytes()
    at = whole.rindex(b"pets")  # In the footer, which Parquet itself does not check.
    file.write_bytes(whole[:at] + b"pats" + whole[at + 4 :])
    with pytest.raises(DamagedError, match="its sha256 is ") as raised:
        training_record.header(uri)
    assert "run the step of these data again" in raised.value.fix
    make(coco, root)
    assert file.read_bytes() == whole and "writing it again" in caplog.text
    assert training_record.listed(root) == [file.stem]
    file.write_bytes(whole[:200])
    with pytest.raises(DamagedError, match="is damaged"):
        list(training_record.find(uri, frozenset({"0005"})))
    make(coco, root)
    assert file.read_bytes() == whole and training_record.header(uri).classes == ["cat", "dog"]
