"""Spaces of a search."""

import pytest

from operations.tuning import space as spaces
from trainer.base.errors import ConfigError
from trainer.model import recipes


@pytest.mark.parametrize("recipe", recipes.RECIPES)
def test_every_recipe_has_a_space_that_holds_its_own_values(recipe):
    config = recipes.load(recipe)
    space = spaces.parse_space("", recipe, {}, recipe)
    assert space["train.lr"].low < config.train.lr < space["train.lr"].high
    assert len(space) >= 3


def test_what_is_set_is_not_searched():
    assert "train.lr" not in spaces.default_space("debug", {"train.lr": 0.1})


@pytest.mark.parametrize("one_line", [False, True])
def test_a_space_reads_back_as_it_was_written(one_line):
    space = spaces.default_space("coco_r50", {})
    assert spaces.parse_space(spaces.format_space(space, one_line=one_line), "coco_r50", {}, "it") == space


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("train.lr: {low: 1, high: 0}", "train.lr: .*low must be smaller"),
        ("train.lr: {low: 0, high: 1, log: true}", "log requires low above 0"),
        ("train.lr: {choices: []}", "train.lr: .*at least 1"),
        ("train.lr: {lowest: 1, high: 2}", "train.lr lacks low"),
        ("train.lr: 3", "train.lr: "),
        ("train.lr: {low: 1e-4, high: 1}", "train.lr: low"),
        ("data.val_fraction: {low: 0.1, high: 0.2}", "data.val_fraction: all trials share this key"),
        ("train.rate: {low: 0.1, high: 0.2}", "train.rate"),
        ("train.epochs: {choices: [one]}", "train.epochs"),
        ("- train.lr", "cannot be used"),
        ("a: [", "cannot be used"),
    ],
)
def test_a_space_that_cannot_be_used_is_refused_by_key(text, said):
    with pytest.raises(ConfigError, match=said):
        spaces.parse_space(text, "debug", {}, "it")
