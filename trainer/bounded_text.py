"""JSON and YAML that people hand in, read within bounds.

Brackets without end, or a few lines that stand for billions of values, end in an error and not the memory.
"""

import json
from typing import Any

DEEPEST = 100
"""Lists and mappings within each other."""

MOST_VALUES = 100_000
"""Values of a text, those counted again that it repeats by a name (YAML's aliases)."""


_DIGITS = 18
"""More than which no count of ours has; Python raises an error at thousands."""


class Unbounded(ValueError):
    """A text that is nested too deeply, stands for too many values, or is too long."""


def whole_number(text: str) -> int | None:
    """Return the number that decimal digits stand for; None for other texts, and for more than 18 digits."""
    return int(text) if text.isdecimal() and len(text) <= _DIGITS else None


def json_value(text: str | bytes) -> Any:
    """Read JSON.

    Raises:
        Unbounded: it is nested too deeply or holds too many values.
        ValueError: it is no JSON.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    _check(value)
    return value


def yaml_value(text: str | bytes, loader: Any, longest: int) -> Any:
    """Read YAML.

    Args:
        text: what is read.
        loader: a class of loaders of PyYAML that makes plain values alone.
        longest: characters or bytes that it may have: to read a hundred thousand may take a second.

    Raises:
        Unbounded: it is too long, nested too deeply or holds too many values; or a value holds itself.
        ValueError: a value cannot be: a number of thousands of digits, a 13th month.
        yaml.YAMLError: it is no YAML.
    """
    import yaml

    if len(text) > longest:
        raise Unbounded(f"it is longer than {longest} characters")
    try:
        value = yaml.load(text, loader)  # noqa: S506 (the caller's)
    except RecursionError:
        raise _too_deep() from None
    except (TypeError, AttributeError, KeyError, IndexError, OverflowError) as error:
        raise ValueError(f"a value cannot be read ({error})") from None  # PyYAML's, at tags that do not fit
    _check(value)
    return value


def _check(value: Any) -> None:
    pending, count = [(value, 0)], 0
    while pending:
        node, depth = pending.pop()
        count += 1
        if count > MOST_VALUES:
            raise Unbounded(f"it stands for more than {MOST_VALUES} values")
        if depth > DEEPEST:
            raise _too_deep()
        if isinstance(node, dict):
            pending += [(part, depth + 1) for part in node.values()]
        elif isinstance(node, list | tuple | set):
            pending += [(part, depth + 1) for part in node]


def _too_deep() -> Unbounded:
    return Unbounded(f"it is nested more than {DEEPEST} deep")
