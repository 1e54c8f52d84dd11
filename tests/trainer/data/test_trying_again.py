"""What a download that was good enough did not get is tried again by the next one."""

from dataclasses import replace
from pathlib import Path

import pytest

from trainer import storage
from trainer.base.errors import MissingError, StorageError
from trainer.config.schema import DataConfig
from trainer.data import problem_counts as reasons
from trainer.data.download import download, fetch_partition, join, plan
from trainer.data.shards import shard

CONFIG = DataConfig(processes=1, threads=4, max_bad_fraction=0.2)


@pytest.fixture
def source(make_coco, monkeypatch):
    """A COCO folder of 30 images; with what reading some of them raises, and how often each was read."""
    faults: dict[str, Exception] = {}
    reads: dict[str, int] = {}

    root = str(make_coco(train=[f"{number}.jpg" for number in range(30)]))
    read_buffer = storage.read_buffer

    def read(uri: str, **options: str) -> memoryview:
        name = uri.rpartition("/")[2]
        if uri.startswith(root) and name.endswith(".jpg"):
            reads[name] = reads.get(name, 0) + 1
            if name in faults:
                raise faults[name]
        return read_buffer(uri, **options)

    monkeypatch.setattr(storage, "read_buffer", read)
    return root, faults, reads


def images_of(manifest: dict) -> int:
    return sum(part.images for part in manifest.splits.values())


def test_what_was_not_had_is_asked_for_again_and_the_shards_follow(source, tmp_path):
    uri, faults, reads = source
    faults |= {"1.jpg": StorageError("refused"), "2.jpg": MissingError("404")}
    first = download(uri, str(tmp_path), CONFIG)
    before = shard(first, str(tmp_path), CONFIG)
    reads.clear()
    del faults["1.jpg"]
    second = download(uri, str(tmp_path), CONFIG)
    assert reads == {"1.jpg": 1, "2.jpg": 1} and (images_of(first), images_of(second)) == (28, 29)
    assert list(second.problems) == [reasons.IMAGE_MISSING]
    after = shard(second, str(tmp_path), CONFIG)
    assert before.uri != after.uri
    assert sum(part.samples for part in after.splits.values()) == 29
    assert download(uri, str(tmp_path), CONFIG) == second and reads == {"1.jpg": 1, "2.jpg": 2}
    faults.clear()  # The source is mended, and the same command takes what is there now.
    assert images_of(download(uri, str(tmp_path), CONFIG)) == 30 and reads == {"1.jpg": 1, "2.jpg": 3}
    assert download(uri, str(tmp_path), CONFIG).problems == {} and reads == {"1.jpg": 1, "2.jpg": 3}
    # An earlier run that shards only now takes the images that it found.
    late = shard(first, str(tmp_path), replace(CONFIG, jpeg_quality=80))
    assert sum(part.samples for part in late.splits.values()) == 28


def test_where_it_fails_again_everything_stays(source, tmp_path, caplog):
    uri, faults, reads = source
    faults["1.jpg"] = StorageError("refused")
    first = download(uri, str(tmp_path), CONFIG)
    written = (Path(first.uri) / "manifest.json").stat().st_mtime_ns
    reads.clear()
    with caplog.at_level("INFO"):
        assert download(uri, str(tmp_path), CONFIG) == first
    assert reads == {"1.jpg": 2} and "are there already" in caplog.text
    assert (Path(first.uri) / "manifest.json").stat().st_mtime_ns == written


def brought(uri, root, partitions):
    """Download with a number of partitions; return the manifest."""
    planned = plan(uri, str(root), CONFIG)
    for number in range(partitions):
        fetch_partition(planned, CONFIG, number, partitions)
    return join(planned, CONFIG, partitions)


@pytest.mark.parametrize("numbers", [(1, 3), (3, 1)])
def test_the_number_of_partitions_may_change(source, tmp_path, numbers):
    uri, faults, reads = source
    faults |= {"1.jpg": StorageError("refused"), "2.jpg": MissingError("404"), "3.jpg": MissingError("404")}
    brought(uri, tmp_path / "a", numbers[0])
    brought(uri, tmp_path / "b", numbers[0])
    del faults["1.jpg"]
    reads.clear()
    other = brought(uri, tmp_path / "a", numbers[1])
    assert reads == {"1.jpg": 1, "2.jpg": 1, "3.jpg": 1}, "nothing that is there is asked for again"
    same = brought(uri, tmp_path / "b", numbers[0])
    for key in ("content", "splits", "problems"):
        assert getattr(other, key) == getattr(same, key)
    assert images_of(other) == 28 and list(other.problems) == [reasons.IMAGE_MISSING]


def test_what_one_number_of_partitions_found_missing_is_missing_for_another(source, tmp_path, monkeypatch):
    uri, faults, reads = source
    faults |= {"1.jpg": StorageError("refused"), "2.jpg": StorageError("refused")}
    brought(uri, tmp_path, 1)
    faults["1.jpg"] = MissingError("404")
    images = brought(uri, tmp_path, 3)
    assert {name: problem.count for name, problem in images.problems.items()} == {
        reasons.IMAGE_MISSING: 1, reasons.IMAGE_NOT_FETCHED: 1
    }  # fmt: skip
    with monkeypatch.context() as down:
        down.setattr("trainer.data.download._PATIENCE", -8)
        assert brought(uri, tmp_path, 1) == images
    faults.clear()
    reads.clear()
    assert images_of(brought(uri, tmp_path, 1)) == 30 and reads == {"1.jpg": 1, "2.jpg": 1}
