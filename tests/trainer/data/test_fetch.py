import os
from dataclasses import replace
from pathlib import Path

import pytest

from trainer import storage
from trainer.base.errors import StorageError
from trainer.config.schema import DataConfig
from trainer.data import problem_counts as reasons
from trainer.data.download import download, plan

CONFIG = DataConfig(processes=1, threads=4, allow_hosts=["127.0.0.1"])


@pytest.fixture
def broken_reads(monkeypatch):
    """Make the reading of some images of a COCO source fail a number of times; with the reads by name."""
    reads: dict[str, int] = {}
    read_buffer = storage.read_buffer

    def breaks(failures: dict[str, int]) -> dict[str, int]:
        def read(uri: str, **options: str) -> memoryview:
            name = uri.rpartition("/")[2]
            if not name.endswith(".jpg"):
                return read_buffer(uri, **options)
            reads[name] = reads.get(name, 0) + 1
            if reads[name] <= failures.get(name, 0):
                raise StorageError(f"cannot read {uri}: connection reset")
            return read_buffer(uri, **options)

        monkeypatch.setattr(storage, "read_buffer", read)
        return reads

    return breaks


def test_what_fails_is_tried_again_and_what_is_missing_is_not(make_coco, broken_reads, tmp_path):
    root = make_coco(train=[f"{number}.jpg" for number in range(20)])
    (root / "train" / "3.jpg").unlink()
    config = replace(CONFIG, max_bad_fraction=0.2)
    reads = broken_reads({"1.jpg": 1, "2.jpg": 3})
    manifest = download(str(root), str(tmp_path / "data"), config)
    assert reads["1.jpg"] == reads["2.jpg"] == 2 and reads["4.jpg"] == 1
    assert manifest.problems[reasons.IMAGE_NOT_FETCHED].count == 1
    assert manifest.problems[reasons.IMAGE_MISSING].count == 1
    # Good enough, but the next run goes on with what failed.
    manifest = download(str(root), str(tmp_path / "data"), config)
    assert reads["2.jpg"] == 4 and reads["1.jpg"] == 2 and reads["4.jpg"] == 1
    assert list(manifest.problems) == [reasons.IMAGE_MISSING]


def test_a_source_that_goes_down_ends_it_early_and_keeps_what_came(make_coco, broken_reads, tmp_path):
    names = [f"{number}.jpg" for number in range(400)]
    root = make_coco(train=names)
    reads = broken_reads(dict.fromkeys(names[100:], 99))
    config = replace(CONFIG, max_bad_fraction=1.0)
    with pytest.raises(StorageError, match="58 images in a row could not be fetched") as caught:
        download(str(root), str(tmp_path / "data"), config)
    assert "run again" in caught.value.fix and 150 < len(reads) < 300
    came = len(list((tmp_path / "data").rglob("*.jpg")))
    reads.clear()
    broken_reads({})
    download(str(root), str(tmp_path / "data"), config)
    assert 80 < came <= 100 and len(reads) == 400 - came


def test_many_that_fail_among_others_do_not_end_it(make_coco, broken_reads, tmp_path):
    names = [f"{number}.jpg" for number in range(210)]
    broken_reads(dict.fromkeys(names[::3], 99))
    config = replace(CONFIG, max_bad_fraction=0.5)
    manifest = download(str(make_coco(train=names)), str(tmp_path / "data"), config)
    assert manifest.problems[reasons.IMAGE_NOT_FETCHED].count == 70


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
