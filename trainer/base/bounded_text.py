"""JSON and YAML that people hand in, read within bounds.

Brackets without end, or a few lines that stand for billions of values, end in an error and not the memory.
"""

import json
from collections.abc import Hashable
from functools import cache
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


def yaml_value(text: str | bytes, longest: int, *, plain_text: bool = False) -> Any:
    """Read YAML strictly: only values that JSON has, and no key twice in a mapping.

    Dates stay the text that they are. Files of people are read by this function alone: PyYAML itself makes
    dates, bytes and sets of them, keeps the last of two keys, and raises errors of many kinds.

    Args:
        text: what is read.
        longest: characters or bytes that it may have: to read a hundred thousand may take a second.
        plain_text: whether numbers, `true` and `null` stay text too.

    Raises:
        Unbounded: it is too long, nested too deeply or holds too many values; or a value holds itself.
        ValueError: it is no YAML, or holds what JSON has not; the place is that of `<unicode string>` or
            `<byte string>`.
    """
    import yaml

    if len(text) > longest:
        raise Unbounded(f"it is longer than {longest} characters")
    try:
        value = yaml.load(text, _loader(plain_text))  # noqa: S506 (it makes plain values alone)
    except RecursionError:
        raise _too_deep() from None
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    except (TypeError, AttributeError, LookupError, OverflowError) as error:
        raise ValueError(f"a value cannot be read ({error})") from None  # PyYAML's, at tags that do not fit
    _check(value)
    _check_kinds(value)
    return value


@cache
def _loader(plain_text: bool) -> Any:
    import yaml

    base = yaml.BaseLoader if plain_text else yaml.SafeLoader

    class Loader(base):  # type: ignore[misc, valid-type]
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
            keys = [
                None if key.tag == "tag:yaml.org,2002:merge" else self.construct_object(key)
                for key, _ in getattr(node, "value", [])
            ]
            for index, key in enumerate(keys):
                if key is not None and key in keys[:index]:
                    mark = node.value[index][0].start_mark
                    raise yaml.constructor.ConstructorError(None, None, f"{key!r} occurs twice", mark)
            return dict(super().construct_mapping(node, deep))

    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in pairs if tag != "tag:yaml.org,2002:timestamp"]
        for first, pairs in base.yaml_implicit_resolvers.items()
    }
    return Loader


def _check_kinds(value: Any) -> None:
    """Refuse what JSON has not: dates, bytes, sets, and keys that are no texts."""
    if isinstance(value, dict):
        for key, part in value.items():
            if not isinstance(key, str):
                raise ValueError(f"the key {str(key)[:40]} is not text: put it in quotes")
            _check_kinds(part)
    elif isinstance(value, list):
        for part in value:
            _check_kinds(part)
    elif not isinstance(value, str | int | float | None):
        raise ValueError(f"{str(value)[:40]} is no text, number, true, false, null, list or mapping")


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
