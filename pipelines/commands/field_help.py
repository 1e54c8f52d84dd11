"""What the fields of a configuration mean: their names with dots, values, choices and the line below each."""

import json
import shutil
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any, Literal, NamedTuple, get_args, get_origin

from pydantic.fields import FieldInfo

from trainer.base.errors import ConfigError

_INDENT = "    "
_WIDEST = 110


Kinds = Mapping[type, Mapping[str, type]]
"""Subclasses that stand where a dataclass is declared, by names that are told with fields of their own."""


def describe(
    kind: type, text: str = "", values: Mapping[str, Any] | None = None, kinds: Kinds | None = None
) -> str:
    """Describe the fields of a tree of dataclasses, one paragraph each.

    Args:
        kind: a dataclass of pydantic's whose fields have docstrings.
        text: describes only fields whose name, with dots, or meaning holds it.
        values: a tree of values to show; without it, each field's default.
        kinds: of a section that has several kinds.

    Raises:
        ConfigError: no field holds the text.
    """
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    paragraphs = [
        _paragraph(item, _value(item, values), width)
        for item in _fields(kind, kinds or {})
        if text.lower() in f"{item.name} {item.meaning} {item.kind}".lower()
    ]
    if not paragraphs:
        raise ConfigError(f"no field holds {text!r}", fix="leave it out to see all of them")
    return "\n".join(paragraphs)


class _Field(NamedTuple):
    name: str
    """With dots."""
    field: FieldInfo
    meaning: str
    kind: str = ""
    """The kind of section that alone has it."""


def _fields(kind: Any, kinds: Kinds, prefix: str = "") -> Iterator[_Field]:
    """Yield the fields below which there are no others; of a list's items with * for the number."""
    for name, field in kind.__pydantic_fields__.items():
        inner, many = _dataclass_in(field.annotation)
        if inner is None:
            yield _Field(prefix + name, field, _meaning(kind, name))
            continue
        below = f"{prefix}{name}.{'*.' if many else ''}"
        if inner not in kinds:
            yield from _fields(inner, kinds, below)
            continue
        variants = kinds[inner]
        if len(variants) > 1:
            yield from _fields(inner, kinds, below)
        for title, variant in variants.items():
            shared = inner.__pydantic_fields__ if len(variants) > 1 else ()
            for item in _fields(variant, kinds, below):
                if item.name.removeprefix(below) not in shared:
                    yield item._replace(kind=title if len(variants) > 1 else "")


def _dataclass_in(annotation: Any) -> tuple[Any, bool]:
    """Return the dataclass that a field holds, and whether it holds any number of them."""
    if isinstance(annotation, type) and is_dataclass(annotation):
        return annotation, False
    for part in get_args(annotation):
        inner, many = _dataclass_in(part)
        if inner is not None:
            return inner, many or get_origin(annotation) is tuple
    return None, False


def _value(item: _Field, values: Mapping[str, Any] | None) -> str:
    if values is None:
        required = item.field.is_required()
        return "(required)" if required else _text(item.field.get_default(call_default_factory=True))
    node: Any = values
    for part in item.name.split("."):
        node = node[part]
    return _text(node)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value or '""'
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else json.dumps(value)


def _meaning(kind: Any, name: str) -> str:
    """The line below a field, in the class that declares it: pydantic gives subclasses none of it."""
    declared = (getattr(each, "__pydantic_fields__", {}).get(name) for each in kind.__mro__)
    texts = (field.description for field in declared if field and field.description)
    return " ".join(next(texts, "").split())


def _paragraph(item: _Field, value: str, width: int) -> str:
    meaning, annotation = item.meaning, item.field.annotation
    if get_origin(annotation) is Literal and len(get_args(annotation)) > 1:
        meaning += f" One of: {', '.join(str(choice) or '(empty)' for choice in get_args(annotation))}."
    lines = textwrap.wrap(meaning, width, initial_indent=_INDENT, subsequent_indent=_INDENT)
    return "\n".join([f"{item.name} = {value}" + (f"  ({item.kind})" if item.kind else ""), *lines])
