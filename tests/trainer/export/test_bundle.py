"""Bundles: complete and unchanged, or refused."""

import hashlib
import os
import subprocess

import pytest
from bundles import make_bundle

from trainer import storage
from trainer.base.errors import StorageError
from trainer.export import bundle


def _change_a_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_the_checksums_are_those_of_sha256sum(bundle_uri):
    done = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=bundle_uri, capture_output=True, check=False)
    assert done.returncode == 0


def test_a_changed_file_is_not_copied(bundle_uri, tmp_path):
    _change_a_byte(tmp_path / "made" / "model.safetensors")
    with pytest.raises(StorageError, match="safetensors"):
        bundle.copy(bundle.load(bundle_uri), str(tmp_path / "copy"))
    assert not (tmp_path / "copy").exists()


def test_all_problems_are_listed(bundle_uri, tmp_path):
    _change_a_byte(tmp_path / "made" / "model.onnx")
    (tmp_path / "made" / "model.safetensors").unlink()
    with pytest.raises(StorageError, match=r"(?s)model\.onnx: its bytes.*model\.safetensors: no such file"):
        bundle.load(bundle_uri).verify_checksums()


def test_a_folder_without_checksums_is_no_bundle(bundle_uri, tmp_path):
    (tmp_path / "made" / "SHA256SUMS").unlink()
    assert not bundle.exists(bundle_uri)
    with pytest.raises(StorageError, match="is not a complete bundle"):
        bundle.load(bundle_uri)


@pytest.mark.parametrize("text", ["junk", "0" * 64 + "  ../x", "0" * 64 + "  model.onnx"])
def test_damaged_checksums_are_refused(bundle_uri, tmp_path, text):
    (tmp_path / "made" / "SHA256SUMS").write_text(text + "\n")
    with pytest.raises(StorageError, match="SHA256SUMS"):
        bundle.load(bundle_uri)


def test_checksums_come_last(bundle_uri, tmp_path, monkeypatch):
    upload = storage.upload

    def failing(source, uri, **options):
        if uri.endswith("model.safetensors"):
            raise StorageError("the disk is full")
        upload(source, uri, **options)

    bundle.copy(bundle.load(bundle_uri), str(tmp_path / "copy"))
    monkeypatch.setattr(storage, "upload", failing)
    with pytest.raises(StorageError):  # Over a whole one: it must stop being one.
        bundle.copy(bundle.load(bundle_uri), str(tmp_path / "copy"))
    assert not bundle.exists(str(tmp_path / "copy"))


def test_a_bundle_in_an_object_store(bundle_uri, bucket):
    bundle.copy(bundle.load(bundle_uri), "s3://bucket/models/pets/v1")
    opened = bundle.load("s3://bucket/models/pets/v1")
    with opened.verified_files(["model.onnx"]) as folder:
        data = (folder / "model.onnx").read_bytes()
    assert hashlib.sha256(data).hexdigest() == opened.checksums["model.onnx"]
    _change_a_byte(bucket / "models" / "pets" / "v1" / "model.onnx")
    with pytest.raises(StorageError, match=r"model\.onnx"):
        opened.verify_checksums()


def test_a_bundle_that_replaces_another_leaves_nothing_of_it(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    make_bundle(old)
    (old / "model.int8.onnx").write_bytes(b"of the old one")
    bundle.write_checksums(old)
    (old / bundle.SIGNATURE).write_text("of the old one")
    make_bundle(new, version="v2")
    target = str(tmp_path / "model")
    bundle.publish(old, target)
    (tmp_path / "model" / "notes.txt").write_text("a person's own")
    bundle.publish(new, target)
    assert set(storage.list_files(target)) == {*(path.name for path in new.iterdir()), "notes.txt"}
    assert not os.path.exists(f"{target}/{bundle.SIGNATURE}")
