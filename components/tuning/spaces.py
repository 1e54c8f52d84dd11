"""Spaces of a search: which keys of a configuration take which values."""

from collections.abc import Mapping
from typing import Any

import yaml

from trainer import storage
from trainer.base.bounded_text import yaml_value
from trainer.base.errors import ConfigError
from trainer.model import recipes

Space = dict[str, dict[str, Any]]
"""By key of the configuration: {"low", "high"} with "log" where the logarithm is drawn and "step" between
values, or {"choices"}."""

_FIX = (
    "write `train.lr: {low: 0.0001, high: 0.01, log: true}` or `loader.mosaic: {choices: [0.0, 0.5]}`, "
    "a line a key"
)
_LONGEST = 100_000
_SHARED = ("data.", "evaluation.", "export.", "recipe")
"""What trials have in common: raw data, shards, and how they are scored."""


def builtin(recipe: str, overrides: Mapping[str, Any]) -> Space:
    """Return the space that belongs to a recipe: around its own values.

    Raises:
        ConfigError: there is no such recipe, or an override cannot be used.
    """
    config = recipes.load(recipe, dict(overrides))
    train, loader = config.train, config.loader
    space: Space = {"train.lr": {"low": train.lr / 5, "high": train.lr * 5, "log": True}}
    if train.weight_decay:
        decay = train.weight_decay
        space["train.weight_decay"] = {"low": decay / 10, "high": min(decay * 10, 1.0), "log": True}
    if train.ema_decay:
        space["train.ema_decay"] = {"choices": sorted({0.98, 0.99, 0.998, train.ema_decay})}
    if not loader.sizes:
        space["loader.mosaic"] = {"choices": sorted({0.0, 0.5, loader.mosaic})}
    space["loader.brightness"] = {"low": 0.0, "high": 0.4}
    return {key: one for key, one in space.items() if key not in overrides}


def read(uri: str) -> Space:
    """Read a space from a YAML file.

    Raises:
        ConfigError: it is not of that form.
        StorageError: it cannot be read.
    """
    return _parsed(storage.read_bytes(uri), uri)


def of(text: str, recipe: str, overrides: Mapping[str, Any], where: str) -> Space:
    """Return the space that a text holds, or, where it is empty, that of a recipe; checked.

    Args:
        text: YAML.
        recipe: see `check`.
        overrides: see `check`.
        where: see `check`.

    Raises:
        ConfigError: it cannot be used.
    """
    space = _parsed(text, f"the space {where}") if text else builtin(recipe, overrides)
    check(space, recipe, overrides, where)
    return space


def _parsed(text: str | bytes, where: str) -> Space:
    try:
        space = yaml_value(text, _LONGEST)
    except ValueError as error:
        raise ConfigError(f"{where} is not YAML: {str(error).splitlines()[0]}", fix=_FIX) from None
    if not isinstance(space, dict) or not space:
        raise ConfigError(f"{where} is not a mapping of keys to what they may be", fix=_FIX)
    return space


def check(space: Space, recipe: str, overrides: Mapping[str, Any], where: str) -> None:
    """Refuse a space that trials could not draw from, before the first of them.

    Args:
        space: to check.
        recipe: that the values are for.
        overrides: of the recipe.
        where: what to call the space in an error.

    Raises:
        ConfigError: naming every key that cannot be used, and why.
    """
    if not space:
        raise ConfigError(
            f"nothing is left to search in the space {where}: all of it is set",
            fix="leave some of it to the search, or name a space with --space",
        )
    wrong = [f"  {key}: {reason}" for key, one in space.items() if (reason := _reason(key, one))]
    if not wrong:
        for values in _extremes(space):
            try:
                recipes.load(recipe, {**overrides, **values})
            except ConfigError as error:
                wrong.append(f"  {error.message}")
    if wrong:
        raise ConfigError(f"the space {where} cannot be used:\n" + "\n".join(dict.fromkeys(wrong)), fix=_FIX)


def _reason(key: str, one: Any) -> str:
    """Say what is wrong with a key of a space; nothing where it is sound."""
    if key.startswith(_SHARED):
        return "trials share raw data, shards and how they are scored: choose it by --set"
    if not isinstance(one, dict):
        return "neither choices nor low and high"
    if unknown := one.keys() - {"low", "high", "log", "step", "choices"}:
        return f"unknown: {', '.join(sorted(unknown))}"
    if "choices" in one:
        sound = isinstance(one["choices"], list) and one["choices"] and len(one) == 1
        return "" if sound else "choices must be a list, and stand alone"
    return _reason_of_range(one)


def _reason_of_range(one: Mapping[str, Any]) -> str:
    low: Any = one.get("low")
    high: Any = one.get("high")
    if not (_is_number(low) and _is_number(high) and low < high):
        return "low and high must be numbers, low the smaller one (1.0e-4 with a point, as YAML has it)"
    if not isinstance(one.get("log", False), bool):
        return "log is true or false"
    if "step" in one and not (_is_number(one["step"]) and one["step"] > 0):
        return "step must be a number above 0"
    if one.get("log") and (low <= 0 or "step" in one):
        return "with log low must be above 0, and there is no step"
    return ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _extremes(space: Space) -> list[dict[str, Any]]:
    """Both ends of every range, and every choice, each at least once."""
    columns = {key: one.get("choices") or [one["low"], one["high"]] for key, one in space.items()}
    longest = max(map(len, columns.values()))
    return [{key: values[i % len(values)] for key, values in columns.items()} for i in range(longest)]


def text(space: Space) -> str:
    """Return a space as the file that `read` takes."""
    # PyYAML writes 1e-05 as 1.0e-05, and reads that as a number.
    return yaml.safe_dump(space, sort_keys=False, default_flow_style=None)


def line(space: Space) -> str:
    """Return a space as one line that `of` takes."""
    return yaml.safe_dump(space, sort_keys=False, default_flow_style=True, width=2**30).strip()
