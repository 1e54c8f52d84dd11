"""Lost or damaged files of a data root are named, and repaired by the same command or `verify --repair`."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from fault_table import contents

from trainer.base.errors import DataError, KubedetError
from trainer.data import image_fetching, raw_folder
from trainer.data.download import download
from trainer.data.shards import shard
from trainer.data.verification import check, repair, verify
from trainer.model import recipes

CONFIG = recipes.load("debug", {"data.processes": 1, "data.max_bad_fraction": 0.0}).data


@pytest.fixture
def prepared(fifteen_images, tmp_path):
    """Prepare a data root; give a way to run the same commands again, and both folders."""
    root = str(tmp_path / "data")

    def prepare():
        raw = download(f"coco:{fifteen_images}", root, CONFIG)
        return raw, shard(raw, root, CONFIG)

    raw, index = prepare()
    return prepare, Path(raw.uri), Path(index.uri)


def flip(path: Path, share: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(share * (len(data) - 1))] ^= 4
    path.write_bytes(data)


def lose(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def extend(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


@pytest.mark.parametrize(
    ("folder", "name", "harm"),
    [("raw", "plan.json", flip), ("raw", "manifest.json", cut), ("raw", "train.parquet", flip),
     ("raw", "val.parquet", lose), ("raw", "images-*.npy", lose),
     ("shards", "annotations/val.json", flip), ("shards", "val-00000.tar", cut),
     ("shards", "train-00000.json", lose)],
)  # fmt: skip
def test_the_same_command_repairs_what_it_wrote(
    prepared, folder, name, harm, caplog
):  # Others: tests/faults.
    """Others are in tests/faults."""
    prepare, raw, shards = prepared
    before = contents(raw, shards)
    (path,) = (raw if folder == "raw" else shards).glob(name)
    harm(path)
    if folder == "raw":
        shutil.rmtree(shards)
    prepare()
    assert contents(raw, shards) == before
    assert path.name in caplog.text or folder == "raw" or harm is lose


def test_a_cut_image_is_fetched_again_by_the_same_command(prepared, caplog):
    prepare, raw, shards = prepared
    images = raw.parent.parent / "images"
    before = contents(raw, images, shards)
    cut(next(images.rglob("*.jpg")))
    prepare()
    assert contents(raw, images, shards) == before
    assert "1 stored images were missing or cut off, and were fetched again" in caplog.text


@pytest.mark.parametrize("harm", [flip, lose])
def test_a_damaged_report_is_written_again_when_it_is_needed(prepared, harm):
    prepare, raw, shards = prepared
    images = raw.parent.parent / "images"
    before = contents(raw, images, shards)
    harm(next(raw.glob("fetched/000-*")))
    lose(next(images.rglob("*.jpg")))
    prepare()
    assert contents(raw, images, shards) == before


@pytest.mark.parametrize("harm", [lose, flip])
def test_the_shard_step_takes_a_lost_or_damaged_image_from_the_source(fifteen_images, tmp_path, harm, caplog):
    raw = download(f"coco:{fifteen_images}", str(tmp_path / "data"), CONFIG)
    image = next((tmp_path / "data" / "images").rglob("*.jpg"))
    whole = image.read_bytes()
    harm(image)
    index = shard(raw, str(tmp_path / "data"), CONFIG)
    assert image.read_bytes() == whole and index.splits["train"].samples == 12
    assert f"{image.name}" in caplog.text and "; fetched again from the source" in caplog.text


@pytest.mark.parametrize(("name", "harm"), [("fetched/000-*", cut), ("images-*.npy", extend)])
def test_verify_reads_the_records_of_raw_images(prepared, name, harm):
    _, raw, shards = prepared
    before = contents(raw, shards)
    (path,) = raw.glob(name)
    harm(path)
    with pytest.raises(KubedetError, match=path.name.removesuffix(".sha256")):
        check(verify(str(raw)))
    check(repair(str(raw)))
    assert contents(raw, shards) == before


@pytest.mark.slow
def test_verify_finds_every_flip_and_repairs_it(prepared):
    _, raw, shards = prepared
    images = raw.parent.parent / "images"
    before = contents(raw, images, shards)
    flip(shards / "train-00000.tar", 0.4)
    flip(shards / "val-00000.json")
    flip(shards / "annotations/val.json")
    with pytest.raises(DataError) as caught:
        check(verify(str(shards)))
    for name in ("train-00000.tar", "val-00000.json", "annotations/val.json"):
        assert name in caught.value.message
    assert "--repair" in caught.value.fix and "delete" not in caught.value.fix
    check(repair(str(shards)))
    image = next(images.rglob("*.jpg"))
    flip(image)
    with pytest.raises(DataError, match="its sha256 is"):
        check(verify(str(raw)))
    check(repair(str(raw)))
    assert contents(raw, images, shards) == before


def test_a_report_of_another_job_is_deleted_and_a_missing_one_is_empty(prepared, monkeypatch):
    prepare, raw, _ = prepared
    (report,) = raw.glob("fetched/000-*")
    other = report.with_name("000-0000000000000000.parquet")
    shutil.copy(report, other)
    lose(next((raw.parent.parent / "images").rglob("*.jpg")))
    list_files = image_fetching.storage.list_files

    def list_before_it_is_deleted(uri):
        names = list_files(uri)
        return [*names, "001-1111111111111111.parquet"] if uri == str(report.parent) else names

    monkeypatch.setattr(image_fetching.storage, "list_files", list_before_it_is_deleted)
    planned = raw_folder.read_manifest(str(raw), "plan.json")
    assert image_fetching.read_reports(planned)[0]["bytes"].any()
    monkeypatch.undo()
    for path in raw.glob("images-*"):
        lose(path)
    for image in (raw.parent.parent / "images").rglob("*.jpg"):
        lose(image)
    prepare()
    assert not other.exists() and len(list(raw.glob("fetched/000-*"))) == 1


def test_a_repair_needs_no_file_of_excluded_images(fifteen_images, tmp_path):
    listed = tmp_path / "exclude.txt"
    listed.write_text("0" * 64)
    root = str(tmp_path / "data")
    raw = download(f"coco:{fifteen_images}", root, replace(CONFIG, exclude=str(listed)))
    listed.unlink()
    flip(next(Path(root, "images").rglob("*.jpg")))
    check(repair(raw.uri))
