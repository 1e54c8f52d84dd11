"""Recipes: named whole configurations, and files that change one."""

from typing import Any

import yaml

from trainer import storage
from trainer.base.errors import ConfigError
from trainer.base.safe_text import yaml_value
from trainer.config import architectures
from trainer.config.parsing import check_frozen, with_overrides
from trainer.config.schema import Config
from trainer.model.architectures.detr import detr_recipes
from trainer.model.architectures.faster_rcnn import faster_rcnn_recipes
from trainer.model.architectures.fcos import fcos_recipes
from trainer.model.architectures.retinanet import retinanet_recipes

RECIPES = {
    recipe.__name__: recipe
    for recipe in (
        retinanet_recipes.debug,
        retinanet_recipes.small,
        retinanet_recipes.coco_r50,
        retinanet_recipes.openimages_r50,
        retinanet_recipes.mlperf,
        retinanet_recipes.finetune,
        fcos_recipes.fcos_r50,
        faster_rcnn_recipes.faster_rcnn_r50,
        detr_recipes.dfine_small,
        detr_recipes.dfine_s,
        detr_recipes.dfine_l,
        detr_recipes.dfine_finetune,
    )
}
"""Recipes by name. Each is a function that returns a whole configuration, defined next to its detector."""

WITH_WEIGHTS: dict[str, dict[str, Any]] = {
    "small": {"model.weights": "torchvision:ResNet18_Weights.IMAGENET1K_V1", "train.lr": 1e-3}
}
"""Published weights that recipes start from where they are to be had, and what else is different then."""


def load(name: str, overrides: dict[str, Any] | None = None) -> Config:
    """Return the recipe of that name with dotted overrides applied.

    Raises:
        ConfigError: there is no such recipe, no such key, a value does not fit, or random weights
            would be frozen.
    """
    if name not in RECIPES:
        raise ConfigError(f"no recipe {name!r}", fix=f"use one of: {', '.join(RECIPES)}")
    config = with_overrides(RECIPES[name](), overrides or {}, where=f"overrides of recipe {name}")
    check_frozen(config)
    return config


_LONGEST = 100_000
_FILE_FIX = "write `recipe: small` and below it `set:` with lines like `  train.lr: 0.001`"


def named(name: str) -> tuple[str, dict[str, Any]]:
    """Return what a name or a file (*.yaml, *.yml) stands for: the recipe, and overrides of it.

    A file holds `recipe: NAME` and `set:`, dotted keys with their values, as `kubedet tune` writes it.

    Raises:
        ConfigError: the file is not of that form.
        StorageError: it cannot be read.
    """
    if not name.endswith((".yaml", ".yml")):
        return name, {}
    try:
        tree = yaml_value(storage.read_bytes(name), _LONGEST)
    except ValueError as error:
        raise ConfigError(f"{name} is not YAML: {str(error).splitlines()[0]}", fix=_FILE_FIX) from None
    sound = (
        isinstance(tree, dict) and isinstance(tree.get("recipe"), str) and not tree.keys() - {"recipe", "set"}
    )
    overrides = (tree.get("set") or {}) if sound else None
    if not isinstance(overrides, dict) or not all(isinstance(key, str) for key in overrides):
        raise ConfigError(f"{name} is not a recipe's file", fix=_FILE_FIX)
    load(tree["recipe"], overrides)
    return tree["recipe"], overrides


def file_text(name: str, overrides: dict[str, Any]) -> str:
    """Return the text of a file that `named` reads."""
    return yaml.safe_dump({"recipe": name, "set": overrides}, sort_keys=False)


def load_here(name: str, overrides: dict[str, Any] | None = None) -> Config:
    """Return what `load` does, where it is to be used: before hours of work that come first.

    Raises:
        ConfigError: as `load`, or what the detector needs is not installed here.
    """
    config = load(name, overrides)
    architectures.require(config.model.architecture)
    return config
