"""What a download that was good enough did not get is tried again by the next one."""

from dataclasses import replace
from pathlib import Path

import pytest

from trainer import storage
from trainer.config import DataConfig
from trainer.data import problems as reasons
from trainer.data.download import download, fetch_partition, join, plan
from trainer.data.shards import shard
from trainer.data.sources.coco import CocoSource
from trainer.errors import MissingError, StorageError

CONFIG = DataConfig(processes=1, threads=4, max_bad_fraction=0.2)


@pytest.fixture
def source(make_coco, monkeypatch):
    """A COCO folder of 30 images; with what reading some of them raises, and how often each was read."""
    faults: dict[str, Exception] = {}
    reads: dict[str, int] = {}

    def read(self, origin: str) -> bytes:
        name = origin.rpartition("/")[2]
        reads[name] = reads.get(name, 0) + 1
        if name in faults:
            raise faults[name]
        return storage.read_bytes(origin)

    monkeypatch.setattr(CocoSource, "read", read)
    return str(make_coco(train=[f"{number}.jpg" for number in range(30)])), faults, reads


def images_of(manifest: dict) -> int:
    return sum(found["images"] for found in manifest["splits"].values())


def test_only_what_was_not_fetched_is_tried_again_and_the_shards_follow(source, tmp_path):
    uri, faults, reads = source
    faults |= {"1.jpg": StorageError("refused"), "2.jpg": MissingError("404")}
    first = download(uri, str(tmp_path), CONFIG)
    before = shard(first, str(tmp_path), CONFIG)
    reads.clear()
    faults.clear()
    second = download(uri, str(tmp_path), CONFIG)
    assert reads == {"1.jpg": 1} and (images_of(first), images_of(second)) == (28, 29)
    assert list(second["problems"]) == [reasons.IMAGE_MISSING]
    after = shard(second, str(tmp_path), CONFIG)
    assert before["uri"] != after["uri"]
    assert sum(found["samples"] for found in after["splits"].values()) == 29
    assert download(uri, str(tmp_path), CONFIG) == second and reads == {"1.jpg": 1}
    # An earlier run that shards only now takes the images that it found.
    late = shard(first, str(tmp_path), replace(CONFIG, jpeg_quality=80))
    assert sum(found["samples"] for found in late["splits"].values()) == 28


def test_where_it_fails_again_everything_stays(source, tmp_path, caplog):
    uri, faults, reads = source
    faults["1.jpg"] = StorageError("refused")
    first = download(uri, str(tmp_path), CONFIG)
    written = (Path(first["uri"]) / "manifest.json").stat().st_mtime_ns
    reads.clear()
    with caplog.at_level("INFO"):
        assert download(uri, str(tmp_path), CONFIG) == first
    assert reads == {"1.jpg": 2} and "are there already" in caplog.text
    assert (Path(first["uri"]) / "manifest.json").stat().st_mtime_ns == written


def test_a_source_that_is_down_fails_no_download_that_was_good_enough(source, tmp_path, monkeypatch, caplog):
    uri, faults, _ = source
    faults |= {f"{number}.jpg": StorageError("refused") for number in range(4)}
    first = download(uri, str(tmp_path), CONFIG)
    monkeypatch.setattr("trainer.data.fetch._PATIENCE", -6)
    assert download(uri, str(tmp_path), CONFIG) == first
    assert "could not be fetched; the last: refused; going on without" in caplog.text


def test_partitions_try_again(source, tmp_path):
    uri, faults, reads = source
    faults |= {"1.jpg": StorageError("refused"), "2.jpg": MissingError("404")}
    manifests = []
    for _ in range(2):
        planned = plan(uri, str(tmp_path), CONFIG)
        for number in range(3):
            fetch_partition(planned, CONFIG, number, 3)
        manifests.append(join(planned, CONFIG, 3))
        faults.clear()
        assert join(manifests[-1], CONFIG) == manifests[-1]  # Of a version that is known by a name.
    assert [images_of(manifest) for manifest in manifests] == [28, 29]
    assert reads == {f"{number}.jpg": 3 if number == 1 else 1 for number in range(30)}
