"""Configurations as text: read strictly, changed by dotted keys, written so that they read back equal."""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import pydantic_core
from pydantic import TypeAdapter, ValidationError

from trainer import storage
from trainer.base import json_files
from trainer.base.errors import ConfigError
from trainer.base.safe_text import UnboundedError, json_value
from trainer.config import architectures
from trainer.config.schema import Config, ModelConfig
from trainer.config.types import NO_WEIGHTS, URI_CHECK, Overrides
from trainer.storage import check_place

_ADAPTER = TypeAdapter(Config)
_ARCHITECTURE = "model.architecture"
_WEIGHTS = "model.weights"
_EXCERPT = 40
_LIBRARIES = {"torchvision": "torchvision", "hf": "transformers"}
"""Libraries of published weights by the scheme of their URI."""
_REWRITE_FIX = (
    "run the command that wrote it again; if you edited the file, also remove its last key, file_sha256"
)


def to_json(config: Config) -> str:
    """Write a configuration as JSON text that `from_json` reads back equal."""
    return json.dumps(asdict(config), indent=2) + "\n"


def write(uri: str, config: Config) -> None:
    """Write a run's configuration, with its hash in it."""
    storage.write_json(uri, asdict(config), indent=2)


def read(uri: str) -> Config:
    """Read a configuration that `write` or a person wrote; see `from_json`."""
    text = storage.read_bytes(uri)
    if json_files.is_sealed(text):
        text = json.dumps(json_files.decode(uri, text, storage.Form(remedy=_REWRITE_FIX))).encode()
    return from_json(text, where=uri)


def from_json(text: str | bytes, *, where: str = "configuration") -> Config:
    """Read a configuration strictly from JSON; missing keys have their defaults.

    A ConfigError names every key that is unknown, of a wrong type or out of range; `where` is the title of
    the text in it (a path, a recipe).
    """
    config, problems = _read(text)
    if config is None:
        raise ConfigError(
            f"{where} cannot be used:\n" + "\n".join(problems),
            fix="correct these keys; `kubedet recipes --show NAME` lists a recipe's keys and values",
        )
    return config


def _read(text: str | bytes) -> tuple[Config | None, list[str]]:
    """Return the configuration, or None and a line for each problem."""
    try:
        tree = pydantic_core.from_json(text)
    except ValueError:
        tree = None
    if not isinstance(tree, dict):
        return _validated(_ADAPTER, text)
    # The keys of this section depend on one of its values.
    model, problems = _read_model(tree.pop("model", {}))
    config, others = _validated(_ADAPTER, json.dumps(tree))
    problems += others
    if config is None or model is None:
        return None, problems
    # What the architecture does not support.
    size = config.loader.image_size
    if size % model.stride:
        below = size // model.stride * model.stride
        problems.append(
            f"  loader.image_size: {model.architecture} takes multiples of {model.stride}, not {size}; "
            f"the next are {below} and {below + model.stride}"
        )
    scheme, colon, _ = model.weights.partition(":")
    library = _LIBRARIES.get(scheme, "") if colon else ""
    misfit = model.misfit()
    if library and model.library not in ("", library):
        misfit = f"{model.weights} are weights of {library}, not of {model.architecture}"
    if misfit:
        problems.append(f"  model.weights: {misfit}")
    return (None if problems else replace(config, model=model)), problems


def _validated(adapter: TypeAdapter[Any], text: str | bytes, section: str = "") -> tuple[Any, list[str]]:
    try:
        return adapter.validate_json(text, context={URI_CHECK: check_place}), []
    except ValidationError as error:
        problems = []
        for item in error.errors():
            key = section + ".".join(str(part) for part in item["loc"]) or "(the whole text)"
            if item["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
                problems.append(f"  {key}: no such key")
            else:
                value = json.dumps(item["input"], default=str)
                problems.append(f"  {key}: {item['msg'].lower()}, not {value[:80]}")
        return None, problems


def _read_model(tree: Any) -> tuple[ModelConfig | None, list[str]]:
    if not isinstance(tree, dict):
        return None, [f"  model: a section of keys, not {json.dumps(tree)[:80]}"]
    name = tree.get("architecture", architectures.DEFAULT)
    try:
        kind = architectures.options_class(name)
    except ConfigError as error:
        return None, [f"  model.architecture: {error.message}: {error.fix}"]
    known = {field.name for field in fields(kind)}
    foreign = {key: owners for key in tree if key not in known and (owners := architectures.owners(key))}
    problems = [
        f"  model.{key}: a key of {', '.join(owners)}, not of {name}" for key, owners in foreign.items()
    ]
    rest = {key: value for key, value in tree.items() if key not in foreign}
    model, others = _validated(TypeAdapter(kind), json.dumps(rest), "model.")
    return (None if problems else model), problems + others


def parse_value(text: str) -> Any:
    """Parse the value of `key=value`: JSON (1e-4, true, [1,2]) or else text."""
    try:
        return json_value(text)
    except UnboundedError as error:
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
        each = "is not" if len(wrong) == 1 else "are not"
        raise ConfigError(
            f"{option} {', '.join(wrong)} {each} key=value", fix=f"write it like {option} train.epochs=10"
        )
    return values


def as_override(key: str, value: Any) -> str:
    """Write `key=value` so that `parse_overrides` reads the same value."""
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
    keys = list(flat(tree))
    unknown = [key for key in overrides if key not in keys]
    for key in overrides.keys() - set(unknown):
        *sections, leaf = key.split(".")
        node = tree
        for section in sections:
            node = node[section]
        node[leaf] = overrides[key]
    changed, problems = _read(json.dumps(tree))
    if changed and overrides.get(_WEIGHTS) == NO_WEIGHTS:
        frozen = changed.model.freezing().items()
        trained = {key: value for key, value in frozen if f"model.{key}" not in overrides}
        changed = replace(changed, model=replace(changed.model, **trained))
    if changed is None or unknown:
        hints = []
        for key in unknown:
            section, _, option = key.partition(".")
            owners = architectures.owners(option) if section == "model" else []
            close = difflib.get_close_matches(key, keys, n=3, cutoff=0.5)
            if owners:
                hint = f"it is an option of {', '.join(owners)}, not of {name}"
            else:
                hint = f"did you mean {' or '.join(close)}?" if close else f"sections are: {', '.join(tree)}"
            hints.append(f"  no key {key!r}: {hint}")
        raise ConfigError(
            f"{where} cannot be used:\n" + "\n".join(hints + problems),
            fix=f"correct these; `kubedet recipes --show {config.recipe}` lists all keys and values",
        )
    return changed


def check_frozen(config: Config) -> None:
    """Refuse a new training with frozen random weights."""
    frozen = config.model.freezing()
    if frozen and not config.model.weights:
        now = " and ".join(f"model.{key}={getattr(config.model, key)}" for key in frozen)
        raise ConfigError(
            f"{now} would freeze random weights, because model.weights is not set",
            fix=f"set some, or train all layers: --set {_WEIGHTS}={NO_WEIGHTS}, or --set "
            + " --set ".join(f"model.{key}={value}" for key, value in frozen.items()),
        )


def flat(tree: Mapping[str, Any], prefix: str = "") -> Overrides:
    """Return the values of a tree by dotted keys."""
    values: Overrides = {}
    for name, value in tree.items():
        values |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return values
