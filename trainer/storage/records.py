"""JSON of ours: written with its own hash as the last key, read strictly.

`"file_sha256"` is that of the whole text with 64 zeros in its place, so that a file is checked wherever it is
copied to. What programs before this one wrote has no such key, and is read by its form alone.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.base.errors import DamagedError, DataError, FormError

_KEY = "file_sha256"
_NOTHING = "0" * 64
# Whatever a flipped bit makes of the key or of the digits is a hash that does not agree, not one that lacks.
_LAST = re.compile(rb'"([^"]{11})":\s*"([^"]{64})"\s*\}\s*$')
_TAIL = 400
_AGAIN = "run the command that writes it again: it is written anew"
_NAMES = {int: "an integer", float: "a number", str: "a text", bool: "true or false", list: "a list"}


@dataclass(frozen=True)
class Form:
    """What a JSON file of ours must be."""

    kind: str = ""
    """Its key `kind`; "" for files that have none."""
    version: int = 0
    """The newest `version` that is known; 0 for files that have none."""
    shape: Any = None
    """A type; [shape] for a list; {"*": shape} for a mapping; {"key": shape, "key?": shape} for an object
    that must have the first and may have the second, and others."""
    remedy: str = _AGAIN
    version_key: str = "version"
    """Where `version` means something else: that key, which files of programs before it lack."""


def encode(obj: Any, indent: int | None = None) -> bytes:
    """Return an object as JSON, with its hash where it is a mapping."""
    if not isinstance(obj, dict):
        return json.dumps(obj, ensure_ascii=False, indent=indent).encode()
    rest = {key: value for key, value in obj.items() if key != _KEY}
    data = json.dumps({**rest, _KEY: _NOTHING}, ensure_ascii=False, indent=indent).encode()
    at = data.rindex(_NOTHING.encode())
    return data[:at] + hashlib.sha256(data).hexdigest().encode() + data[at + 64 :]


def is_sealed(data: bytes) -> bool:
    """Tell whether a text ends with a hash, as those do that `encode` made."""
    return _LAST.search(data, max(0, len(data) - _TAIL)) is not None


def decode(uri: str, data: bytes, form: Form | None = None) -> Any:
    """Return the content of a JSON file, without its hash.

    Args:
        uri: names it.
        data: its bytes.
        form: what it must be; None for anything.

    Raises:
        DamagedError: it is no JSON, or its hash says that it has changed.
        DataError: it is of a newer version; FormError: of another kind or shape.
    """
    remedy = form.remedy if form else _AGAIN
    sealed = _LAST.search(data, max(0, len(data) - _TAIL))
    if sealed:
        digest = hashlib.sha256(data[: sealed.start(2)])
        digest.update(_NOTHING.encode())
        digest.update(data[sealed.end(2) :])
        actual = digest.hexdigest()
        if sealed[1] != _KEY.encode() or sealed[2] != actual.encode():
            expected = sealed[2].decode("ascii", "replace")
            raise DamagedError(f"{uri} is damaged: its sha256 is {actual}, not {expected}", fix=remedy)
    try:
        obj = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{uri} is not JSON: {error}", fix=remedy) from error
    if sealed and isinstance(obj, dict):
        del obj[_KEY]
    return checked(uri, obj, form) if form else obj


def checked(uri: str, obj: Any, form: Form) -> Any:
    """Return the content of a file if it is of a form; see `decode`."""
    _check_version(uri, obj, form)
    check_shape(uri, obj, form.shape, form.remedy)
    return obj


def _check_version(uri: str, obj: Any, form: Form) -> None:
    if not isinstance(obj, dict):
        raise FormError(f"{uri}: a JSON object was expected", fix=form.remedy)
    if form.kind and obj.get("kind") != form.kind:
        raise FormError(f"{uri}: its kind is {_short(obj.get('kind'))}, not {form.kind!r}", fix=form.remedy)
    if not form.version:
        return
    key = form.version_key
    version = obj.get(key, 1 if key != "version" else None)
    if type(version) is not int or version < 1:
        raise FormError(f"{uri}: {key} is {_short(version)}, not a number from 1 on", fix=form.remedy)
    if version > form.version:
        raise DataError(
            f"{uri} was written by a newer kubedet: its {key} is {version}, and {form.version} is the "
            "newest that is known here",
            fix="use that kubedet, or another data root",
        )


def check_shape(uri: str, value: Any, shape: Any, remedy: str = _AGAIN, place: str = "") -> None:
    """Compare a value with a shape, see `Form`.

    Raises:
        FormError: naming the file, the key and what is wrong there.
    """
    if isinstance(shape, Mapping):
        if not isinstance(value, dict):
            raise _other(uri, value, "an object", place, remedy)
        for name, part in shape.items():
            key = name.removesuffix("?")
            if name == "*":
                for one, item in value.items():
                    check_shape(uri, item, part, remedy, f"{place}.{one}")
            elif key in value:
                check_shape(uri, value[key], part, remedy, f"{place}.{key}")
            elif key == name:
                fault = f"{uri} lacks {f'{place}.{key}'.removeprefix('.')}"
                raise FormError(fault, fix=remedy)
    elif isinstance(shape, list):
        if not isinstance(value, list):
            raise _other(uri, value, "a list", place, remedy)
        for number, item in enumerate(value):
            check_shape(uri, item, shape[0], remedy, f"{place}[{number}]")
    elif shape is not None and not _is(value, shape):
        raise _other(uri, value, _NAMES.get(shape, shape.__name__), place, remedy)


def _is(value: Any, kind: type) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def _other(uri: str, value: Any, expected: str, place: str, remedy: str) -> FormError:
    where = place.removeprefix(".") or "its content"
    return FormError(f"{uri}: {where} is {_short(value)}, not {expected}", fix=remedy)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
