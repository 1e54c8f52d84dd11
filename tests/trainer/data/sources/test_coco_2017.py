import json
import shutil
import zipfile
from pathlib import Path

import pytest

from trainer import storage
from trainer.base.errors import DataError
from trainer.config.schema import DataConfig
from trainer.data import problem_counts as reasons
from trainer.data import raw_folder, sources
from trainer.data.download import download
from trainer.data.raw_folder import SplitCounts, Table
from trainer.data.sources.coco import ANNOTATIONS
from trainer.data.sources.source import Category

NAMES = {
    "train2017": [f"{number:012}.jpg" for number in range(1, 13)],
    "val2017": [f"{number:012}.jpg" for number in range(20, 24)],
}
CONFIG = DataConfig(threads=4)


@pytest.fixture
def mirror(make_coco, tmp_path) -> Path:
    """COCO 2017's zips, small: images stored in the one, deflated in the other."""
    root = make_coco(**NAMES)
    folder = tmp_path / "mirror"
    (folder / "zips").mkdir(parents=True)
    (folder / "annotations").mkdir()
    with zipfile.ZipFile(folder / ANNOTATIONS, "w", zipfile.ZIP_DEFLATED) as archive:
        for split in NAMES:
            name = f"annotations/instances_{split}.json"
            archive.write(root / name, name)
    for split, method in zip(NAMES, (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED), strict=True):
        with zipfile.ZipFile(folder / "zips" / f"{split}.zip", "w", method) as archive:
            archive.mkdir(split)
            for name in NAMES[split]:
                archive.write(root / split / name, f"{split}/{name}")
    return folder


def rows_of(raw: dict, split: str) -> list[dict]:
    table = Table(f"{raw.uri}/{split}.parquet")
    return [row for block in range(table.blocks) for row in table.batch(block).to_pylist()]


def test_images_come_one_by_one_from_zips_in_a_store(mirror, bucket, proxy, tmp_path):
    shutil.copytree(mirror, bucket / "coco")
    address = "s3://bucket/coco"
    raw = download(f"coco:2017,base={address}", str(tmp_path / "data"), CONFIG)
    assert raw.splits == {"train": SplitCounts(12, 24), "val": SplitCounts(4, 8)}
    assert raw.categories[1] == raw_folder.Category(1, "dog", 17)
    assert raw.source == f"coco:2017,base={address}" and raw.problems == {}
    for split, folder in (("train", "train2017"), ("val", "val2017")):
        with zipfile.ZipFile(mirror / "zips" / f"{folder}.zip") as archive:
            expected = {name: archive.read(f"{folder}/{name}") for name in NAMES[folder]}
        for row in rows_of(raw, split):
            (image,) = Path(raw.images).rglob(f"{row['key']}-*")
            assert image.read_bytes() == expected[row["file_name"]]
            assert row["origin"] == f"{address}/zips/{folder}.zip#{folder}/{row['file_name']}"
    # One answer for each image; the directory takes a few.
    requests = [one for one in proxy.requests if one.startswith("GET") and "zips/train2017.zip" in one]
    assert 12 <= len(requests) <= 18
    assert download(f"coco:2017,base={address}", str(tmp_path / "data"), CONFIG) == raw


def test_damaged_and_missing_members_are_reported(mirror, tmp_path):
    path = mirror / "zips" / "train2017.zip"
    with zipfile.ZipFile(path) as archive:
        place = archive.getinfo(f"train2017/{NAMES['train2017'][3]}").header_offset + 200
    data = bytearray(path.read_bytes())
    data[place] ^= 0xFF
    path.write_bytes(data)
    with zipfile.ZipFile(mirror / "zips" / "val2017.zip", "w") as archive:
        archive.writestr("val2017/other.jpg", b"x")
    config = DataConfig(threads=1, max_bad_fraction=0.9)
    raw = download(f"coco:2017,base={mirror}", str(tmp_path / "data"), config)
    assert raw.splits["train"].images == 11 and raw.splits["val"].images == 0
    assert raw.problems[reasons.IMAGE_NOT_FETCHED].count == 1
    assert "checksum" in raw.problems[reasons.IMAGE_NOT_FETCHED].examples[0]
    assert raw.problems[reasons.IMAGE_MISSING].count == 4


def test_zips_that_are_missing_or_none(mirror):
    listing = sources.parse(f"coco:2017,base={mirror}").listing
    assert listing().categories == [Category("cat", 3), Category("dog", 17)]
    (mirror / "zips" / "val2017.zip").write_bytes(b"PK not at all")
    with pytest.raises(storage.StorageError, match="no zip that can be read"):
        list(listing().splits["val"].batches())
    (mirror / "zips" / "val2017.zip").unlink()
    with pytest.raises(DataError, match=r"no file .*val2017\.zip"):
        listing()
    (mirror / "zips" / "val2017.zip").write_bytes(b"")
    with zipfile.ZipFile(mirror / ANNOTATIONS, "w") as archive:
        archive.writestr("annotations/x.json", json.dumps({}))
    with pytest.raises(DataError, match=r"instances_val2017\.json .*cannot be read"):
        listing()
    (mirror / ANNOTATIONS).write_bytes(b"x")
    with pytest.raises(DataError, match="cannot be read"):
        listing()
