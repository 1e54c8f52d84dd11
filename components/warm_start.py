"""A training that goes on from the current version of its model, with a shorter recipe."""

import logging
from typing import Any

from trainer import storage
from trainer.base.errors import ConfigError
from trainer.export import bundle, published_models
from trainer.model import recipes

logger = logging.getLogger(__name__)

_SHARE = 4
"""A training that goes on from good weights has one epoch of so many of the recipe's."""

CHAMPION = "champion"
"""Begin with the weights of the current version of the model."""


def check(warm_start: str) -> None:
    """Refuse what a training cannot begin with.

    Raises:
        ConfigError: saying what it may be.
    """
    if warm_start not in ("", CHAMPION):
        raise ConfigError(
            f"warm_start {warm_start!r} is unknown",
            fix=f"use {CHAMPION}, or leave it out; --set model.weights=PATH begins with any other weights",
        )


def overrides_from(
    warm_start: str, recipe: str, overrides: dict[str, Any], data_root: str, name: str
) -> tuple[dict[str, Any], str]:
    """Return the overrides of a training that begins so, and the version it begins with.

    The weights are the version's; classes that it does not have, in number, have heads anew, as
    `trainer.model.pretrained.load_pretrained` makes them. A quarter of the recipe's epochs is trained, unless
    train.epochs is among the overrides.

    Args:
        warm_start: "" or CHAMPION.
        recipe: name of a recipe.
        overrides: dotted configuration keys and their values.
        data_root: URI under which data are kept.
        name: the model's.

    Raises:
        ConfigError: warm_start is unknown, or the version is another detector than the recipe's.
        StorageError: the current version cannot be read.
    """
    check(warm_start)
    if not warm_start:
        return overrides, ""
    current = published_models.current(data_root, name)
    if current is None:
        logger.info("no version of %s is current yet: the training begins as the recipe says", name)
        return overrides, ""
    uri = storage.join(published_models.folder(data_root, name), current["version"])
    champion = f"{name} {current['version']}"
    before = bundle.load(uri).metadata.get("config", {}).get("model", {}).get("architecture", "retinanet")
    now = recipes.load(recipe, overrides).model.architecture
    if before != now:
        raise ConfigError(
            f"warm_start={CHAMPION}: {champion} is of model.architecture {before}, the recipe of {now}",
            fix="choose a recipe of the same architecture, or leave warm_start out once",
        )
    shorter = _shorter(recipe, overrides) | {"model.weights": storage.join(uri, bundle.WEIGHTS)}
    logger.info("warm start from %s: its weights, %s epochs", champion, shorter["train.epochs"])
    return shorter, current["version"]


def _shorter(recipe: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the overrides with a quarter of the recipe's epochs, unless somebody set them."""
    train = recipes.load(recipe, overrides).train
    epochs = overrides.get("train.epochs", max(1, train.epochs // _SHARE))
    # Two validations at least, as far as there are epochs for them: the best of them is what is exported.
    often = min(train.validate_every, max(1, int(epochs) // 2))
    return {"train.epochs": epochs, "train.validate_every": often} | overrides
