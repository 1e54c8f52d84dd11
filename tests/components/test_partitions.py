"""Download and sharding by several pods give what one gives."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from weights_server import weights_server

from components import data_versions, partitions, preparation, training
from components.jobs import Request
from trainer import architectures, recipes, storage
from trainer.data import shards
from trainer.errors import ConfigError, StorageError
from trainer.model.architecture import build

__all__ = ["weights_server"]

GIVEN = {"data.processes": 1, "data.threads": 2, "data.shard_bytes": 20_000}
CONFIG = recipes.load("debug", GIVEN).data
ASKED = ("debug", GIVEN)
SOURCE = "sample:images=24,size=96,seed=4"


def shared(root, count, version=""):
    """Take the way of the pipeline with so many partitions."""
    parts = partitions.plan(SOURCE, root, *ASKED, version, count)
    assert len(parts) == count and all(isinstance(part, str) for part in parts)
    fetched = [partitions.fetch(part, *ASKED) for part in reversed(parts)]
    raw = partitions.fetched(fetched, SOURCE, root, CONFIG, version)
    for part in parts:
        partitions.write(raw, root, *ASKED, part)
    return shards.join(raw, root, CONFIG)


def contents(index):
    return {
        name: storage.read_bytes(f"{index['uri']}/{name}")
        for name in storage.list_files(index["uri"])
        if name != "index.json"
    }


def test_the_result_is_that_of_one(tmp_path):
    raw = partitions.fetched([], SOURCE, str(tmp_path / "one"), CONFIG, "")
    one = shards.shard(raw, str(tmp_path / "one"), CONFIG)
    for count in (1, 3):
        index = shared(str(tmp_path / str(count)), count)
        assert {**index, "uri": ""} == {**one, "uri": ""} and contents(index) == contents(one)


def written_times(folder):
    """Return when each file was written, but for notes of who uses the data."""
    files = (path for path in folder.rglob("*") if path.is_file() and "retention" not in path.parts)
    return {path: path.stat().st_mtime_ns for path in files}


def test_what_is_there_is_not_fetched_nor_written_again(tmp_path):
    first = shared(str(tmp_path), 2)
    before = written_times(tmp_path)
    assert shared(str(tmp_path), 3) == first
    assert written_times(tmp_path) == before


def test_a_known_version_needs_no_plan(tmp_path):
    root = str(tmp_path)
    raw = partitions.fetched([], SOURCE, root, CONFIG, "monday")
    parts = partitions.plan(SOURCE, root, *ASKED, "monday", 2)
    assert [json.loads(part)["plan"] for part in parts] == ["", ""]
    assert [partitions.fetch(part, *ASKED) for part in parts] == parts
    assert partitions.fetched(parts, SOURCE, root, CONFIG, "monday") == raw
    assert raw[data_versions.KEY] == "monday"


def test_a_version_is_recorded_of_what_parts_fetched(tmp_path):
    shared(str(tmp_path), 2, "tuesday")
    assert data_versions.known(SOURCE, str(tmp_path), CONFIG, "tuesday")[data_versions.KEY] == "tuesday"
    assert len(list(Path(tmp_path, "versions").iterdir())) == 1


def test_a_part_that_was_not_fetched_is_missed(tmp_path):
    parts = partitions.plan(SOURCE, str(tmp_path), *ASKED, "", 2)
    partitions.fetch(parts[1], *ASKED)
    with pytest.raises(StorageError, match="0-of-2"):
        partitions.fetched(parts, SOURCE, str(tmp_path), CONFIG, "")


@pytest.mark.parametrize("count", [0, -1, 257])
def test_numbers_that_cannot_be(count, tmp_path):
    with pytest.raises(ConfigError, match="is not from 1 to 256"):
        partitions.plan(SOURCE, str(tmp_path), *ASKED, "", count)


def test_weights_that_cannot_be_had_are_told_before_any_data(weights_server, tmp_path):
    asked = ("debug", {**GIVEN, "model.weights": "torchvision:ResNet50_Weights.IMAGENET1K_V2"})
    for step in (
        lambda: partitions.plan(SOURCE, str(tmp_path), *asked, "", 2, trains=True),
        lambda: preparation.prepare(SOURCE, *asked, str(tmp_path), "", str(tmp_path / "page"), trains=True),
    ):
        with pytest.raises(StorageError, match=r"model\.weights: .* cannot be fetched") as caught:
            step()
        assert "model.weights=none" in caught.value.fix
    assert not written_times(tmp_path) and not list(tmp_path.joinpath("retention", "uses").iterdir())
    # A pipeline that ends with the shards trains nothing.
    assert partitions.plan(SOURCE, str(tmp_path), *asked, "", 2)


def test_weights_lie_in_the_mirror_when_the_data_are_there(weights_server, tmp_path):
    torch.manual_seed(0)
    body = build(recipes.load("debug").model, 3).backbone.body.state_dict()
    weights_server.files["w.safetensors"] = safetensors.torch.save(body)
    asked = ("debug", {**GIVEN, "model.weights": f"{weights_server.url}/w.safetensors"})
    root = str(tmp_path / "root")
    _, written = preparation.prepare(SOURCE, *asked, root, "", str(tmp_path / "page"), trains=True)
    weights_server.files.clear()
    training.prepare(written[0]["uri"], str(tmp_path / "run"), *asked, Request(own={"nproc": 1}))
    asked[1]["model.weights"] += "2"
    with pytest.raises(StorageError, match=r"model\.weights: .*w\.safetensors2 is not in .*root/weights"):
        training.prepare(written[0]["uri"], str(tmp_path / "other"), *asked, Request(own={"nproc": 1}))
    assert not (tmp_path / "other").exists()


def test_a_detector_that_is_not_installed_is_refused_before_any_data(tmp_path, monkeypatch):
    line = architectures.ARCHITECTURES["retinanet"]._replace(extra="detr", packages=("no_such_package",))
    monkeypatch.setitem(architectures.ARCHITECTURES, "retinanet", line)
    with pytest.raises(ConfigError, match="retinanet needs the package no_such_package"):
        partitions.plan(SOURCE, str(tmp_path), *ASKED, "", 2)
    with pytest.raises(ConfigError, match="retinanet needs the package no_such_package"):
        preparation.prepare(SOURCE, *ASKED, str(tmp_path), "", str(tmp_path / "page.html"))
    assert not list(tmp_path.iterdir())
