"""Initial weights of a run: named weights, the recipe's, or the current version of the model."""

import logging

from trainer import storage
from trainer.base.errors import ConfigError
from trainer.config.schema import ModelConfig
from trainer.config.types import Overrides
from trainer.export import bundle, published_models
from trainer.model import recipes
from trainer.weights.weights_mirror import fetch_if_needed

logger = logging.getLogger(__name__)

CHAMPION = "champion"  # Value of `warm_start`: start from the current version of the model.

WEIGHTS = "model.weights"
_EPOCHS_DIVISOR = 4  # A training from the current version has one epoch for so many of the recipe's.


def secure(recipe: str, overrides: Overrides, data_root: str) -> None:
    """Fetch and check a training's weights before hours of work; a prune that starts later keeps them."""
    if weights := recipes.load_with_packages(recipe, overrides).model.weights:
        from trainer.model.pretrained import check_pretrained  # PyTorch, which takes seconds to start.

        values = overrides | implied(recipe, overrides, data_root)
        check_pretrained(recipes.load(recipe, values).model, data_root)
        if storage.absolute(weights).startswith(f"{storage.absolute(data_root)}/"):
            is_file = storage.exists(weights)
            storage.touch(
                weights if is_file else storage.join(weights, next(iter(storage.list_states(weights))))
            )


def implied(recipe: str, overrides: Overrides, data_root: str) -> Overrides:
    """Return the overrides that the weights file of a recipe implies; may fetch the file."""
    config = recipes.load(recipe, overrides)
    model = config.model
    if model.weights:
        from trainer.storage import web

        web.allow((), config.data.allow_hosts)  # A server of weights may redirect to them.
    if not model.weights or type(model).options_from_weights is ModelConfig.options_from_weights:
        return {}
    file = fetch_if_needed(model.weights, data_root)
    values = model.options_from_weights(file.described, file.shapes())
    keys = {f"model.{name}": value for name, value in values.items() if value != getattr(model, name)}
    return {key: value for key, value in keys.items() if key not in overrides}


def check_warm_start(warm_start: str) -> None:
    """Raise ConfigError for an unknown value of `warm_start`."""
    if warm_start not in ("", CHAMPION):
        raise ConfigError(
            f"warm_start {warm_start!r} is unknown",
            fix=f"use {CHAMPION}, or omit it; --set {WEIGHTS}=PATH starts from any other weights",
        )


def from_champion(recipe: str, overrides: Overrides, data_root: str, name: str) -> Overrides:
    """Return the overrides of a run that starts from the current version of the model `name`.

    Heads for another number of classes start from scratch, see `trainer.model.pretrained.load_pretrained`.
    It trains a quarter of the recipe's epochs, unless train.epochs is among the overrides.
    """
    current = published_models.read_current(data_root, name)
    if current is None:
        logger.info("%s has no current version yet: the training starts as the recipe specifies", name)
        return overrides
    uri = storage.join(published_models.model_folder(data_root, name), current.version)
    before = bundle.load(uri).metadata.config.get("model", {}).get("architecture", "retinanet")
    config = recipes.load(recipe, overrides)
    if before != config.model.architecture:
        raise ConfigError(
            f"warm_start={CHAMPION}: {name} {current.version} is of model.architecture {before}, the recipe "
            f"of {config.model.architecture}",
            fix="choose a recipe of the same architecture, or omit warm_start once",
        )
    epochs = overrides.get("train.epochs", max(1, config.train.epochs // _EPOCHS_DIVISOR))
    # At least two validations, if there are epochs for them: the best of them is exported.
    often = min(config.train.validate_every, max(1, int(epochs) // 2))
    logger.info("warm start from %s %s: its weights, %s epochs", name, current.version, epochs)
    shorter = {"train.epochs": epochs, "train.validate_every": often} | overrides
    return shorter | {WEIGHTS: storage.join(uri, bundle.WEIGHTS)}
