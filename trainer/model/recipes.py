"""Recipes: named configurations, and recipe files with overrides."""

import yaml

from trainer import storage
from trainer.base.errors import ConfigError
from trainer.base.safe_text import parse_yaml
from trainer.config import architectures
from trainer.config.parsing import check_no_frozen_random_weights, format_override, with_overrides
from trainer.config.schema import MINUTES, Config
from trainer.config.types import Overrides
from trainer.model.deimv2.recipes import deimv2_s
from trainer.model.dfine import recipes as dfine
from trainer.model.retinanet import recipes as retinanet
from trainer.model.rfdetr.recipes import rfdetr_finetune, rfdetr_m

_RECIPES = (
    retinanet.debug,
    retinanet.small,
    retinanet.small_pretrained,
    retinanet.coco_r50,
    retinanet.openimages_r50,
    retinanet.mlperf,
    retinanet.finetune,
    dfine.dfine_small,
    dfine.dfine_finetune,
    *dfine.PUBLISHED,
    rfdetr_finetune,
    rfdetr_m,
    deimv2_s,
)
RECIPES = {recipe.__name__: recipe for recipe in _RECIPES}
"""Recipes by name: functions that return a configuration. They are defined next to their detector."""


def load(name: str, overrides: Overrides | None = None) -> Config:
    """Return the named recipe with dotted overrides; raises ConfigError if random weights would be frozen.

    Overriding train.epochs without train.minutes removes the recipe's time limit.
    """
    if name not in RECIPES:
        raise ConfigError(f"unknown recipe {name!r}", fix=f"use one of: {', '.join(RECIPES)}")
    overrides = overrides or {}
    if "train.epochs" in overrides:
        overrides = {MINUTES: 0.0} | overrides
    config = with_overrides(RECIPES[name](), overrides, where=f"overrides of recipe {name}")
    check_no_frozen_random_weights(config)
    return config


_MAX_FILE_BYTES = 100_000
_FILE_FIX = "write `recipe: small`, then `set:` with lines like `  train.lr: 0.001` below it"


def read_recipe(name: str) -> tuple[str, Overrides]:
    """Return the name and overrides of a recipe, or of a recipe file (*.yaml, *.yml).

    A recipe file, for example by `kubedet tune`, has `recipe: NAME` and `set:` with dotted keys and values.
    """
    if not name.endswith((".yaml", ".yml")):
        return name, {}
    try:
        tree = parse_yaml(storage.read_bytes(name), _MAX_FILE_BYTES)
    except ValueError as error:
        raise ConfigError(f"{name} is not YAML: {error}", fix=_FILE_FIX) from None
    match tree:
        case {"recipe": str(recipe), **rest} if not rest.keys() - {"set"}:
            overrides = rest.get("set") or {}
        case _:
            overrides = None
    if not isinstance(overrides, dict) or not all(isinstance(key, str) for key in overrides):
        raise ConfigError(f"{name} is not a recipe file", fix=_FILE_FIX)
    load(recipe, overrides)
    return recipe, overrides


def format_recipe_file(name: str, overrides: Overrides) -> str:
    """Format a recipe file, which `read_recipe` reads."""
    return yaml.safe_dump({"recipe": name, "set": overrides}, sort_keys=False)


def to_arguments(name: str, overrides: Overrides) -> list[str]:
    """Return the options of `python -m trainer` for a recipe and its overrides."""
    return ["--recipe", name, *(f"--set={format_override(key, value)}" for key, value in overrides.items())]


def load_with_packages(name: str, overrides: Overrides | None = None) -> Config:
    """Load a recipe and check that its detector's packages are installed."""
    config = load(name, overrides)
    architectures.require_packages(config.model.architecture)
    return config
