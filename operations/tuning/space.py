"""The search space: the keys of a configuration that a search varies, and their values."""

import math
from collections.abc import Mapping
from typing import Any

import yaml
from pydantic.dataclasses import dataclass

from trainer.base import json_files
from trainer.base.errors import ConfigError, KubedetError
from trainer.base.safe_text import parse_yaml
from trainer.model import recipes

ENDED_FILE = "ended.json"  # Written into the folder of a search when all its trials have ended.


@dataclass(config=json_files.STRICT, frozen=True)
class Range:
    """Numbers from `low` to `high`; only integers if both are integers."""

    low: int | float
    high: int | float
    log: bool = False  # Sample on a logarithmic scale.
    step: int | float | None = None  # Distance between values; None: continuous, or 1 for integers.

    def __post_init__(self) -> None:
        if not -math.inf < self.low < self.high < math.inf:
            raise ValueError("low must be smaller than high, and both finite")
        if self.step is not None and not 0 < self.step < math.inf:
            raise ValueError("step must be finite and above 0")
        if self.log and (self.low <= 0 or self.step is not None):
            raise ValueError("log requires low above 0 and no step")


@dataclass(config=json_files.STRICT, frozen=True)
class Choices:
    """One of a few values."""

    choices: list[Any]

    def __post_init__(self) -> None:
        if not self.choices:
            raise ValueError("choices must have at least 1 value")


Space = dict[str, Range | Choices]  # By key of the configuration.
_FIX = (
    "write `train.lr: {low: 0.0001, high: 0.01, log: true}` or `loader.mosaic: {choices: [0.0, 0.5]}`, "
    "one key per line; YAML reads 1.0e-4 as a number, but not 1e-4"
)
_SHARED_KEYS = ("data.", "evaluation.", "export.", "recipe")
"""Beginnings of the keys that all trials share: raw data, shards, scoring and export."""


def default_space(recipe: str, overrides: Mapping[str, Any]) -> Space:
    """Return a space around the recipe's values, without the overridden keys."""
    config = recipes.load(recipe, dict(overrides))
    train, loader = config.train, config.loader
    space: Space = {"train.lr": Range(train.lr / 5, train.lr * 5, log=True)}
    if decay := train.weight_decay:
        space["train.weight_decay"] = Range(decay / 10, min(decay * 10, 1.0), log=True)
    if train.ema_decay:
        space["train.ema_decay"] = Choices(sorted({0.98, 0.99, 0.998, train.ema_decay}))
    if not loader.sizes:
        space["loader.mosaic"] = Choices(sorted({0.0, 0.5, loader.mosaic}))
    space["loader.brightness"] = Range(0.0, 0.4)
    return {key: one for key, one in space.items() if key not in overrides}


def parse_space(content: str | bytes, recipe: str, overrides: Mapping[str, Any], name: str) -> Space:
    """Parse a space from YAML (default: `default_space`), and check it with the recipe."""
    space: Space = {}
    key = ""
    try:
        tree = parse_yaml(content, 100_000) if content else to_dict(default_space(recipe, overrides))
        if not isinstance(tree, dict) or not tree:
            raise ValueError("there is nothing to search: the space has no keys, or all keys are set")
        for key, value in tree.items():
            kind: type[Range | Choices] = Choices if isinstance(value, dict) and "choices" in value else Range
            space[str(key)] = json_files.validate(kind, value, str(key), _FIX)
            if str(key).startswith(_SHARED_KEYS):
                raise ValueError("all trials share this key: set it with --set")
        columns = {
            key: one.choices if isinstance(one, Choices) else [one.low, one.high]
            for key, one in space.items()
        }
        for number in range(max(map(len, columns.values()))):
            extremes = {key: values[number % len(values)] for key, values in columns.items()}
            recipes.load(recipe, {**overrides, **extremes})
    except KubedetError as error:
        problem = error.message
    except (ValueError, OverflowError) as error:
        problem = f"{key}: {str(error).splitlines()[0]}"
    else:
        return space
    raise ConfigError(f"{name} cannot be used: {problem.removeprefix(': ')}", fix=_FIX)


def to_dict(space: Space) -> dict[str, dict[str, object]]:
    """Return a space as a tree for YAML or JSON, without defaults."""
    return {
        key: {name: value for name, value in vars(one).items() if value is not None and value is not False}
        for key, one in space.items()
    }


def format_space(space: Space, *, one_line: bool = False) -> str:
    """Return a space as YAML that `parse_space` accepts."""
    # PyYAML writes 1e-05 as 1.0e-05, and reads that as a number.
    flow, width = (True, 2**30) if one_line else (None, 80)
    return yaml.safe_dump(to_dict(space), sort_keys=False, default_flow_style=flow, width=width).strip()
