"""Whatever is in a model, a checkpoint or a configuration, commands end with a message and a remedy."""

import json

import pytest
import torch
from bundles import make_bundle
from hostile import as_json, damaged, examples, refused, spoiled, tried, values
from hypothesis import given
from hypothesis import strategies as st

from trainer import checkpoint, configuration, recipes
from trainer.errors import ConfigError
from trainer.export import bundle, published_models
from trainer.weights.weight_files import WeightFiles


def resealed(folder) -> None:
    """Write the checksums anew, as whoever exchanges a file would."""
    bundle.seal(folder)


@pytest.fixture
def models(tmp_path):
    """A data root with two models, one of which will be spoiled; gives the root and that one's folder."""
    root = str(tmp_path / "data_root")
    for name in ("good", "odd"):
        source = make_bundle(tmp_path / name, name=name)
        published_models.publish(source, root, name)
    return root, tmp_path / "data_root" / "models" / "odd"


def all_commands(root: str, capsys) -> None:
    """Run what reads published models; the good one is always told."""
    refused("model", "list", "--data-root", root, capsys=capsys)
    assert published_models.current(root, "good")
    for words in (
        ("show", "odd"), ("verify", "odd"), ("show", "odd@v1"), ("rollback", "odd"),
        ("layout", "odd", "-o", f"{root}/out"), ("promote", "odd", "v1"),
    ):  # fmt: skip
        refused("model", *words, "--data-root", root, capsys=capsys)


def listed(root: str, capsys) -> str:
    """Return what `kubedet model list` prints."""
    from pipelines import cli

    assert cli.main(["model", "list", "--data-root", root]) == 0
    return capsys.readouterr().out


def test_spoiled_metadata(models, capsys):
    root, odd = models
    metadata = json.loads((odd / "v1" / bundle.METADATA).read_text())

    @examples(40)
    @given(spoiled(metadata))
    def run(tree):
        (odd / "v1" / bundle.METADATA).write_bytes(as_json(tree))
        resealed(odd / "v1")
        all_commands(root, capsys)

    run()


def test_spoiled_current(models, capsys):
    root, odd = models
    current = json.loads((odd / "current").read_text())

    @examples(40)
    @given(st.one_of(spoiled(current).map(as_json), damaged(as_json(current)), values.map(as_json)))
    def run(content):
        (odd / "current").write_bytes(content)
        all_commands(root, capsys)

    run()


def test_damaged_checksums(models, capsys):
    root, odd = models
    sums = (odd / "v1" / bundle.CHECKSUMS).read_bytes()

    @examples(30)
    @given(damaged(sums))
    def run(content):
        (odd / "v1" / bundle.CHECKSUMS).write_bytes(content)
        all_commands(root, capsys)

    run()


WRONG = [
    b"",
    b"[]",
    b"null",
    b'"v1"',
    b"{}",
    b'{"version": 1}',
    b'{"version": "v1", "history": 5}',
    b"[" * 9000,
]


@pytest.mark.parametrize("content", WRONG)
def test_one_bad_record_hides_no_model_and_promoting_mends_it(models, capsys, content):
    root, odd = models
    (odd / "current").write_bytes(content)
    shown = listed(root, capsys)
    assert "good" in shown and "* v1" in shown.partition("odd")[0]
    refused("model", "promote", "odd", "v1", "--data-root", root, capsys=capsys, codes=(0,))
    assert "* v1" in listed(root, capsys).partition("odd")[2]


@pytest.mark.parametrize("content", WRONG)
def test_one_bad_bundle_hides_no_model_and_another_version_can_be_promoted(models, capsys, content, tmp_path):
    root, odd = models
    published_models.publish(make_bundle(tmp_path / "v2", name="odd", version="v2"), root, "odd")
    (odd / "v2" / bundle.METADATA).write_bytes(content)
    resealed(odd / "v2")
    shown = listed(root, capsys)
    assert "good" in shown and "v2  damaged" in shown
    refused("model", "promote", "odd", "v1", "--data-root", root, capsys=capsys, codes=(0,))
    assert "* v1" in listed(root, capsys).partition("odd")[2]


CATEGORIES = [{"id": 0, "name": "cat", "original_id": 7}]


def state(**changed: object) -> dict[str, object]:
    """What a checkpoint holds, with other values."""
    whole = {
        "version": checkpoint.VERSION, "model": {"a": torch.zeros(2)}, "categories": CATEGORIES,
        "step": 3, "epoch": 1, "config": configuration.to_json(recipes.load("debug", {})),
        "metrics": {}, "fingerprint": "f00d", "global_batch": 4,
    }  # fmt: skip
    return {key: value for key, value in (whole | changed).items() if value is not ...}


@pytest.mark.parametrize("key", ["config", "categories", "step", "model", "version", "fingerprint"])
@pytest.mark.parametrize("value", [..., None, 5, "x", [], {}, {"a": "b"}], ids=repr)
def test_a_checkpoint_that_lacks_something(tmp_path, capsys, key, value):
    path = tmp_path / "best.pt"
    torch.save(state(**{key: value}), path)
    words = ("evaluate", str(path), "--shards", str(tmp_path), "-o", str(tmp_path / "out"))
    refused(*words, capsys=capsys, codes=(2,))


def test_damaged_checkpoints(tmp_path, capsys):
    path = tmp_path / "best.pt"
    torch.save(state(), path)
    whole = path.read_bytes()

    @examples(40)
    @given(damaged(whole))
    def run(content):
        path.write_bytes(content)
        words = ("evaluate", str(path), "--shards", str(tmp_path), "-o", str(tmp_path / "out"))
        refused(*words, capsys=capsys, codes=(2,))

    run()


@examples(150)
@given(spoiled(json.loads(configuration.to_json(recipes.load("debug", {})))))
def test_configurations(tree):
    error = tried(lambda: configuration.from_json(as_json(tree)))
    assert not isinstance(error, Exception) or (isinstance(error, ConfigError) and error.fix)


@examples(60)
@given(damaged(configuration.to_json(recipes.load("debug", {})).encode()))
def test_bytes_of_configurations(content):
    error = tried(lambda: configuration.from_json(content))
    assert not isinstance(error, Exception) or (isinstance(error, ConfigError) and error.fix)


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_damaged_weights(tmp_path, name):
    from safetensors.torch import save_file

    path = tmp_path / name
    tensors = {"a": torch.zeros(3), "b": torch.ones(2, 2)}
    save_file(tensors, path) if name.endswith("safetensors") else torch.save(tensors, path)
    whole = path.read_bytes()

    @examples(40)
    @given(damaged(whole))
    def run(content):
        path.write_bytes(content)
        tried(WeightFiles(str(path), {name: path}).state)

    run()


@examples(60)
@given(st.one_of(values.map(as_json), damaged(b'{"model_type": "d_fine", "id2label": {"0": "cat"}}')))
def test_what_is_published_beside_weights(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    tried(WeightFiles("x", {"config.json": path}).config)
