"""Initial weights of recipes; a server has random ones of the form of a ResNet18."""

import io
import os
import socket

import pytest
import torch
from prepared_server import Server
from torchvision.models import resnet18
from weights_server import weights_server

from trainer.base.errors import CheckpointError, StorageError
from trainer.config import parsing
from trainer.model import recipes
from trainer.model.architecture import build
from trainer.steps import train
from trainer.steps.starting_weights import fetch_and_check, overrides_from_weights
from trainer.weights import weights_mirror

__all__ = ["weights_server"]

NAME = recipes.load("small_pretrained").model.weights


@pytest.fixture(scope="session")
def published():
    """Random weights of a ResNet18 as torchvision publishes them."""
    buffer = io.BytesIO()
    torch.save(resnet18().state_dict(), buffer)
    return buffer.getvalue()


@pytest.fixture
def offered(weights_server, published, monkeypatch):
    """Their name at the server, which torchvision names."""
    return weights_server.add_resnet18(published, monkeypatch)


def test_a_recipe_is_the_same_network_with_and_without_its_weights(weights_server, tmp_path, monkeypatch):
    """Missing weights are an error, even if the server is only down; `small` needs none."""
    fetch_and_check("small", {}, str(tmp_path))
    for url in (weights_server.url, "http://127.0.0.1:9"):
        monkeypatch.setenv("KUBEDET_TORCHVISION_URL", url)
        with pytest.raises(StorageError) as caught:
            fetch_and_check("small_pretrained", {}, str(tmp_path))
        assert f"kubedet weights fetch {NAME}" in caught.value.fix and not caught.value.transient
    models = [recipes.load(name).model for name in ("small", "small_pretrained")]
    assert [(one.backbone_width, one.weights) for one in models] == [(24, ""), (64, NAME)]


def test_weights_are_fetched_once(offered, tmp_path):
    fetch_and_check("small_pretrained", {}, str(tmp_path))
    assert (tmp_path / "weights" / "torchvision" / offered).is_file()
    assert overrides_from_weights("small_pretrained", {}, str(tmp_path)) == {}


def test_a_server_of_weights_may_redirect_to_an_allowed_host(offered, weights_server, tmp_path, monkeypatch):
    mirror, target = Server(), f"{weights_server.url}/models/{offered}".encode()
    mirror.answers = [b"HTTP/1.1 302 Found\r\nLocation: %s\r\nContent-Length: 0\r\n\r\n" % target]
    monkeypatch.setenv("KUBEDET_TORCHVISION_URL", mirror.url.removesuffix("/x"))
    with pytest.raises(StorageError) as caught:
        fetch_and_check("small_pretrained", {}, str(tmp_path))
    assert "data.allow_hosts" in caught.value.fix
    fetch_and_check("small_pretrained", {"data.allow_hosts": ["127.0.0.1"]}, str(tmp_path))
    mirror.stop()
    assert (tmp_path / "weights" / "torchvision" / offered).is_file()


def test_nobody_waits_long_for_a_silent_server(tmp_path, monkeypatch):
    monkeypatch.setattr(weights_mirror, "ANSWER_SECONDS", 0.2)
    monkeypatch.setenv("TORCH_HOME", "/nonexistent")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # It connects, and that is all.
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("KUBEDET_TORCHVISION_URL", url)
        with pytest.raises(
            StorageError, match=rf"cannot be fetched from {url}/resnet18.*: its server does not respond"
        ):
            fetch_and_check("small", {"model.weights": NAME}, str(tmp_path))
        monkeypatch.setenv("HF_ENDPOINT", url)
        with pytest.raises(StorageError, match="its server does not respond"):
            weights_mirror.check_available("hf:a/b", str(tmp_path))


def test_weights_of_a_file_have_their_own_width(published, tmp_path):
    path = tmp_path / "resnet18.pth"
    path.write_bytes(published)
    given = {"model.weights": str(path)}
    fetch_and_check("small", given, str(tmp_path))
    assert overrides_from_weights("small", given, str(tmp_path)) == {"model.backbone_width": 64}
    with pytest.raises(CheckpointError, match=r"model\.backbone_width=64, not for 24"):
        fetch_and_check("small", given | {"model.backbone_width": 24}, str(tmp_path))
    # Such as a model that `small` has trained from scratch.
    torch.save(build(recipes.load("small").model, 3).state_dict(), path)
    fetch_and_check("small_pretrained", given, str(tmp_path))
    assert overrides_from_weights("small_pretrained", given, str(tmp_path)) == {"model.backbone_width": 24}


def test_a_run_keeps_the_network_of_its_weights(published, shards_manifest, tmp_path):
    path, run = tmp_path / "resnet18.pth", tmp_path / "run"
    path.write_bytes(published)
    shards = shards_manifest("small", {"train.minutes": 0, "model.weights": str(path)})
    begun = train.configure(shards, str(run))
    assert begun.model.backbone_width == 64
    parsing.write(str(run / "config.json"), begun)
    path.unlink()
    assert train.configure(shards, str(run)) == begun


@pytest.mark.parametrize("name", ["", "best.pt"])
def test_weights_in_the_data_root_are_young_again(name, tmp_path, monkeypatch):
    """A prune keeps them until the training records that it needs them."""
    monkeypatch.setattr("trainer.model.pretrained.check_pretrained", lambda *_: None)
    file = tmp_path / "runs" / "night-01" / "best.pt"
    file.parent.mkdir(parents=True)
    torch.save({"weight": torch.zeros(1)}, file)
    os.utime(file, (0, 0))
    fetch_and_check("small", {"model.weights": str(file.parent / name)}, str(tmp_path))
    assert file.stat().st_mtime > 0
