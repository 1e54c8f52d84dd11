"""Published weights, and their mirror: filled once, checked by hashes, enough without the internet."""

import hashlib
import io
import json

import pytest
import safetensors.torch
import torch
from torchvision.models import get_weight
from weights_server import COMMIT, WeightsServer, weights_server

from trainer.base.errors import ConfigError, DataError, StorageError
from trainer.model import recipes
from trainer.storage import web
from trainer.weights.weights_mirror import (
    check_available,
    fetch_if_needed,
    find_in_mirror,
    is_published,
    look_up_published_file,
    mirror_folder,
    torchvision_file,
)

__all__ = ["weights_server"]


URIS = {recipe().model.weights for recipe in recipes.RECIPES.values()} - {""}


@pytest.mark.parametrize("uri", [*sorted(URIS), "torchvision:ResNet34_Weights.DEFAULT"])
def test_a_name_of_torchvision_is_the_file_of_its_enumeration(uri, monkeypatch):
    assert is_published(uri)
    if uri.startswith("torchvision:"):
        monkeypatch.delenv("KUBEDET_TORCHVISION_URL", raising=False)
        weights, described = get_weight(uri.removeprefix("torchvision:")), torchvision_file(uri)
        assert described.url == weights.url
        assert described.name == weights.url.rpartition("/")[2] and described.sha256 in described.name
        assert len(described.sha256) == 8
        monkeypatch.setenv("KUBEDET_TORCHVISION_URL", "https://mirror.example/tv/")
        assert torchvision_file(uri).url == f"https://mirror.example/tv/{described.name}"


def test_a_model_of_the_hub_is_pinned_to_a_commit_and_described_with_its_hash(weights_server):
    files = {"model.safetensors": b"tensors", "config.json": b"{}", "pytorch_model.bin": b""}
    weights_server.add_model("org/name", files)
    described = look_up_published_file("hf:org/name")
    assert described.url == f"{weights_server.url}/org/name/resolve/{COMMIT}/model.safetensors"
    assert len(described.sha256) == 64 and described.size == 7
    assert mirror_folder("hf:org/name", "r") == "r/weights/hf/org/name/main"
    assert mirror_folder("hf:org/name@v1", "r") == "r/weights/hf/org/name/v1"


def test_a_model_without_safetensors_is_refused_with_its_files(weights_server):
    weights_server.add_model("org/old", {"pytorch_model.bin": b"pickle"})
    with pytest.raises(StorageError, match=r"has no model\.safetensors, but contains pytorch_model\.bin"):
        look_up_published_file("hf:org/old")


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("torchvision:ResNet50_Weights.IMAGENET1K_V9", "torchvision has no weights"),
        ("torchvision:Nothing", "torchvision has no weights"),
        ("hf:name", "is not a model on the hub"),
        ("hf:../..", "is not a model on the hub"),
        ("hf:org/name@../x", "is not a model on the hub"),
        ("https://host/w.pth#md5=1", "does not end with a hash"),
    ],
)
def test_what_can_be_no_weights_is_refused_by_key_and_name(uri, words):
    with pytest.raises(ConfigError, match=r"model\.weights: ") as caught:
        look_up_published_file(uri)
    assert words in caught.value.message and caught.value.fix


TENSORS = {"conv1.weight": torch.arange(6.0).view(2, 3)}
SHAPES = {"conv1.weight": (2, 3)}
RESNET18 = "torchvision:ResNet18_Weights.IMAGENET1K_V1"


@pytest.fixture
def resnet18(weights_server, monkeypatch):
    buffer = io.BytesIO()
    torch.save(TENSORS, buffer)
    return weights_server.add_resnet18(buffer.getvalue(), monkeypatch)


def test_a_file_that_was_put_into_the_mirror_by_hand_is_taken(weights_server, resnet18, tmp_path):
    (tmp_path / "weights/torchvision").mkdir(parents=True)
    (tmp_path / "weights/torchvision" / resnet18).write_bytes(weights_server.files[f"models/{resnet18}"])
    assert list(fetch_if_needed(RESNET18, str(tmp_path)).state()) == ["conv1.weight"]
    assert not weights_server.requests


def test_a_damaged_file_of_the_mirror_is_fetched_again(weights_server, resnet18, tmp_path, caplog):
    fetch_if_needed(RESNET18, str(tmp_path))
    (tmp_path / "weights/torchvision" / resnet18).write_bytes(b"damaged")
    assert list(fetch_if_needed(RESNET18, str(tmp_path)).state()) == ["conv1.weight"]
    assert "are damaged: fetching them again" in caplog.text and len(weights_server.requests) == 2


def test_another_file_than_was_published_never_reaches_the_mirror(weights_server, tmp_path):
    weights_server.files["models/resnet50-11ad3fa6.pth"] = b"the page of a proxy"
    with pytest.raises(StorageError, match=r"SHA-256 begins with \w{8}, not with 11ad3fa6"):
        fetch_if_needed("torchvision:ResNet50_Weights.IMAGENET1K_V2", str(tmp_path))
    assert not list(tmp_path.rglob("*.pth"))


def test_where_they_cannot_be_had_key_address_and_remedy_are_told(weights_server, tmp_path):
    uri = "torchvision:ResNet50_Weights.IMAGENET1K_V2"
    with pytest.raises(StorageError) as caught:
        check_available(uri, str(tmp_path))
    assert caught.value.message.startswith(f"model.weights: {uri} is not in {tmp_path}/weights")
    assert f"{weights_server.url}/models/resnet50-11ad3fa6.pth" in caught.value.message
    for remedy in (
        f"kubedet weights fetch {uri} --data-root {tmp_path}",
        "--set model.weights=none",
        f"{tmp_path}/weights/torchvision/resnet50-11ad3fa6.pth",
    ):
        assert remedy in caught.value.fix
    assert not caught.value.transient
    check_available("", str(tmp_path))


def test_a_model_of_the_hub_is_mirrored_and_repaired(weights_server, tmp_path):
    content = safetensors.torch.save(TENSORS)
    described = b'{"num_queries": 9}'
    weights_server.add_model("org/name", {"model.safetensors": content, "config.json": described})
    file = fetch_if_needed("hf:org/name", str(tmp_path))
    assert (file.config_json, file.shapes()) == ({"num_queries": 9}, SHAPES)
    place = tmp_path / "weights/hf/org/name/main"
    (item,) = json.loads((place / "files.json").read_text())["files"]
    assert item["name"] == "model.safetensors" and item["sha256"] == hashlib.sha256(content).hexdigest()
    (place / "model.safetensors").write_bytes(b"damaged")
    assert list(fetch_if_needed("hf:org/name", str(tmp_path)).state()) == ["conv1.weight"]
    weights_server.stop()
    assert fetch_if_needed("hf:org/name", str(tmp_path)).config_json == {"num_queries": 9}
    (place / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(StorageError, match="cannot be fetched from"):
        fetch_if_needed("hf:org/name", str(tmp_path))


def test_an_interrupted_fetch_is_not_complete(weights_server, tmp_path):
    weights_server.add_model("org/name", {"model.safetensors": b"x"})
    cut_off = next(path for path in weights_server.files if path.endswith("/model.safetensors"))
    content = weights_server.files.pop(cut_off)
    with pytest.raises(StorageError, match=r"hf:org/name is not in .* cannot be fetched"):
        fetch_if_needed("hf:org/name", str(tmp_path))
    assert not find_in_mirror("hf:org/name", str(tmp_path))
    weights_server.files[cut_off] = content
    fetch_if_needed("hf:org/name", str(tmp_path))
    assert find_in_mirror("hf:org/name", str(tmp_path))


def test_a_file_of_the_web_with_and_without_its_hash(weights_server, tmp_path):
    content = safetensors.torch.save(TENSORS)
    weights_server.files["w.safetensors"] = content
    uri = f"{weights_server.url}/w.safetensors"
    for named in (uri, f"{uri}#sha256={hashlib.sha256(content).hexdigest()}"):
        assert list(fetch_if_needed(named, str(tmp_path)).state()) == ["conv1.weight"]
        assert find_in_mirror(named, str(tmp_path))
    with pytest.raises(StorageError, match="not with 00000000"):
        fetch_if_needed(f"{uri}#sha256=00000000", str(tmp_path))


def test_files_and_folders_are_taken_where_they_are(bucket, tmp_path):
    folder = tmp_path / "saved"
    folder.mkdir()
    safetensors.torch.save_file(TENSORS, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    (bucket / "saved").mkdir()
    for path in folder.iterdir():
        (bucket / "saved" / path.name).write_bytes(path.read_bytes())
    for uri in (str(folder), f"{folder}/", f"file://{folder}", "s3://bucket/saved"):
        assert list(fetch_if_needed(uri, "unused").state()) == ["conv1.weight"], uri
    (folder / "config.json").write_text('{"a": 1}')
    torch.save(TENSORS, folder / "other.pth")
    for name in ("model.safetensors", "other.pth"):
        file = fetch_if_needed(f"{folder}/{name}", "unused")
        assert (file.config_json, file.shapes()) == ({"a": 1}, SHAPES)
    (folder / "config.json").write_text("[]")
    with pytest.raises(DataError, match=r"config\.json"):
        fetch_if_needed(f"{folder}/model.safetensors", "unused")


def test_a_place_without_weights_is_told_before_any_training(tmp_path):
    with pytest.raises(StorageError, match=r"model\.weights: .*neither a file nor a folder"):
        check_available(str(tmp_path), "unused")
    with pytest.raises(StorageError, match=r"model\.weights: .*gone\.pt"):
        check_available(str(tmp_path / "gone.pt"), "unused")
    with pytest.raises(ConfigError, match="has no weights"):
        check_available("torchvision:Nothing", "unused")


TOKEN = "hf_SecretOfTheTest"


@pytest.fixture
def gated(weights_server, monkeypatch):
    """A model whose files, but not whose description, need a token; its tensors lie at another server."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    store = WeightsServer()
    files = {"model.safetensors": safetensors.torch.save(TENSORS), "config.json": b"{}"}
    weights_server.add_model("org/gated", files)
    store.add_model("org/gated", files)
    weights_server.tokens["org/gated/resolve/"] = TOKEN
    weights_server.elsewhere = store.url
    yield weights_server, store
    store.stop()


@pytest.mark.parametrize("is_named", [True, False])
def test_a_gated_model_comes_with_the_token_which_only_the_hub_sees(
    gated, tmp_path, monkeypatch, caplog, is_named
):
    server, store = gated
    address = next(f"{server.url}/{path}" for path in server.files if path.endswith(".safetensors"))
    caplog.set_level("DEBUG")
    monkeypatch.setenv("HF_TOKEN", f"{TOKEN}\n")  # As a Secret made from a file has it.
    web.allow([store.url])
    uri = "hf:org/gated" if is_named else address
    assert list(fetch_if_needed(uri, str(tmp_path)).state()) == ["conv1.weight"]
    assert {shown for _, shown in server.shown if shown} == {f"Bearer {TOKEN}"}
    assert store.requests and {shown for _, shown in store.shown} == {""}
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert TOKEN not in caplog.text and TOKEN.encode() not in written


def test_no_other_server_sees_the_token(gated, tmp_path, monkeypatch):
    _, store = gated
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    path = next(path for path in store.files if path.endswith(".safetensors"))
    fetch_if_needed(f"{store.url}/{path}", str(tmp_path))
    # And where the length is not told, or the address has a query, it is no other.
    store.files[f"{path}?download=true"] = store.files[path]
    fetch_if_needed(f"{store.url}/{path}?download=true", str(tmp_path))
    assert store.requests and {shown for _, shown in store.shown} == {""}


@pytest.mark.parametrize(("token", "status"), [("", 401), ("hf_AnotherSecret", 403)])
def test_a_refusal_of_the_hub_tells_the_page_and_what_is_missing(
    token, status, gated, tmp_path, monkeypatch, caplog
):
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(StorageError, match=f"the server answers {status}") as caught:
        check_available("hf:org/gated", str(tmp_path))
    assert caught.value.message.startswith("model.weights: hf:org/gated is not in")
    words = ("/org/gated exists", "set HF_TOKEN", "accept its conditions", "--set model.weights=none")
    assert all(each in caught.value.fix for each in words)
    assert not token or token not in f"{caught.value}{caplog.text}"
    assert not caught.value.transient and not list(tmp_path.rglob("*.safetensors"))


def test_what_can_be_no_token_is_refused_without_telling_it(weights_server, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_Secret of two words")
    with pytest.raises(StorageError, match="HF_TOKEN in the environment is not a token") as caught:
        fetch_if_needed("hf:org/name", str(tmp_path))
    assert "Secret" not in str(caught.value)
