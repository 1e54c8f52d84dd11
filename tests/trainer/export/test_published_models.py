"""Versions of a model, and `current`, which always names a complete one."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from bundles import CLASSES, make_bundle

from trainer import storage
from trainer.base.errors import ConfigError, DataError, KubedetError, StorageError
from trainer.export import bundle, published_models


@pytest.fixture
def root(tmp_path):
    return str(tmp_path / "data_root")


def _bundle(tmp_path, version, hour=8):
    created = f"2026-11-21T{hour:02}:00:00+00:00"
    return make_bundle(tmp_path / "made" / version, version=version, ap=hour / 100, created=created)


def test_publishing_makes_a_version_current(tmp_path, root):
    now = published_models.publish(_bundle(tmp_path, "v1"), root, "pets")
    assert asdict(now).items() <= storage.read_json(str(tmp_path / "data_root/models/pets/current")).items()
    assert now.model == f"{root}/models/pets/v1" and now.version == "v1"
    assert now.evaluation == "/runs/a/evaluation" and now.metrics["coco/AP"] == 0.08
    assert now.fingerprint == "f00d" and now.checkpoint == "/runs/a/best.pt"
    bundle.load(now.model).verify_checksums()


def test_promote(tmp_path, root):
    for hour, version in enumerate(("v1", "v2", "v3"), start=1):
        published_models.publish(_bundle(tmp_path, version, hour), root, "pets")
    assert [*published_models.load_versions(root, "pets")[0]] == ["v1", "v2", "v3"]
    assert published_models.model_names(root) == ["pets"]
    assert published_models.promote(root, "pets", "v2").version == "v2"
    assert published_models.read_current(root, "pets").version == "v2"
    with pytest.raises(StorageError, match=r"(?s)no version v9.*v1, v2, v3"):
        published_models.promote(root, "pets", "v9")


def test_a_retried_step_changes_nothing(tmp_path, root):
    source = _bundle(tmp_path, "v1")
    published_models.publish(_bundle(tmp_path, "v0"), root, "pets")
    first = published_models.publish(source, root, "pets")
    assert replace(published_models.publish(source, root, "pets"), promoted="") == replace(first, promoted="")


def test_a_damaged_version_does_not_become_current(tmp_path, root):
    published_models.publish(_bundle(tmp_path, "v1"), root, "pets")
    published_models.publish(_bundle(tmp_path, "v2"), root, "pets")
    (tmp_path / "data_root/models/pets/v1/model.onnx").write_bytes(b"changed")
    with pytest.raises(StorageError, match=r"model\.onnx: its bytes have changed"):
        published_models.promote(root, "pets", "v1")
    with pytest.raises(StorageError, match=r"model\.onnx"):
        published_models.publish(str(tmp_path / "made" / "v1"), root, "pets")
    assert published_models.read_current(root, "pets").version == "v2"


def test_models_are_resolved_by_uri_name_and_version(tmp_path, root):
    source = _bundle(tmp_path, "v1")
    assert published_models.load(source, root).uri == source
    with pytest.raises(StorageError, match="no current version of a model pets"):
        published_models.load("pets", root)
    published_models.publish(source, root, "pets")
    assert published_models.load("pets", root).uri == f"{root}/models/pets/v1"
    assert published_models.load("pets@v1", root).uri == f"{root}/models/pets/v1"
    with pytest.raises(StorageError, match=r"(?s)no version v0 of the model pets.*versions: v1"):
        published_models.load("pets@v0", root)
    with pytest.raises(StorageError, match=r"(?s)no version v1 of the model dogs.*available models: pets"):
        published_models.load("dogs@v1", root)
    with pytest.raises(StorageError, match="is not a bundle"):
        published_models.load(str(tmp_path), root)


@pytest.mark.parametrize("name", ["", "../x", "current", "x" * 101])
def test_names_that_cannot_be_folders(tmp_path, root, name):
    with pytest.raises(ConfigError, match="not a valid name"):
        published_models.publish(_bundle(tmp_path, "v1"), root, name)


def test_a_version_with_other_classes_is_refused_unless_it_is_wanted(tmp_path, root):
    published_models.publish(_bundle(tmp_path, "v1"), root, "pets")
    others = [{"id": 0, "name": "cat", "original_id": 7}, {"id": 1, "name": "ace", "original_id": 9}]
    other = make_bundle(tmp_path / "other", version="v2", classes=others)
    with pytest.raises(ConfigError, match=r"not those of pets v1.*dog <b> only in that .*; ace only in this"):
        published_models.publish(other, root, "pets")
    assert published_models.version_names(root, "pets") == ["v1"]  # Nothing was copied.
    swapped = make_bundle(tmp_path / "swapped", version="v3", classes=CLASSES[::-1])
    with pytest.raises(ConfigError, match="in a different order"):
        published_models.publish(swapped, root, "pets")
    assert published_models.publish(other, root, "pets", other_classes=True).classes == ["cat", "ace"]
    with pytest.raises(ConfigError) as caught:
        published_models.promote(root, "pets", "v1")
    assert "--other-classes" in caught.value.fix
    assert published_models.read_current(root, "pets").version == "v2"
    assert published_models.promote(root, "pets", "v1", other_classes=True).version == "v1"


@pytest.mark.parametrize("ids", [["0", 1], [None, 0], [0, 2], [0, 0]])
def test_ids_of_classes_that_no_model_has(tmp_path, ids):
    uri = make_bundle(tmp_path / "odd", version="v1")
    metadata = json.loads(Path(uri, bundle.METADATA).read_text())
    metadata["classes"] = [{"id": number, "name": f"class {number}"} for number in ids]
    Path(uri, bundle.METADATA).write_text(json.dumps(metadata))
    bundle.write_checksums(Path(uri))
    with pytest.raises(DataError, match="ids of classes"):
        bundle.load(uri)


@pytest.mark.parametrize("content", [None, "[]", "{", ""])
def test_promoting_repairs_a_damaged_current(tmp_path, root, content, caplog):
    for hour, version in enumerate(("v1", "v2"), 8):
        published_models.publish(_bundle(tmp_path, version, hour), root, "pets")
    path = tmp_path / "data_root/models/pets/current"
    before = published_models.read_current(root, "pets")
    path.write_text(path.read_text().replace("pets", "cats") if content is None else content)
    if content == "":
        path.unlink()  # Otherwise every model would pass the gate, without a baseline.
    with pytest.raises(KubedetError, match=f"{path}.*") as caught:
        published_models.load("pets", root)
    assert f"kubedet model promote pets VERSION --data-root {root}" in caught.value.fix
    with pytest.raises(KubedetError, match="current"):
        published_models.publish(_bundle(tmp_path, "v3", 10), root, "pets")
    repaired = published_models.promote(root, "pets", "v2")
    assert "it is replaced" in caplog.text
    assert published_models.read_current(root, "pets") == replace(before, promoted=repaired.promoted)
