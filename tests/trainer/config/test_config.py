"""The configuration: strict loading, overrides, recipes."""

import dataclasses
import json
from dataclasses import asdict

import pytest

from trainer.base.errors import ConfigError
from trainer.config.parsing import from_json, parse_overrides, to_json
from trainer.config.schema import Config
from trainer.model import recipes


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_every_recipe_survives_writing_and_reading(name):
    config = recipes.load(name)
    assert config.recipe == name
    assert from_json(to_json(config)) == config


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_no_recipe_freezes_random_weights_and_every_one_can_train_from_scratch(name):
    config = recipes.load(name, {"model.weights": "none"})
    assert config.model.weights == "" and not config.model.unfreezing_options()
    published = recipes.load(name).model
    assert config.model == dataclasses.replace(published, weights="", **published.unfreezing_options())


def test_none_trains_all_but_what_is_named_beside_it():
    config = recipes.load("mlperf", {"model.weights": "none", "model.norm": "group"})
    assert (config.model.norm, config.model.trainable_layers) == ("group", 5)
    with pytest.raises(ConfigError) as caught:
        recipes.load("mlperf", {"model.weights": "none", "model.trainable_layers": 3})
    assert "model.trainable_layers=3 would freeze random weights" in caught.value.message
    assert "--set model.weights=none" in caught.value.fix


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("debug", {"model.norm": "frozen"}),
        ("debug", {"model.trainable_layers": 4}),
        ("mlperf", {"model.weights": ""}),
        ("debug", {"model.architecture": "dfine", "model.frozen_norm": True}),
    ],
)
def test_to_freeze_random_weights_is_refused(name, overrides):
    with pytest.raises(ConfigError, match="would freeze random weights"):
        recipes.load(name, overrides)


def test_a_model_that_was_trained_with_frozen_random_weights_can_still_be_read():
    tree = asdict(recipes.load("mlperf"))
    tree["model"]["weights"] = ""
    assert from_json(json.dumps(tree)).model.norm == "frozen"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("loader.image_size", 1_000_000), ("loader.sizes", [320_000]), ("model.fpn_channels", 10**9),
        ("model.backbone_width", 10**6), ("model.head_depth", 10**6), ("model.aspect_ratios", [1.0] * 10**4),
        ("model.detections_per_image", 10**9),
    ],
)  # fmt: skip
def test_sizes_that_exhaust_the_memory_are_refused(key, value):
    section, name = key.split(".")
    with pytest.raises(ConfigError, match=key):
        from_json(json.dumps({section: {name: value}}), where="a checkpoint")


def test_whole_floats_are_taken_for_integers():
    assert recipes.load("debug", {"train.epochs": 100.0}).train.epochs == 100


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"train.epochs": 100.5}, "train.epochs"),
        ({"train.epochs": "many"}, "train.epochs"),
        ({"train.lr": -1.0}, "train.lr"),
        ({"train.lr": float("nan")}, "train.lr"),
        ({"train.optimizer": "sgdd"}, "train.optimizer"),
        ({"loader.scale": [1.0, 2.0, 3.0]}, "loader.scale"),
        ({"loader.scale": [2.0, 1.0]}, "loader.scale"),
        ({"model.anchor_sizes": [8.0]}, "model.anchor_sizes"),
        ({"loader.mosaic": 1.5}, "loader.mosaic"),
        ({"model.queries": 3}, "not of retinanet"),
        ({"loader.sizes": [640, 100]}, "loader.sizes: .*100 is not a multiple of the stride 32: use 96"),
        (
            {"loader.sizes": [32 * n for n in range(3, 16)]},
            "loader.sizes: .*13 different sides: 12 are allowed",
        ),
        ({"loader.sizes": [64]}, "loader.sizes.*greater than or equal to 96"),
    ],
)
def test_values_that_do_not_fit_are_named(overrides, named):
    with pytest.raises(ConfigError, match=named):
        recipes.load("debug", overrides)


def test_a_uri_that_can_name_no_file_is_told_with_all_else_that_is_wrong():
    wrong = {"model.weights": "s3://a..b/w.pt", "evaluation.baseline": "minio://-/x", "train.lr": -1.0}
    with pytest.raises(ConfigError) as caught:
        recipes.load("debug", wrong)
    for key, words in (("model.weights", "'a..b'"), ("evaluation.baseline", "'-'"), ("train.lr", "not -1.0")):
        assert any(key in line and words in line for line in caught.value.message.splitlines()), key
    tree = asdict(Config()) | {"evaluation": {"baseline": "s3:///x"}}
    with pytest.raises(ConfigError, match=r"evaluation\.baseline: .*has no bucket"):
        from_json(json.dumps(tree))


def test_an_unknown_architecture_is_told_with_those_there_are():
    with pytest.raises(ConfigError, match=r"model\.architecture: unknown architecture 'retina'.*retinanet"):
        recipes.load("debug", {"model.architecture": "retina"})
    with pytest.raises(ConfigError, match=r"model\.architecture: unknown architecture 7"):
        from_json('{"model": {"architecture": 7}}')
    with pytest.raises(ConfigError, match="model: should be an object with keys, not 3"):
        from_json('{"model": 3}')


def test_all_that_is_wrong_with_overrides_is_told_at_once():
    wrong = {"train.epoch": 3, "train.lr": -1.0, "zzz": 1, "loader.workers": "many", "train.epochs": 5}
    with pytest.raises(ConfigError) as caught:
        recipes.load("debug", wrong)
    lines = caught.value.message.splitlines()
    assert len(lines) == 5 and all(line.startswith("  ") for line in lines[1:])
    for key, words in (
        ("train.epoch'", "did you mean"),
        ("zzz", "sections are: "),
        ("train.lr", "not -1.0"),
        ("loader.workers", 'not "many"'),
    ):
        assert any(key in line and words in line for line in lines), key


def test_all_texts_without_key_or_value_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        parse_overrides(["train.epochs", "train.lr=0.1", "=3", " =4"])
    assert caught.value.message == "--set 'train.epochs', '=3', ' =4' are not key=value"
    assert parse_overrides([" train.lr =0.1", "model.name="]) == {"train.lr": 0.1, "model.name": ""}


def test_errors_of_a_file_name_file_and_key():
    for text in ("{", "[" * 100_000):
        with pytest.raises(ConfigError, match="x is not JSON"):
            from_json(text, where="x")
    tree = asdict(Config())
    tree["train"]["amp"] = True
    with pytest.raises(ConfigError, match=r"run/config\.json(.|\n)*train\.amp: no such key"):
        from_json(json.dumps(tree), where="run/config.json")
