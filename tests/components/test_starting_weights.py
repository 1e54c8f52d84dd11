"""What recipes start from that take weights by themselves; a server has random ones of that form."""

import io
import socket

import pytest
import torch
from torchvision.models import resnet18
from weights_server import weights_server

from components import training
from components.jobs import Request
from components.starting_weights import chosen, secure
from trainer import storage
from trainer.base.errors import CheckpointError, StorageError
from trainer.config import parsing
from trainer.model import recipes
from trainer.model.architecture import build
from trainer.weights import weights_mirror

__all__ = ["weights_server"]

NAME = recipes.WITH_WEIGHTS["small"]["model.weights"]
TAKEN = {"model.weights": NAME, "train.lr": 1e-3, "model.backbone_width": 64}


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


def test_small_takes_the_weights_that_are_to_be_had(offered, tmp_path, capsys):
    assert chosen("small", {}, str(tmp_path)) == {}  # Nothing is fetched for this question.
    secure("small", {}, str(tmp_path))
    assert (tmp_path / "weights" / "torchvision" / offered).is_file()
    assert chosen("small", {}, str(tmp_path)) == TAKEN
    assert "train.lr" not in chosen("small", {"train.lr": 0.1}, str(tmp_path))
    assert "no weights" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "overrides",
    [
        {"model.weights": "none"},
        {"model.backbone_width": 24},
        {"model.norm": "group"},
        {"model.backbone": "resnet34"},
        {"model.architecture": "fcos"},
    ],
)
def test_whoever_chooses_a_network_chooses_its_weights(overrides, offered, tmp_path):
    secure("small", overrides, str(tmp_path))
    assert not (tmp_path / "weights").exists() and chosen("small", overrides, str(tmp_path)) == {}


def test_where_there_are_none_a_line_says_so_and_it_trains_from_scratch(weights_server, tmp_path, capsys):
    secure("small", {}, str(tmp_path))
    assert capsys.readouterr().out == (
        "no weights found: small trains from scratch; to use them `kubedet weights fetch small` "
        "where there is internet, or --set model.weights=PATH\n"
    )
    assert chosen("small", {}, str(tmp_path)) == {}


def test_nobody_waits_long_for_a_silent_server(tmp_path, monkeypatch):
    monkeypatch.setattr(weights_mirror, "ANSWER_SECONDS", 0.2)
    monkeypatch.setenv("TORCH_HOME", "/nonexistent")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # It connects, and that is all.
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("KUBEDET_TORCHVISION_URL", url)
        with pytest.raises(
            StorageError, match=rf"cannot be fetched from {url}/resnet18.*: its server does not answer"
        ):
            secure("small", {"model.weights": NAME}, str(tmp_path))
        monkeypatch.setenv("HF_ENDPOINT", url)
        with pytest.raises(StorageError, match="its server does not answer"):
            weights_mirror.check_available("hf:a/b", str(tmp_path))


def test_weights_of_a_file_have_their_own_width(published, tmp_path):
    path = tmp_path / "resnet18.pth"
    path.write_bytes(published)
    given = {"model.weights": str(path)}
    secure("small", given, str(tmp_path))
    assert chosen("small", given, str(tmp_path)) == {"train.lr": 1e-3, "model.backbone_width": 64}
    with pytest.raises(CheckpointError, match=r"are of model\.backbone_width=64, not of 24"):
        secure("small", given | {"model.backbone_width": 24}, str(tmp_path))
    # Such as a model that `small` has trained from scratch.
    torch.save(build(recipes.load("small").model, 3).state_dict(), path)
    secure("small", given, str(tmp_path))
    assert chosen("small", given, str(tmp_path)) == {"train.lr": 1e-3}


def test_a_run_keeps_the_weights_that_it_was_begun_with(offered, shards, tmp_path, monkeypatch):
    root, run = str(tmp_path / "root"), tmp_path / "run"
    monkeypatch.setattr(training, "data_root_of", lambda uri: root)
    asked = {"train.minutes": 0, "train.batch_size": 1}

    def prepared(folder):
        training.prepare(shards, str(folder), "small", asked, Request(own={"nproc": 1}))
        return parsing.read(str(folder / "config.json"))

    scratch = prepared(run)
    assert (scratch.model.weights, scratch.model.backbone_width, scratch.train.lr) == ("", 24, 3e-3)
    secure("small", asked, root)
    assert prepared(run) == scratch  # Although there are some now.
    begun = prepared(tmp_path / "other")
    assert (begun.model.weights, begun.model.backbone_width, begun.train.lr) == (NAME, 64, 1e-3)
    assert storage.read_json(str(tmp_path / "other" / "plan.json"))["weights"]["chosen"] == TAKEN
    for file in (tmp_path / "root").rglob("*.pth"):
        file.unlink()
    assert prepared(tmp_path / "other") == begun
