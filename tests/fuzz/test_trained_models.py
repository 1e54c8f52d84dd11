"""Whatever is in a checkpoint, weights or a configuration, commands end with a message and a remedy."""

import json

import pytest
import torch
from hostile import as_json, damaged, examples, refused, spoiled, tried
from hypothesis import given

from trainer.base.errors import ConfigError
from trainer.config import parsing
from trainer.model import recipes
from trainer.training import checkpoint
from trainer.weights.weights_mirror import WeightFile

CATEGORIES = [{"id": 0, "name": "cat", "original_id": 7}]


def state(**changed: object) -> dict[str, object]:
    """What a checkpoint holds, with other values."""
    whole = {
        "version": checkpoint.VERSION,
        "model": {"a": torch.zeros(2)},
        "categories": CATEGORIES,
        "step": 3,
        "epoch": 1,
        "config": parsing.to_json(recipes.load("debug", {})),
        "metrics": {},
        "fingerprint": "f00d",
        "global_batch": 4,
    }
    return {key: value for key, value in (whole | changed).items() if value is not ...}


@pytest.mark.parametrize("key", ["config", "categories", "step", "model", "version", "fingerprint"])
@pytest.mark.parametrize("value", [..., None, 5, "x", [], {}, {"a": "b"}], ids=repr)
def test_a_checkpoint_that_lacks_something(tmp_path, capsys, key, value):
    path = tmp_path / "best.pt"
    torch.save(state(**{key: value}), path)
    words = ("evaluate", str(path), "--shards", str(tmp_path), "-o", str(tmp_path / "out"))
    refused(*words, capsys=capsys, codes=(2,))


@examples(75)
@given(spoiled(json.loads(parsing.to_json(recipes.load("debug", {})))))
def test_configurations(tree):
    error = tried(lambda: parsing.from_json(as_json(tree)))
    assert not isinstance(error, Exception) or (isinstance(error, ConfigError) and error.fix)


@examples(30)
@given(damaged(parsing.to_json(recipes.load("debug", {})).encode()))
def test_bytes_of_configurations(content):
    error = tried(lambda: parsing.from_json(content))
    assert not isinstance(error, Exception) or (isinstance(error, ConfigError) and error.fix)


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_damaged_weights(tmp_path, name):
    from safetensors.torch import save_file

    path = tmp_path / name
    tensors = {"a": torch.zeros(3), "b": torch.ones(2, 2)}
    save_file(tensors, path) if name.endswith("safetensors") else torch.save(tensors, path)
    whole = path.read_bytes()

    @examples(20)
    @given(damaged(whole))
    def run(content):
        path.write_bytes(content)
        tried(WeightFile(str(path), path).state)

    run()
