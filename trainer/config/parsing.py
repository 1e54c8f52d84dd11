"""Reads configurations from JSON and overrides dotted keys; each section validates its own values."""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from pydantic import ValidationError

from trainer import storage
from trainer.base import json_files
from trainer.base.errors import ConfigError
from trainer.base.safe_text import TooLargeError, parse_json
from trainer.config import architectures
from trainer.config.schema import SECTIONS, Config, ModelConfig
from trainer.config.types import NO_WEIGHTS, Overrides

_ARCHITECTURE = "model.architecture"
_WEIGHTS = "model.weights"
_EXCERPT_LENGTH = 40
_LIBRARIES = {"torchvision": "torchvision", "hf": "transformers"}
"""Libraries of published weights by the scheme of their URI."""
_REWRITE_FIX = (
    "run the command that wrote the file again; if you edited it, remove its last key, file_sha256, instead"
)
_KEYS_FIX = "correct these keys; `kubedet recipes show NAME` lists the keys and values of a recipe"


def to_json(config: Config) -> str:
    """Serialize a configuration to JSON; `from_json` restores an equal one."""
    return json.dumps(asdict(config), indent=2) + "\n"


def write(uri: str, config: Config) -> None:
    """Write a configuration with its hash."""
    storage.write_json(uri, asdict(config), indent=2)


def read(uri: str) -> Config:
    """Read a configuration file and compare it with its hash, if it has one; see `from_json`."""
    return from_json(json_files.verify_and_strip_hash(uri, storage.read_bytes(uri), _REWRITE_FIX), where=uri)


def from_json(text: str | bytes, *, where: str = "configuration") -> Config:
    """Read a configuration from JSON; see `from_tree`."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}", fix="correct the JSON at this position") from None
    return from_tree(tree, where=where)


def from_tree(tree: Any, *, where: str = "configuration") -> Config:
    """Build a configuration from nested mappings; missing keys get their defaults.

    Raises ConfigError with every key that is unknown, has the wrong type or is out of range. The error calls
    the configuration `where`, for example a path.
    """
    config, problems = _build_config(tree)
    if config is None:
        raise ConfigError(f"{where} cannot be used:\n" + "\n".join(problems), fix=_KEYS_FIX)
    return config


def _build_config(tree: Any) -> tuple[Config | None, list[str]]:
    """Return the configuration (None if it is invalid) and a line for each problem."""
    if not isinstance(tree, Mapping):
        return None, [f"  should be an object with sections, not {_excerpt(tree)}"]
    kinds: dict[str, Any] = {**SECTIONS}
    problems: list[str] = []
    values = {key: value for key, value in tree.items() if key != "model"}
    options = tree.get("model", {})
    name = options.get("architecture", architectures.DEFAULT) if isinstance(options, Mapping) else ""
    try:
        # The keys of the section `model` depend on its architecture.
        kinds["model"] = architectures.options_class(name) if name else ModelConfig
    except ConfigError as error:
        problems.append(f"  {_ARCHITECTURE}: {error.message}: {error.fix}")
    for section, kind in kinds.items():
        values[section] = _build_section(section, kind, tree.get(section, {}), problems)
    config = None if problems else _build_section("", Config, values, problems)
    if config is not None:
        problems += _find_conflicts(config)
    return (None if problems else config), problems


def _build_section(section: str, kind: Any, values: Any, problems: list[str]) -> Any:
    """Build a section; if it is invalid, add its problems to `problems` and return None."""
    if not isinstance(values, Mapping):
        problems.append(f"  {section}: should be an object with keys, not {_excerpt(values)}")
        return None
    try:
        return kind(**values)
    except ValidationError as error:
        for item in error.errors():
            leaf = ".".join(str(part) for part in item["loc"])
            key = f"{section}.{leaf}".removeprefix(".")
            if item["type"] != "unexpected_keyword_argument":
                problems.append(f"  {key}: {item['msg'].lower()}, not {_excerpt(item['input'])}")
            elif section == "model" and (owners := architectures.find_by_option(leaf)):
                problems.append(f"  {key}: an option of {', '.join(owners)}, not of {kind.architecture}")
            else:
                problems.append(f"  {key}: no such key")
        return None


def _excerpt(value: Any) -> str:
    return json.dumps(value, default=str)[:80]


def _find_conflicts(config: Config) -> list[str]:
    """Return a line for each setting that conflicts with the architecture."""
    model, size, problems = config.model, config.loader.image_size, []
    if size % model.stride:
        below = size // model.stride * model.stride
        problems.append(
            f"  loader.image_size: {model.architecture} needs a multiple of {model.stride}, not {size}; "
            f"the nearest are {below} and {below + model.stride}"
        )
    scheme, colon, _ = model.weights.partition(":")
    library = _LIBRARIES.get(scheme, "") if colon else ""
    if library and model.library not in ("", library):
        problems.append(
            f"  {_WEIGHTS}: {model.weights} has weights of {library}, which {model.architecture} cannot use"
        )
    return problems


def parse_value(text: str) -> Any:
    """Parse the value of `key=value`: JSON (1e-4, true, [1,2]) or else text."""
    try:
        return parse_json(text)
    except TooLargeError as error:
        raise ConfigError(
            f"the value {text[:_EXCERPT_LENGTH]}... cannot be used: {error}",
            fix="write a number, a string, or a list of them",
        ) from None
    except ValueError:
        return text


def parse_overrides(texts: Sequence[str], option: str = "--set") -> Overrides:
    """Parse the `key=value` texts of a command-line option; see `parse_value`."""
    values, wrong = {}, []
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.strip()
        if key and equals:
            values[key] = parse_value(value)
        else:
            wrong.append(repr(text))
    if wrong:
        verb = "is not" if len(wrong) == 1 else "are not"
        raise ConfigError(
            f"{option} {', '.join(wrong)} {verb} key=value", fix=f"write it like {option} train.epochs=10"
        )
    return values


def format_override(key: str, value: Any) -> str:
    """Format `key=value` so that `parse_overrides` restores the same value."""
    plain = isinstance(value, str) and parse_value(value) == value
    return f"{key}={value if plain else json.dumps(value)}"


def with_overrides(config: Config, overrides: Overrides, *, where: str = "overrides") -> Config:
    """Return the configuration with dotted keys replaced, e.g. {"train.lr": 0.02}.

    Changing `model.architecture` resets the section `model` to its defaults; `model.weights=none` unfreezes
    all layers. Raises ConfigError with all wrong keys (and similar ones) and values.
    """
    tree = asdict(config)
    name = overrides.get(_ARCHITECTURE, config.model.architecture)
    if isinstance(name, str) and name in architectures.ARCHITECTURES and name != config.model.architecture:
        tree["model"] = asdict(architectures.options_class(name)())
    keys = list(flatten(tree))
    unknown = [key for key in overrides if key not in keys]
    for key in overrides.keys() - set(unknown):
        section, _, leaf = key.rpartition(".")
        (tree[section] if section else tree)[leaf] = overrides[key]
    changed, problems = _build_config(tree)
    if changed and overrides.get(_WEIGHTS) == NO_WEIGHTS:
        frozen = changed.model.unfreezing_options().items()
        trained = {key: value for key, value in frozen if f"model.{key}" not in overrides}
        changed = replace(changed, model=replace(changed.model, **trained))
    if changed is None or unknown:
        hints = [f"  no key {key!r}: {_hint(key, keys, str(name))}" for key in unknown]
        raise ConfigError(
            f"{where} cannot be used:\n" + "\n".join(hints + problems),
            fix=f"correct these keys; `kubedet recipes show {config.recipe}` lists all keys and values",
        )
    return changed


def _hint(key: str, keys: Sequence[str], architecture: str) -> str:
    section, _, option = key.partition(".")
    if section == "model" and (owners := architectures.find_by_option(option)):
        return f"it is an option of {', '.join(owners)}, not of {architecture}"
    close = difflib.get_close_matches(key, keys, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"sections are: model, {', '.join(SECTIONS)}"


def check_no_frozen_random_weights(config: Config) -> None:
    """Raise ConfigError if a new training run would freeze random weights."""
    frozen = config.model.unfreezing_options()
    if frozen and not config.model.weights:
        now = " and ".join(f"model.{key}={getattr(config.model, key)}" for key in frozen)
        raise ConfigError(
            f"{now} would freeze random weights, because model.weights is not set",
            fix=f"set model.weights, or train all layers: --set {_WEIGHTS}={NO_WEIGHTS}, or --set "
            + " --set ".join(f"model.{key}={value}" for key, value in frozen.items()),
        )


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Overrides:
    """Flatten nested mappings to dotted keys."""
    values: Overrides = {}
    for name, value in tree.items():
        values |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return values
