"""Configurations as text: read strictly, changed by dotted keys, written so that they read back equal."""

import difflib
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter, ValidationError

from trainer.config import Config
from trainer.errors import ConfigError

_ADAPTER = TypeAdapter(Config)


def to_json(config: Config) -> str:
    """Write a configuration as JSON text that `from_json` reads back equal."""
    return json.dumps(asdict(config), indent=2) + "\n"


def from_json(text: str | bytes, *, where: str = "configuration") -> Config:
    """Read a configuration strictly.

    Args:
        text: JSON of the whole tree; missing keys take their defaults.
        where: what to call the text in an error (a path, a recipe).

    Raises:
        ConfigError: naming every key that is unknown, of a wrong type or out of range.
    """
    try:
        return _ADAPTER.validate_json(text)
    except ValidationError as error:
        raise ConfigError(
            f"{where} cannot be used:\n" + "\n".join(_problems(error)),
            fix="correct these keys; `kubedet recipes --show NAME` lists a recipe's keys and values",
        ) from None


def _problems(error: ValidationError) -> list[str]:
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"]) or "(the whole text)"
        if item["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
            lines.append(f"  {key}: no such key")
        else:
            given = json.dumps(item["input"], default=str)
            lines.append(f"  {key}: {item['msg'].lower()}, not {given[:80]}")
    return lines


def parse_value(text: str) -> Any:
    """Read the value of `key=value`: JSON where it is JSON (1e-4, true, [1,2]), else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def parse_overrides(texts: Sequence[str], option: str = "--set") -> dict[str, Any]:
    """Read `key=value` texts; a value is JSON where it is JSON, else text.

    Args:
        texts: as they stand on a command line.
        option: the option before each, for errors.

    Raises:
        ConfigError: a text is not of that form.
    """
    values = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise ConfigError(
                f"{option} {text!r} is not key=value", fix=f"write it like {option} train.epochs=10"
            )
        values[key.strip()] = parse_value(value)
    return values


def with_overrides(config: Config, overrides: dict[str, Any], *, where: str = "overrides") -> Config:
    """Return the configuration with dotted keys replaced, e.g. {"train.lr": 0.02}.

    Raises:
        ConfigError: a key does not exist (with the keys that do) or its value does not fit.
    """
    tree = asdict(config)
    for dotted, value in overrides.items():
        if dotted not in _leaves(tree):
            close = difflib.get_close_matches(dotted, _leaves(tree), n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(close)}?" if close else "sections are: " + ", ".join(tree)
            raise ConfigError(
                f"{where}: no key {dotted!r} in the configuration",
                fix=f"{hint} `kubedet recipes --show {config.recipe}` lists all keys",
            )
        *sections, name = dotted.split(".")
        node = tree
        for section in sections:
            node = node[section]
        node[name] = value
    return from_json(json.dumps(tree), where=where)


def _leaves(tree: dict[str, Any], prefix: str = "") -> list[str]:
    names = []
    for name, value in tree.items():
        names += _leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else [prefix + name]
    return names
