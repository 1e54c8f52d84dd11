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

    name: str  # With dots; * is the number of an item in a list.
    value: str  # The default, or the value in a configuration, as text.
    meaning: str
    variant: str = ""  # The only variant of the section that has the field.


def explain(
    kind: type, text: str = "", values: Mapping[str, Any] | None = None, variants: Variants | None = None
) -> list[Explanation]:
    """Explain the fields of a pydantic dataclass that contain a text, with `values` or defaults."""
    items = _explanations(kind, variants or {}, values)
    found = [item for item in items if text.lower() in f"{item.name} {item.meaning} {item.variant}".lower()]
    if not found:
        raise ConfigError(f"no field contains {text!r}", fix="omit it to see all of them")
    return found


def _explanations(
    kind: Any, variants: Variants, values: Mapping[str, Any] | None, prefix: str = ""
) -> Iterator[Explanation]:
    for name, field in kind.__pydantic_fields__.items():
        inner, many = _dataclass_in(field.annotation)
        if inner is None:
            yield Explanation(prefix + name, _value(field, values, name), _meaning(kind, name, field))
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


def _value(field: Any, values: Mapping[str, Any] | None, name: str) -> str:
    if values is not None:
        return _text(values[name])
    if field.is_required():
        return "(required)"
    return _text(field.get_default(call_default_factory=True))


def _meaning(kind: Any, name: str, field: Any) -> str:
    # Pydantic does not inherit docstrings of fields.
    declared = (getattr(each, "__pydantic_fields__", {}).get(name) for each in kind.__mro__)
    texts = (each.description for each in declared if each and each.description)
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


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value or '""'
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else json.dumps(value)
