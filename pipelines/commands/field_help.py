"""What the fields of a configuration mean: their names with dots, values, choices and the line below each."""

import json
import shutil
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from trainer.errors import ConfigError

_INDENT = "    "
_WIDEST = 110


def describe(kind: type, text: str = "", values: Mapping[str, Any] | None = None) -> str:
    """Describe the fields of a tree of dataclasses, one paragraph each.

    Args:
        kind: a dataclass of pydantic's whose fields have docstrings.
        text: describes only fields whose name, with dots, or meaning holds it.
        values: a tree of values to show; without it, each field's default.

    Raises:
        ConfigError: no field holds the text.
    """
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    paragraphs = [
        _paragraph(name, field, _value(name, field, values), width)
        for name, field in _fields(kind)
        if text.lower() in f"{name} {_meaning(field)}".lower()
    ]
    if not paragraphs:
        raise ConfigError(f"no field holds {text!r}", fix="leave it out to see all of them")
    return "\n".join(paragraphs)


def _fields(kind: Any, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield the fields below which there are no others; of a list's items with * for the number."""
    for name, field in kind.__pydantic_fields__.items():
        inner, many = _dataclass_in(field.annotation)
        if inner is None:
            yield prefix + name, field
        else:
            yield from _fields(inner, f"{prefix}{name}.{'*.' if many else ''}")


def _dataclass_in(annotation: Any) -> tuple[Any, bool]:
    """Return the dataclass that a field holds, and whether it holds any number of them."""
    if isinstance(annotation, type) and is_dataclass(annotation):
        return annotation, False
    for part in get_args(annotation):
        inner, many = _dataclass_in(part)
        if inner is not None:
            return inner, many or get_origin(annotation) is tuple
    return None, False


def _value(name: str, field: FieldInfo, values: Mapping[str, Any] | None) -> str:
    if values is None:
        required = field.is_required()
        return "(required)" if required else _text(field.get_default(call_default_factory=True))
    node: Any = values
    for part in name.split("."):
        node = node[part]
    return _text(node)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value or '""'
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else json.dumps(value)


def _meaning(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


def _paragraph(name: str, field: FieldInfo, value: str, width: int) -> str:
    meaning = _meaning(field)
    if get_origin(field.annotation) is Literal:
        meaning += f" One of: {', '.join(str(choice) or '(empty)' for choice in get_args(field.annotation))}."
    lines = textwrap.wrap(meaning, width, initial_indent=_INDENT, subsequent_indent=_INDENT)
    return "\n".join([f"{name} = {value}", *lines])
