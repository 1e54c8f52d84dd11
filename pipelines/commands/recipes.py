"""`kubedet recipes` explains the named configurations; `kubedet weights` fetches what they start from."""

import argparse
import json
import shutil
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, is_dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args, get_origin

from pydantic.fields import FieldInfo

from pipelines.commands import Commands, columns, option, verb
from pipelines.commands.options import add_published
from trainer.base.errors import ConfigError
from trainer.config import architectures, parsing
from trainer.config.schema import Config, ModelConfig
from trainer.model import recipes

_INDENT = "    "
_MAX_WIDTH = 110

Kinds = Mapping[type, Mapping[str, type]]
"""Subclasses of a section's dataclass, by name."""


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "recipes",
        description="List the named configurations; a run uses one (--recipe) and changes keys (--set).",
    )
    option(parser, "--show NAME", "print one recipe with all its keys, as JSON")
    option(
        parser,
        "--explain TEXT",
        "explain all keys, or those that contain TEXT, e.g. train. or anchor; with "
        "the values of --show NAME, or the defaults",
        None,
        nargs="?",
        const="",
    )
    parser.set_defaults(command=_recipes)


def _recipes(options: argparse.Namespace) -> int:
    if options.explain is not None:
        values = asdict(recipes.load(options.show)) if options.show else None
        names = [values["model"]["architecture"]] if values else list(architectures.ARCHITECTURES)
        kinds: Kinds = {ModelConfig: {name: architectures.options_class(name) for name in names}}
        print(describe(Config, options.explain, values, kinds))
    elif options.show:
        print(parsing.to_json(recipes.load(options.show)), end="")
    else:
        print(columns([(name, (of.__doc__ or "").splitlines()[0]) for name, of in recipes.RECIPES.items()]))
    return 0


def describe(
    kind: type, text: str = "", values: Mapping[str, Any] | None = None, kinds: Kinds | None = None
) -> str:
    """Describe the fields that contain a text, with `values` or defaults; `kinds`: variants of sections."""
    width = min(shutil.get_terminal_size().columns, _MAX_WIDTH)
    paragraphs: list[str] = []
    for item in _fields(kind, kinds or {}):
        annotation, meaning = item.field.annotation, item.meaning
        if text.lower() not in f"{item.name} {meaning} {item.kind}".lower():
            continue
        if values is not None:
            value: Any = values
            for part in item.name.split("."):
                value = value[part]
            shown = _text(value)
        elif item.field.is_required():
            shown = "(required)"
        else:
            shown = _text(item.field.get_default(call_default_factory=True))
        if get_origin(annotation) is Literal and len(get_args(annotation)) > 1:
            meaning += f" One of: {', '.join(str(choice) or '(empty)' for choice in get_args(annotation))}."
        lines = textwrap.wrap(meaning, width, initial_indent=_INDENT, subsequent_indent=_INDENT)
        paragraphs += [f"{item.name} = {shown}" + (f"  ({item.kind})" if item.kind else ""), *lines]
    if not paragraphs:
        raise ConfigError(f"no field contains {text!r}", fix="omit it to see all of them")
    return "\n".join(paragraphs)


class _Field(NamedTuple):
    name: str  # With dots.
    field: FieldInfo
    meaning: str
    kind: str = ""  # The kind of section that alone has it.


def _fields(kind: Any, kinds: Kinds, prefix: str = "") -> Iterator[_Field]:
    """Yield the fields without fields below them; a list's items have * for the number."""
    for name, field in kind.__pydantic_fields__.items():
        inner, many = _dataclass_in(field.annotation)
        if inner is None:
            # Pydantic does not inherit docstrings of fields.
            declared = (getattr(each, "__pydantic_fields__", {}).get(name) for each in kind.__mro__)
            texts = (each.description for each in declared if each and each.description)
            yield _Field(prefix + name, field, " ".join(next(texts, "").split()))
            continue
        below = f"{prefix}{name}.{'*.' if many else ''}"
        variants = kinds.get(inner, {"": inner})
        shared = inner.__pydantic_fields__ if len(variants) > 1 else ()
        if shared:
            yield from _fields(inner, kinds, below)
        for title, variant in variants.items():
            for item in _fields(variant, kinds, below):
                if item.name.removeprefix(below) not in shared:
                    yield item._replace(kind=title) if shared else item


def _dataclass_in(annotation: Any) -> tuple[Any, bool]:
    """Return the dataclass of a field, and whether the field is a list of them."""
    if isinstance(annotation, type) and is_dataclass(annotation):
        return annotation, False
    for part in get_args(annotation):
        inner, many = _dataclass_in(part)
        if inner is not None:
            return inner, many or get_origin(annotation) is tuple
    return None, False


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value or '""'
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else json.dumps(value)


def add_weights(commands: Commands) -> None:
    parser = commands.add_parser(
        "weights",
        description="Fetch published weights into a data root, e.g. for a cluster without internet, or list "
        "them.",
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    fetch = verb(
        verbs,
        "fetch",
        partial(_weights, fetches=True),
        "fetch weights into DATA_ROOT/weights",
        "Fetch weights into DATA_ROOT/weights and check their hashes; damaged files are fetched again. For a "
        "cluster, fetch into a folder and copy its weights/ into the cluster's data root.",
    )
    listing = verb(
        verbs,
        "list",
        partial(_weights, fetches=False),
        "list the weights of recipes",
        "List weights with their size, hash, recipes, and whether DATA_ROOT/weights has them.",
    )
    text = "recipes, or weights: torchvision:NAME, hf:ORG/NAME, https://... (default: those of all recipes)"
    for parser in (fetch, listing):
        parser.add_argument("names", nargs="*", metavar="NAME", help=text)
        add_published(
            parser, "where data is kept: a folder or e.g. s3://bucket/prefix; weights are in weights/"
        )
        option(parser, "-o --output text|json", "default: text", "text")


def _weights(options: argparse.Namespace, *, fetches: bool) -> int:
    """List weights, which are fetched first with `fetches`."""
    from trainer.base import log
    from trainer.weights import weights_mirror

    log.setup()
    items = []
    rows = [("weights", "recipes", "size", "SHA-256", "state")]
    for uri, needed_by in _needed_weights(options.names).items():
        if fetches:
            weights_mirror.obtain(uri, options.data_root)
        mirrored = weights_mirror.look_up(uri, options.data_root)
        files, there, size, digits = [], mirrored.complete, "-", "-"
        if file := mirrored.file:
            size = f"{file.size / 1e6:,.1f} MB" if file.size else "-"
            digits = file.sha256[:8]
            entry = {"name": file.name, "bytes": file.size or None, "sha256": file.sha256, "there": there}
            files.append(entry)
        items.append({"weights": mirrored.uri, "recipes": needed_by, "complete": there, "files": files})
        rows.append((mirrored.uri, ", ".join(needed_by), size, digits, "there" if there else "missing"))
    if options.output == "json":
        print(json.dumps(items, indent=2))
    elif items:
        print(f"{weights_mirror.mirror_of(options.data_root)}\n\n{columns(rows, right={2})}")
    else:
        print("these recipes start from random weights")
    return 0


def _needed_weights(names: list[str]) -> dict[str, list[str]]:
    from trainer.weights.weights_mirror import is_published

    needed: dict[str, list[str]] = {}
    for recipe in recipes.RECIPES:
        uri = recipes.load(recipe).model.weights
        if uri and (not names or recipe in names or uri in names):
            needed.setdefault(uri, []).append(recipe)
    for name in names:
        if is_published(name):
            needed.setdefault(name, [])
        elif name not in recipes.RECIPES:
            raise ConfigError(
                f"{name!r} is neither a recipe nor the name of published weights",
                fix=f"use one of {', '.join(recipes.RECIPES)}, torchvision:NAME, hf:ORG/NAME or https://...",
            )
    return needed
