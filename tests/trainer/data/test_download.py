import logging
import os
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from source_rows import kept_rows

from trainer import storage
from trainer.base.errors import DataError, MissingError, StorageError
from trainer.config.schema import DataConfig
from trainer.data import problem_counts as reasons
from trainer.data.download import download, plan
from trainer.data.image_keys import image_path
from trainer.data.raw_folder import read_image_table, read_manifest
from trainer.data.raw_manifest import SplitCounts
from trainer.data.shards import shard

CONFIG = DataConfig(processes=1, threads=4)
SOME_BAD = replace(CONFIG, max_bad_fraction=0.2)


def raw_folder(manifest: dict) -> Path:
    return Path(manifest.uri)


def image_of(manifest: dict, row: dict) -> str:
    return f"{manifest.images}/{image_path(row['key'], row['file_name'], row['origin'], row['version'])}"


def sizes_of(manifest: dict) -> list[int]:
    return read_image_table(manifest)["bytes"].tolist()


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
        rows = kept_rows(manifest, split)
        assert [row["file_name"] for row in rows] == names
        for row in rows:
            written = storage.read_bytes(image_of(manifest, row))
            assert written == (root / split / row["file_name"]).read_bytes()
            assert sizes_of(manifest)[row["image_id"] - 1] == len(written)
    assert (folder / "failed.csv").read_text() == "split,file_name,origin,reason,detail\n"


def test_a_second_call_finds_it(make_coco, tmp_path, caplog):
    root = make_coco(train=["a.jpg"] + [f"{n}.jpg" for n in range(10)])
    first = download(str(root), str(tmp_path / "data"), CONFIG)

    def times():
        return {path: path.stat().st_mtime_ns for path in raw_folder(first).rglob("*")}

    before = times()
    with caplog.at_level(logging.INFO):
        assert download(f"coco:{root}/", str(tmp_path / "data") + "/", CONFIG) == first
    assert "are there already" in caplog.text
    changed = {path.name for path, modified in times().items() if modified != before[path]}
    assert changed == {"manifest.json"}, "it is marked as used"


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
    emptied = Path(image_of(manifest, kept_rows(manifest, "train")[0]))
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
    (absent,) = [row for row in kept_rows(manifest, "train") if row["file_name"] == "7.jpg"]
    assert [number for number, size in enumerate(sizes_of(manifest), 1) if not size] == [absent["image_id"]]
    (line,) = (raw_folder(manifest) / "failed.csv").read_text().splitlines()[1:]
    assert line.startswith("train,7.jpg,") and reasons.IMAGE_MISSING in line
    with pytest.raises(DataError, match="1 of 21 images are bad") as caught:
        download(str(root), str(tmp_path / "strict"), replace(CONFIG, max_bad_fraction=0.0))
    assert "data.max_bad_fraction" in caught.value.fix
    assert list((tmp_path / "strict").rglob("manifest.json")) == []


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
    rows = [row for split in ("train", "val") for row in kept_rows(second, split)]
    (row,) = [row for row in rows if row["file_name"] == "b.jpg"]
    assert storage.read_bytes(image_of(second, row)) == make_jpeg(50, 50)


def test_what_a_killed_download_left_is_cleared_away(make_coco, tmp_path):
    root = make_coco(train=["1.jpg", "2.jpg"])
    images = Path(plan(str(root), str(tmp_path / "data"), CONFIG).images)
    old, new = images / "ab" / ".1.jpg.7-aa.tmp", images / "ab" / ".2.jpg.8-bb.tmp"
    for path in (old, new):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    download(str(root), str(tmp_path / "data"), CONFIG)
    assert not old.exists() and new.exists()  # which another download may be writing


@pytest.fixture
def faulty_reads(monkeypatch):
    """What reading some images of a COCO folder raises, by name (a list: once each), and counts of reads."""
    faults: dict[str, Exception | list[Exception]] = {}
    reads: Counter[str] = Counter()
    read_allowed = storage.read_allowed

    def read(uri: str) -> bytes:
        name = uri.rpartition("/")[2]
        if "/coco/" in uri and name.endswith(".jpg"):
            reads[name] += 1
            if fault := faults.get(name):
                raise fault.pop() if isinstance(fault, list) else fault
        return read_allowed(uri)

    monkeypatch.setattr(storage, "read_allowed", read)
    return faults, reads


@pytest.fixture
def source(make_coco, faulty_reads):
    """A COCO folder of 30 images, and `faulty_reads`."""
    return str(make_coco(train=[f"{number}.jpg" for number in range(30)])), *faulty_reads


def test_a_source_that_goes_down_ends_it_early_and_keeps_what_came(make_coco, faulty_reads, tmp_path):
    names = [f"{number}.jpg" for number in range(400)]
    root, (faults, reads) = make_coco(train=names), faulty_reads
    faults |= dict.fromkeys(names[100:], StorageError("refused"))
    config = replace(CONFIG, max_bad_fraction=1.0)
    with pytest.raises(StorageError, match="58 images in a row could not be fetched") as caught:
        download(str(root), str(tmp_path / "data"), config)
    assert "run again" in caught.value.fix and 150 < len(reads) < 300
    came = len(list((tmp_path / "data").rglob("*.jpg")))
    reads.clear()
    faults.clear()
    download(str(root), str(tmp_path / "data"), config)
    # The four threads may have finished an image each after the error.
    assert 80 < came <= 100 and 396 - came <= len(reads) <= 400 - came


def test_many_that_fail_among_others_do_not_end_it(make_coco, faulty_reads, tmp_path):
    names = [f"{number}.jpg" for number in range(210)]
    faulty_reads[0].update(dict.fromkeys(names[::3], StorageError("refused")))
    config = replace(CONFIG, max_bad_fraction=0.5)
    manifest = download(str(make_coco(train=names)), str(tmp_path / "data"), config)
    assert manifest.problems[reasons.IMAGE_NOT_FETCHED].count == 70


def images_of(manifest: dict) -> int:
    return sum(part.images for part in manifest.splits.values())


def test_what_was_not_had_is_asked_for_again_and_the_shards_follow(source, tmp_path):
    uri, faults, reads = source
    faults |= {"1.jpg": StorageError("refused"), "2.jpg": MissingError("404")}
    first = download(uri, str(tmp_path), SOME_BAD)
    assert (reads["1.jpg"], reads["2.jpg"], reads["3.jpg"]) == (2, 1, 1)
    before = shard(first, str(tmp_path), SOME_BAD)
    reads.clear()
    del faults["1.jpg"]
    second = download(uri, str(tmp_path), SOME_BAD)
    assert reads == {"1.jpg": 1, "2.jpg": 1} and (images_of(first), images_of(second)) == (28, 29)
    assert list(second.problems) == [reasons.IMAGE_MISSING]
    after = shard(second, str(tmp_path), SOME_BAD)
    assert before.uri != after.uri
    assert sum(part.samples for part in after.splits.values()) == 29
    assert download(uri, str(tmp_path), SOME_BAD) == second and reads == {"1.jpg": 1, "2.jpg": 2}
    faults.clear()  # The source is mended, and the same command takes what is there now.
    assert images_of(download(uri, str(tmp_path), SOME_BAD)) == 30 and reads == {"1.jpg": 1, "2.jpg": 3}
    assert download(uri, str(tmp_path), SOME_BAD).problems == {} and reads == {"1.jpg": 1, "2.jpg": 3}
    # An earlier run that shards only now takes the images that it found.
    late = shard(first, str(tmp_path), replace(SOME_BAD, jpeg_quality=80))
    assert sum(part.samples for part in late.splits.values()) == 28


def test_what_fails_once_is_had_in_the_end(source, tmp_path):
    uri, faults, reads = source
    faults["1.jpg"] = [StorageError("reset")]
    manifest = download(uri, str(tmp_path), CONFIG)
    assert manifest.problems == {} and images_of(manifest) == 30 and reads["1.jpg"] == 2


def test_where_it_fails_again_everything_stays(source, tmp_path, caplog):
    uri, faults, reads = source
    faults["1.jpg"] = StorageError("refused")
    first = download(uri, str(tmp_path), SOME_BAD)
    written = (Path(first.uri) / "manifest.json").stat().st_ino
    reads.clear()
    with caplog.at_level("INFO"):
        assert download(uri, str(tmp_path), SOME_BAD) == first
    assert reads == {"1.jpg": 2} and "are there already" in caplog.text
    assert (Path(first.uri) / "manifest.json").stat().st_ino == written


def test_what_was_missing_stays_missing_while_the_source_is_down(source, tmp_path, monkeypatch):
    uri, faults, reads = source
    faults |= {"1.jpg": StorageError("refused"), "2.jpg": StorageError("refused")}
    download(uri, str(tmp_path), SOME_BAD)
    faults["1.jpg"] = MissingError("404")
    manifest = download(uri, str(tmp_path), SOME_BAD)
    assert {name: problem.count for name, problem in manifest.problems.items()} == {
        reasons.IMAGE_MISSING: 1,
        reasons.IMAGE_NOT_FETCHED: 1,
    }
    with monkeypatch.context() as down:
        down.setattr("trainer.data.image_fetching._MAX_FAILURES_IN_A_ROW", -8)
        assert download(uri, str(tmp_path), SOME_BAD) == manifest
    faults.clear()
    reads.clear()
    assert images_of(download(uri, str(tmp_path), SOME_BAD)) == 30 and reads == {"1.jpg": 1, "2.jpg": 1}
