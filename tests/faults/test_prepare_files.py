"""Faults in the files of raw images and shards, and in where they lie."""

import shutil
from pathlib import Path

import pytest
from fault_table import HARMS, cells, contents, each
from prepared_data import BOTH, CONFIG, Prepared, believed

from trainer import storage
from trainer.base.errors import DataError, KubedetError
from trainer.data.download import download
from trainer.data.shards import shard
from trainer.data.verification import check, repair, verify


@pytest.mark.parametrize("harm", each(*HARMS, stages=("download",)))
def test_files_of_raw_images(prepared, harm, chance, injected, tmp_path):
    """Each file in turn: the download, or `verify --repair`, makes all as it was."""
    raw, images = prepared.folders[0], Path(prepared.raw.images)
    before = contents(raw, images)
    paths = [path for path in sorted(raw.rglob("*")) if path.is_file() and path.name != "failed.csv"]
    paths += chance.sample(sorted(images.rglob("*.jpg")), 3)
    copy = shutil.copytree(raw, tmp_path / "copy")
    for path in paths:
        HARMS[harm](path, chance)
        prepared.again()
        if contents(raw, images) != before:  # What is looked at only when it is needed, or in each byte.
            check(repair(str(raw)))
        after = contents(raw, images)
        unneeded = {name for name in before if "/fetched/" in name or name.endswith("failed.csv")}
        assert after.keys() | unneeded == before.keys() | unneeded, path
        assert [name for name in after if name not in unneeded and after[name] != before[name]] == [], path
        shutil.rmtree(raw)
        shutil.copytree(copy, raw)
    injected(len(paths))


@pytest.mark.parametrize("harm", each(*HARMS, stages=("shard",)))
def test_files_of_shards(prepared, harm, chance, injected):
    """What is read of each file is what was written, or an error names it; then it is mended."""
    folder = prepared.folders[1]
    before, expected, count = contents(folder), believed(prepared), 0
    for path in [path for path in sorted(folder.rglob("*")) if path.is_file()] * (4 if harm == "flip" else 1):
        count += 1
        HARMS[harm](path, chance)
        try:
            assert believed(prepared) == expected, path
        except KubedetError as error:
            assert path.name in error.message and "delete" not in error.fix, path
        check(repair(str(folder))) if count % 2 else prepared.again()
        if contents(folder) != before:  # Nobody has read the place that was flipped.
            with pytest.raises(DataError, match=path.stem):
                check(verify(str(folder)))
            prepared.again()
        assert contents(folder) == before, path
    injected(count)


@cells("form", "download", "shard")
@pytest.mark.parametrize(
    "text", ["[]", "{}", "7", '{"kind": "shards", "version": 5}', '{"version": "new"}', "{"]
)
def test_json_of_another_shape(prepared, text, injected):
    paths = [
        prepared.folders[0] / "plan.json",
        prepared.folders[0] / "manifest.json",
        prepared.folders[1] / "index.json",
    ]
    before = contents(*prepared.folders)
    for path in paths:
        path.write_text(text)
        prepared.again()
    assert contents(*prepared.folders) == before
    injected(len(paths))


@cells("newer", "download", "shard")
@pytest.mark.parametrize("name", ["manifest.json", "plan.json", "index.json"])
def test_files_of_a_newer_program(prepared, name):
    (path,) = (folder / name for folder in prepared.folders if (folder / name).exists())
    storage.write_json(str(path), storage.read_json(str(path)) | {"version": 99})
    before = path.read_bytes()
    with pytest.raises(DataError, match="was written by a newer kubedet: its version is 99"):
        prepared.again()
        (prepared.folders[0] / "manifest.json").unlink()  # With it, the plan is not needed.
        prepared.again()
    assert path.read_bytes() == before


@pytest.mark.parametrize("harm", HARMS)
@cells("image", "shard")
def test_a_raw_image_while_shards_are_made(fifteen_images, tmp_path, harm, chance, injected):
    raw = download(f"coco:{fifteen_images}", str(tmp_path / "data"), CONFIG)
    expected = shard(raw, str(tmp_path / "other"), CONFIG).splits
    for path in chance.sample(sorted(Path(raw.images).rglob("*.jpg")), 4):
        HARMS[harm](path, chance)
    assert shard(raw, str(tmp_path / "data"), CONFIG).splits == expected
    injected(4)


@pytest.mark.parametrize("harm", ["cut", "lost", "flip"])
@cells("image", "shard")
def test_a_raw_image_whose_source_is_gone(fifteen_images, tmp_path, harm, chance):
    raw = download(f"coco:{fifteen_images}", str(tmp_path / "data"), CONFIG)
    image = chance.choice(sorted(Path(raw.images).rglob("*.jpg")))
    HARMS[harm](image, chance)
    shutil.rmtree(fifteen_images)
    with pytest.raises(KubedetError) as caught:
        shard(raw, str(tmp_path / "data"), CONFIG)
    assert "delete" not in str(caught.value)
    assert not list((tmp_path / "data/shards").rglob("index.json"))


@cells("moved", *BOTH)
def test_a_moved_data_root(prepared, fifteen_images, bucket, tmp_path, monkeypatch, injected):
    root, fetched = Path(prepared.root), []
    shutil.copytree(root, bucket / "deep" / "root")
    shutil.move(root, tmp_path / "elsewhere")
    read = storage.read_buffer
    monkeypatch.setattr(storage, "read_buffer", lambda uri, **o: fetched.append(uri) or read(uri, **o))
    for place in (str(tmp_path / "elsewhere"), "s3://bucket/deep/root"):
        moved = Prepared(prepared.source, place)
        assert moved.raw.uri.startswith(place) and moved.index.uri.startswith(place)
        check(verify(moved.index.uri))
    assert not [uri for uri in fetched if uri.startswith(str(fifteen_images)) and uri.endswith(".jpg")]
    injected(2)
