"""Lost or damaged files of a data root are named, and repaired by the same command or `verify --repair`."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from trainer import storage
from trainer.base.errors import DamagedError, DataError, KubedetError
from trainer.data.download import download
from trainer.data.shard_index import ShardDataset
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


def contents(*folders: Path) -> dict[str, bytes]:
    return {
        f"{folder.name}/{path.relative_to(folder)}": path.read_bytes()
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize(
    ("name", "harm"),
    [("plan.json", flip), ("manifest.json", cut), ("train.parquet", flip), ("val.parquet", lose),
     ("sizes-*.npy", cut), ("sums-*.npy", lose)],
)  # fmt: skip
def test_the_same_command_repairs_the_files_of_raw_images(prepared, name, harm):
    prepare, raw, shards = prepared
    before = contents(raw, shards)
    (path,) = raw.glob(name)
    harm(path)
    shutil.rmtree(shards)
    prepare()
    assert contents(raw, shards) == before


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("index.json", flip),
        ("index.json", lose),
        ("val.samples.npy", flip),
        ("annotations/val.json", flip),
        ("train-00000.tar", lose),
        ("val-00000.tar", cut),
        ("train-00000.json", lose),
    ],
)
def test_the_same_command_repairs_the_files_of_shards(prepared, name, harm, caplog):
    prepare, _, shards = prepared
    before = contents(shards)
    harm(shards / name)
    prepare()
    assert contents(shards) == before
    if harm is not lose:
        assert Path(name).name in caplog.text


def test_a_damaged_sidecar_is_noted_when_it_is_read(prepared):
    prepare, _, shards = prepared
    before = contents(shards)
    cut(shards / "train-00000.json")
    with pytest.raises(DamagedError, match=r"train-00000\.json is not JSON"):
        ShardDataset(str(shards), "train").annotations()
    prepare()
    assert contents(shards) == before


def test_a_flipped_shard_is_named_when_it_is_read_and_repaired_by_the_next_run(prepared):
    prepare, _, shards = prepared
    before = contents(shards)
    dataset = ShardDataset(str(shards), "train")
    row = dataset.samples[0]
    tar = shards / "train-00000.tar"
    data = bytearray(tar.read_bytes())
    data[int(row["offset"]) + 20] ^= 1
    tar.write_bytes(data)
    with pytest.raises(DataError, match=r"train-00000\.tar is damaged") as caught:
        dataset.read(0)
    assert "delete" not in caught.value.fix
    prepare()
    assert contents(shards) == before


def test_a_flipped_table_of_samples_blames_itself_and_not_the_shard(prepared):
    _, _, shards = prepared
    flip(shards / "train.samples.npy", 1.0)  # the last sample's CRC-32
    with pytest.raises(KubedetError, match=r"train\.samples\.npy is damaged") as caught:
        ShardDataset(str(shards), "train")
    assert "delete" not in caught.value.fix and not list(shards.glob("*.damaged"))


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
    harm(raw / "fetched/0-of-1.parquet")
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


def test_an_image_that_neither_is_there_nor_at_the_source_is_an_error(fifteen_images, tmp_path):
    raw = download(f"coco:{fifteen_images}", str(tmp_path / "data"), CONFIG)
    flip(next((tmp_path / "data" / "images").rglob("*.jpg")))
    shutil.rmtree(fifteen_images)
    with pytest.raises(KubedetError, match=r"its sha256 is .* and it cannot be fetched") as caught:
        shard(raw, str(tmp_path / "data"), CONFIG)
    assert "delete" not in str(caught.value)


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


def test_an_index_of_a_newer_program_is_refused_and_kept(prepared):
    prepare, raw, shards = prepared
    for path in (shards / "index.json", raw / "manifest.json", raw / "plan.json"):
        before = path.read_bytes()
        storage.write_json(str(path), json.loads(before) | {"version": 99})
        with pytest.raises(DataError, match=rf"{path.name} was written by a newer kubedet: its version is"):
            prepare()
        assert storage.read_json(str(path))["version"] == 99
        path.write_bytes(before)


@pytest.mark.parametrize("form", [[], {"kind": "shards", "version": 5, "splits": 3}])
def test_an_index_of_another_form_is_named_and_repaired(prepared, form):
    prepare, _, shards = prepared
    before = contents(shards)
    (shards / "index.json").write_text(json.dumps(form))
    with pytest.raises(DataError, match=r"index\.json"):
        ShardDataset(str(shards), "train")
    prepare()
    assert contents(shards) == before


def test_a_data_root_may_be_moved(prepared, fifteen_images, tmp_path, monkeypatch):
    _, raw, shards = prepared
    root, elsewhere = raw.parent.parent, str(tmp_path / "elsewhere")
    absolute = str(root).encode()
    assert not [name for name, data in contents(root).items() if absolute in data], "files name their place"
    shutil.move(root, elsewhere)
    read, buffer_of = [], storage.read_buffer
    monkeypatch.setattr(storage, "read_buffer", lambda uri, **o: read.append(uri) or buffer_of(uri, **o))
    manifest = download(f"coco:{fifteen_images}", elsewhere, CONFIG)
    shard(manifest, elsewhere, replace(CONFIG, jpeg_quality=80))
    same = shard(manifest, elsewhere, CONFIG)
    assert not [uri for uri in read if uri.startswith(str(fifteen_images)) and uri.endswith(".jpg")]
    assert (manifest.uri, same.uri) == (f"{elsewhere}/raw/{raw.name}", f"{elsewhere}/shards/{shards.name}")
    assert ShardDataset(same.uri, "train").read(0) and not verify(manifest.uri).problems


def test_a_data_root_of_an_earlier_program_goes_on_where_it_is(prepared, fifteen_images):
    prepare, raw, shards = prepared
    root = raw.parent.parent
    added = ("tables", "sums", "unfetched", "files", "settings", "content")
    for path in (raw / "plan.json", raw / "manifest.json", shards / "index.json"):
        record = storage.read_json(str(path))
        record["uri"] = str(path.parent)
        if "images" in record:
            record["images"] = str(root / record["images"])
        old = {
            key: value
            for key, value in record.items()
            if key not in added or (key == "content" and path.parent == raw)
        }
        path.write_text(json.dumps(old))
    for path in raw.glob("sums-*"):
        path.unlink()
    before = contents(raw, shards)
    found, index = prepare()
    assert contents(raw, shards) == before
    assert found.images == str(next((root / "images").iterdir())) and index.uri == str(shards)
    check(verify(str(shards)))
    check(verify(str(raw)))
