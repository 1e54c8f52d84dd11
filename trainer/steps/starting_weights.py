"""Initial weights of a run: configured weights, or those of the model's current version."""

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
_EPOCHS_DIVISOR = 4  # A warm start trains a quarter of the recipe's epochs.


def fetch_and_check(recipe: str, overrides: Overrides, data_root: str) -> None:
    """Fetch and check the weights of a training run; a prune that starts later keeps them."""
    if weights := recipes.load_with_packages(recipe, overrides).model.weights:
        from trainer.model.pretrained import check_pretrained  # Imports PyTorch, which takes seconds.

        values = overrides | overrides_from_weights(recipe, overrides, data_root)
        check_pretrained(recipes.load(recipe, values).model, data_root)
        if storage.absolute(weights).startswith(f"{storage.absolute(data_root)}/"):
            is_file = storage.exists(weights)
            storage.touch(
                weights if is_file else storage.join(weights, next(iter(storage.list_states(weights))))
            )


def overrides_from_weights(recipe: str, overrides: Overrides, data_root: str) -> Overrides:
    """Return the options that a recipe's weights determine, as overrides; may fetch the weights."""
    config = recipes.load(recipe, overrides)
    model = config.model
    if model.weights:
        from trainer.storage import web

        web.allow((), config.data.allow_hosts)  # The weights' server may redirect to these hosts.
    if not model.weights or type(model).options_from_weights is ModelConfig.options_from_weights:
        return {}
    file = fetch_if_needed(model.weights, data_root)
    values = model.options_from_weights(file.config_json, file.shapes())
    keys = {f"model.{name}": value for name, value in values.items() if value != getattr(model, name)}
    return {key: value for key, value in keys.items() if key not in overrides}


def check_warm_start(warm_start: str) -> None:
    """Raise ConfigError for an unknown value of `warm_start`."""
    if warm_start not in ("", CHAMPION):
        raise ConfigError(
            f"warm_start {warm_start!r} is unknown",
            fix=f"use {CHAMPION}, or omit it; --set {WEIGHTS}=PATH starts from any other weights",
        )


def warm_start_overrides(recipe: str, overrides: Overrides, data_root: str, name: str) -> Overrides:
    """Return the overrides of a run that starts from the current version of the model `name`.

    Heads for a different number of classes start from scratch; see `pretrained.load_pretrained`.
    The run trains a quarter of the recipe's epochs, unless the overrides set train.epochs.
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
            f"warm_start={CHAMPION}: model.architecture of {name} {current.version} is {before}, but that of "
            f"the recipe is {config.model.architecture}",
            fix="choose a recipe of the same architecture, or omit warm_start once",
        )
    epochs = overrides.get("train.epochs", max(1, config.train.epochs // _EPOCHS_DIVISOR))
    # Validate at least twice if possible, because the best checkpoint is exported.
    validate_every = min(config.train.validate_every, max(1, int(epochs) // 2))
    logger.info("warm start from the weights of %s %s: %s epochs", name, current.version, epochs)
    shorter = {"train.epochs": epochs, "train.validate_every": validate_every} | overrides
    return shorter | {WEIGHTS: storage.join(uri, bundle.WEIGHTS)}
