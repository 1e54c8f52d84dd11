"""Configurations as JSON, changed by dotted keys; each section validates its values when it is created."""

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
_EXCERPT = 40
_LIBRARIES = {"torchvision": "torchvision", "hf": "transformers"}
"""Libraries of published weights by the scheme of their URI."""
_REWRITE_FIX = (
    "run the command that wrote it again; if you edited the file, also remove its last key, file_sha256"
)
_KEYS_FIX = "correct these keys; `kubedet recipes show NAME` lists a recipe's keys and values"


def to_json(config: Config) -> str:
    """Serialize a configuration to JSON; `from_json` restores an equal one."""
    return json.dumps(asdict(config), indent=2) + "\n"


def write(uri: str, config: Config) -> None:
    """Write a run's configuration with its hash."""
    storage.write_json(uri, asdict(config), indent=2)


def read(uri: str) -> Config:
    """Read a configuration that `write` or a person wrote; see `from_json`."""
    return from_json(json_files.unseal(uri, storage.read_bytes(uri), _REWRITE_FIX), where=uri)


def from_json(text: str | bytes, *, where: str = "configuration") -> Config:
    """Read a configuration from JSON; see `from_tree`."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}", fix=_KEYS_FIX) from None
    return from_tree(tree, where=where)


def from_tree(tree: Any, *, where: str = "configuration") -> Config:
    """Build a configuration from nested mappings; missing keys get their defaults.

    A ConfigError names every key that is unknown, of a wrong type or out of range; `where` is the title of
    the text in it (a path, a recipe).
    """
    config, problems = _build(tree)
    if config is None:
        raise ConfigError(f"{where} cannot be used:\n" + "\n".join(problems), fix=_KEYS_FIX)
    return config


def _build(tree: Any) -> tuple[Config | None, list[str]]:
    """Return the configuration, or None and a line for each problem."""
    if not isinstance(tree, Mapping):
        return None, [f"  (the whole text): an object of sections, not {_excerpt(tree)}"]
    kinds: dict[str, Any] = {**SECTIONS}
    problems: list[str] = []
    values = {key: value for key, value in tree.items() if key != "model"}
    options = tree.get("model", {})
    name = options.get("architecture", architectures.DEFAULT) if isinstance(options, Mapping) else ""
    try:
        # The keys of this section depend on one of its values.
        kinds["model"] = architectures.options_class(name) if name else ModelConfig
    except ConfigError as error:
        problems.append(f"  {_ARCHITECTURE}: {error.message}: {error.fix}")
    for section, kind in kinds.items():
        values[section] = _make(section, kind, tree.get(section, {}), problems)
    config = None if problems else _make("", Config, values, problems)
    if config is not None:
        problems += _conflicts(config)
    return (None if problems else config), problems


def _make(section: str, kind: Any, values: Any, problems: list[str]) -> Any:
    """Return a section, or None after adding its problems."""
    if not isinstance(values, Mapping):
        problems.append(f"  {section}: a section of keys, not {_excerpt(values)}")
        return None
    try:
        return kind(**values)
    except ValidationError as error:
        for item in error.errors():
            leaf = ".".join(str(part) for part in item["loc"])
            key = f"{section}.{leaf}".removeprefix(".")
            if item["type"] != "unexpected_keyword_argument":
                problems.append(f"  {key}: {item['msg'].lower()}, not {_excerpt(item['input'])}")
            elif section == "model" and (owners := architectures.supporting(leaf)):
                problems.append(f"  {key}: a key of {', '.join(owners)}, not of {kind.architecture}")
            else:
                problems.append(f"  {key}: no such key")
        return None


def _excerpt(value: Any) -> str:
    return json.dumps(value, default=str)[:80]


def _conflicts(config: Config) -> list[str]:
    """Return a line for each setting that the architecture does not support."""
    model, size, problems = config.model, config.loader.image_size, []
    if size % model.stride:
        below = size // model.stride * model.stride
        problems.append(
            f"  loader.image_size: {model.architecture} takes multiples of {model.stride}, not {size}; "
            f"the next are {below} and {below + model.stride}"
        )
    scheme, colon, _ = model.weights.partition(":")
    library = _LIBRARIES.get(scheme, "") if colon else ""
    if library and model.library not in ("", library):
        problems.append(
            f"  {_WEIGHTS}: {model.weights} are weights of {library}, not of {model.architecture}"
        )
    return problems


def parse_value(text: str) -> Any:
    """Parse the value of `key=value`: JSON (1e-4, true, [1,2]) or else text."""
    try:
        return parse_json(text)
    except TooLargeError as error:
        raise ConfigError(
            f"the value {text[:_EXCERPT]}... cannot be used: {error}",
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
    """Format `key=value` so that `parse_overrides` reads back the same value."""
    plain = isinstance(value, str) and parse_value(value) == value
    return f"{key}={value if plain else json.dumps(value)}"


def with_overrides(config: Config, overrides: Overrides, *, where: str = "overrides") -> Config:
    """Return the configuration with dotted keys replaced, e.g. {"train.lr": 0.02}.

    Another `model.architecture` resets its whole section to its defaults, and `model.weights=none` trains all
    layers. A ConfigError names all wrong keys (with similar ones) and values.
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
    changed, problems = _build(tree)
    if changed and overrides.get(_WEIGHTS) == NO_WEIGHTS:
        frozen = changed.model.unfreezing_options().items()
        trained = {key: value for key, value in frozen if f"model.{key}" not in overrides}
        changed = replace(changed, model=replace(changed.model, **trained))
    if changed is None or unknown:
        hints = [f"  no key {key!r}: {_hint(key, keys, str(name))}" for key in unknown]
        raise ConfigError(
            f"{where} cannot be used:\n" + "\n".join(hints + problems),
            fix=f"correct these; `kubedet recipes show {config.recipe}` lists all keys and values",
        )
    return changed


def _hint(key: str, keys: Sequence[str], architecture: str) -> str:
    section, _, option = key.partition(".")
    if section == "model" and (owners := architectures.supporting(option)):
        return f"it is an option of {', '.join(owners)}, not of {architecture}"
    close = difflib.get_close_matches(key, keys, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"sections are: model, {', '.join(SECTIONS)}"


def check_frozen(config: Config) -> None:
    """Refuse a new training with frozen random weights."""
    frozen = config.model.unfreezing_options()
    if frozen and not config.model.weights:
        now = " and ".join(f"model.{key}={getattr(config.model, key)}" for key in frozen)
        raise ConfigError(
            f"{now} would freeze random weights, because model.weights is not set",
            fix=f"set some, or train all layers: --set {_WEIGHTS}={NO_WEIGHTS}, or --set "
            + " --set ".join(f"model.{key}={value}" for key, value in frozen.items()),
        )


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Overrides:
    """Return the values of a tree by dotted keys."""
    values: Overrides = {}
    for name, value in tree.items():
        values |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return values
