"""Loads JSON strictly as dataclasses."""

from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from trainer.base.errors import FormError

T = TypeVar("T")
NAMES = {int: "an integer", float: "a number", str: "a text", bool: "true or false", list: "a list"}
_EXCERPT = 60


def load(kind: type[T], value: Any, where: str, remedy: str) -> T:
    """Return a JSON value as a type: a dataclass, list, dict, union or plain type, nested in any way.

    Fields without a default are required; unknown ones are errors. 100.0 is accepted for an integer, because
    Kubeflow turns integers into floats. `where` is the title of the file or parameter for errors, `remedy`
    their fix.
    """

    def error(fault: str) -> FormError:
        return FormError(f"{where}{fault}", fix=remedy)

    def part(kind: Any, value: Any, place: str) -> Any:
        if get_origin(kind) is UnionType:
            options = [one for one in get_args(kind) if _is_plain(one, value)]
            kind = options[0] if options else get_args(kind)[0]
        origin, arguments = get_origin(kind), get_args(kind)
        if is_dataclass(kind) and isinstance(value, dict):
            types = _field_types(kind)  # type: ignore[arg-type]
            for field in fields(kind):
                if field.name not in value and field.default is field.default_factory is MISSING:
                    raise error(f" lacks {_shown(f'{place}.{field.name}')}")
            if unknown := value.keys() - types.keys():
                raise error(f": {_shown(f'{place}.{min(unknown)}')} is unknown to this kubedet")
            loaded = {name: part(types[name], item, f"{place}.{name}") for name, item in value.items()}
            return kind(**loaded)  # type: ignore[operator]
        if origin is dict and isinstance(value, dict):
            return {key: part(arguments[1], item, f"{place}.{key}") for key, item in value.items()}
        if origin is list and isinstance(value, list):
            return [part(arguments[0], item, f"{place}[{n}]") for n, item in enumerate(value)]
        if kind is int and isinstance(value, float) and value.is_integer():
            return int(value)
        if not _is_plain(kind, value):
            raise error(
                f": {_shown(place)} is {excerpt(value)}, not {NAMES.get(origin or kind, 'an object')}"
            )
        return value

    whole: T = part(kind, value, "")
    return whole


def excerpt(value: Any) -> str:
    """Return the beginning of a value's representation."""
    text = repr(value)
    return text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}..."


@cache
def _field_types(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _shown(place: str) -> str:
    return place.removeprefix(".") or "its content"


def _is_plain(kind: Any, value: Any) -> bool:
    """Return whether a value has a plain type; true is not a number."""
    if kind is Any or (kind is type(None) and value is None):
        return True
    if isinstance(value, bool):
        return kind is bool
    return isinstance(kind, type) and isinstance(value, (int, float) if kind is float else kind)
