"""Describes the fields of configurations and jobs, with their defaults, for users."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any, Literal, get_args, get_origin

from trainer.base.errors import ConfigError

Variants = Mapping[type, Mapping[str, type]]
"""Subclasses of a section's dataclass, by name."""


@dataclass(frozen=True)
class Explanation:
    """A field and its meaning."""

    name: str  # Dotted key; * is the index of an item in a list.
    value: str  # The default, or the value in a configuration, as text.
    meaning: str
    variant: str = ""  # The variant of the section that has the field; empty if all have it.


def explain(
    kind: type, text: str = "", values: Mapping[str, Any] | None = None, variants: Variants | None = None
) -> list[Explanation]:
    """Explain the fields of a pydantic dataclass that mention `text`, with `values` or the defaults."""
    items = _explanations(kind, variants or {}, values)
    found = [item for item in items if text.lower() in f"{item.name} {item.meaning} {item.variant}".lower()]
    if not found:
        raise ConfigError(f"no field contains {text!r}", fix="omit the text to see all fields")
    return found


def _explanations(
    kind: Any, variants: Variants, values: Mapping[str, Any] | None, prefix: str = ""
) -> Iterator[Explanation]:
    for name, field in kind.__pydantic_fields__.items():
        inner, many = _dataclass_in(field.annotation)
        if inner is None:
            yield Explanation(prefix + name, _value_text(field, values, name), _meaning(kind, name, field))
            continue
        below = f"{prefix}{name}.{'*.' if many else ''}"
        values_below = values[name] if values is not None else None
        subclasses = variants.get(inner, {"": inner})
        shared = inner.__pydantic_fields__ if len(subclasses) > 1 else ()
        if shared:
            yield from _explanations(inner, variants, values_below, below)
        for title, subclass in subclasses.items():
            for item in _explanations(subclass, variants, values_below, below):
                if item.name.removeprefix(below) not in shared:
                    variant = title if shared else item.variant
                    yield Explanation(item.name, item.value, item.meaning, variant)


def _value_text(field: Any, values: Mapping[str, Any] | None, name: str) -> str:
    if values is not None:
        return _format_value(values[name])
    if field.is_required():
        return "(required)"
    return _format_value(field.get_default(call_default_factory=True))


def _meaning(kind: Any, name: str, field: Any) -> str:
    # Pydantic does not inherit docstrings of fields.
    declared = (getattr(base, "__pydantic_fields__", {}).get(name) for base in kind.__mro__)
    texts = (item.description for item in declared if item and item.description)
    meaning = " ".join(next(texts, "").split())
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    if len(choices) > 1:
        meaning += f" One of: {', '.join(str(choice) or '(empty)' for choice in choices)}."
    return meaning


def _dataclass_in(annotation: Any) -> tuple[Any, bool]:
    """Return the dataclass of a field, and whether the field is a list of them."""
    if isinstance(annotation, type) and is_dataclass(annotation):
        return annotation, False
    for part in get_args(annotation):
        inner, many = _dataclass_in(part)
        if inner is not None:
            return inner, many or get_origin(annotation) is tuple
    return None, False


def _format_value(value: Any) -> str:
    if isinstance(value, str):
        return value or '""'
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_format_value, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else json.dumps(value)
