"""What URIs of weights name: torchvision's own names and hashes, models of a hub, files of the web."""

import pytest
from torchvision.models import ResNet50_Weights, ResNeXt50_32X4D_Weights
from weights_server import COMMIT, weights_server

from trainer.base.errors import ConfigError, StorageError
from trainer.model import recipes
from trainer.weights.published_weights import folder, is_published, published_files, source, torchvision_file

__all__ = ["weights_server"]


@pytest.mark.parametrize(
    ("uri", "weights", "prefix"),
    [
        ("torchvision:ResNet50_Weights.IMAGENET1K_V2", ResNet50_Weights.IMAGENET1K_V2, "11ad3fa6"),
        (
            "torchvision:ResNeXt50_32X4D_Weights.IMAGENET1K_V1",
            ResNeXt50_32X4D_Weights.IMAGENET1K_V1,
            "7cdf4587",
        ),
    ],
)
def test_a_name_of_torchvision_is_the_file_that_its_enumeration_names(uri, weights, prefix, monkeypatch):
    monkeypatch.delenv("KUBEDET_TORCHVISION_URL", raising=False)
    described = torchvision_file(uri)
    assert described.url == weights.url == source(uri)
    assert described.name == weights.url.rpartition("/")[2] and described.sha256 == prefix
    assert described.size / 2**20 == pytest.approx(weights.meta["_file_size"], abs=0.01)
    monkeypatch.setenv("KUBEDET_TORCHVISION_URL", "https://mirror.example/tv/")
    assert torchvision_file(uri).url == f"https://mirror.example/tv/{described.name}"


def test_every_recipe_names_weights_that_exist():
    uris = {recipe().model.weights for recipe in recipes.RECIPES.values()} - {""}
    assert uris
    for uri in uris:
        assert is_published(uri) and folder(uri)
        if uri.startswith("torchvision:"):
            assert torchvision_file(uri).sha256


def test_a_model_of_the_hub_is_pinned_to_a_commit_and_told_with_hashes(weights_server):
    files = {
        "model.safetensors": b"tensors",
        "config.json": b"{}",
        "README.md": b"#",
        "pytorch_model.bin": b"",
    }
    weights_server.add_model("org/name", files)
    described = {one.name: one for one in published_files("hf:org/name")}
    assert sorted(described) == ["config.json", "model.safetensors"]
    tensors = described["model.safetensors"]
    assert tensors.url == f"{weights_server.url}/org/name/resolve/{COMMIT}/model.safetensors"
    assert len(tensors.sha256) == 64 and tensors.size == 7
    assert len(described["config.json"].git_sha1) == 40
    assert folder("hf:org/name") == "hf/org/name/main" and folder("hf:org/name@v1") == "hf/org/name/v1"


def test_a_model_without_safetensors_is_refused_with_what_it_holds(weights_server):
    weights_server.add_model("org/old", {"pytorch_model.bin": b"pickle"})
    with pytest.raises(StorageError, match=r"holds no model\.safetensors, but pytorch_model\.bin"):
        published_files("hf:org/old")


def test_a_file_of_the_web_may_tell_its_hash():
    (plain,) = published_files("https://host/a/w.pth")
    (hashed,) = published_files("https://host/a/w.pth#sha256=0123456789")
    assert (plain.name, plain.url, plain.sha256) == ("w.pth", "https://host/a/w.pth", "")
    assert (hashed.name, hashed.url, hashed.sha256) == ("w.pth", "https://host/a/w.pth", "0123456789")
    assert folder(plain.url) != folder("https://host/b/w.pth")


@pytest.mark.parametrize("uri", ["/a/w.pth", "w.pth", "s3://bucket/w.pth", "file:///a/w.pth", "minio://b/w"])
def test_what_has_a_place_of_its_own_is_not_mirrored(uri):
    assert not is_published(uri)


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("torchvision:ResNet50_Weights.IMAGENET1K_V9", "torchvision has no weights"),
        ("torchvision:Nothing", "torchvision has no weights"),
        ("hf:name", "names no model of the hub"),
        ("hf:../..", "names no model of the hub"),
        ("hf:org/name@../x", "names no model of the hub"),
        ("https://host/w.pth#md5=1", "ends with no hash"),
    ],
)
def test_what_can_be_no_weights_is_refused_by_key_and_name(uri, words):
    with pytest.raises(ConfigError, match=r"model\.weights: ") as caught:
        published_files(uri)
    assert words in caught.value.message and caught.value.fix
