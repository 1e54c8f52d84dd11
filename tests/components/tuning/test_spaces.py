"""Spaces of a search."""

import pytest

from components.tuning import spaces
from trainer.base.errors import ConfigError
from trainer.model import recipes


@pytest.mark.parametrize("recipe", recipes.RECIPES)
def test_every_recipe_has_a_space_that_holds_its_own_values(recipe):
    config = recipes.load(recipe)
    space = spaces.builtin(recipe, {})
    spaces.check(space, recipe, {}, recipe)
    assert space["train.lr"]["low"] < config.train.lr < space["train.lr"]["high"]
    assert len(space) >= 3


def test_what_is_set_is_not_searched():
    assert "train.lr" not in spaces.builtin("debug", {"train.lr": 0.1})


def test_a_space_reads_back_as_it_was_written(tmp_path):
    space = spaces.builtin("coco_r50", {})
    file = tmp_path / "space.yaml"
    file.write_text(spaces.text(space))
    assert spaces.read(str(file)) == space


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("train.lr: {low: 1, high: 0}", "train.lr: low and high must be numbers"),
        ("train.lr: {low: 0, high: 1, log: true}", "with log low must be above 0"),
        ("train.lr: {choices: []}", "choices must be a list"),
        ("train.lr: {lowest: 1, high: 2}", "unknown: lowest"),
        ("train.lr: 3", "neither choices nor low and high"),
        ("data.val_fraction: {low: 0.1, high: 0.2}", "trials share raw data"),
        ("train.rate: {low: 0.1, high: 0.2}", "train.rate"),
        ("train.epochs: {choices: [one]}", "train.epochs"),
        ("- train.lr", "not a mapping"),
        ("a: [", "not YAML"),
    ],
)
def test_a_space_that_cannot_be_used_is_refused_by_key(tmp_path, text, said):
    file = tmp_path / "space.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        spaces.check(spaces.read(str(file)), "debug", {}, str(file))
