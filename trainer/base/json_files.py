"""JSON files of kubedet: written with their own hash as the last key, read strictly.

`"file_sha256"` is the hash of the whole text with 64 zeros in its place, so copies can be checked too. Files
of others have no such key.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from trainer.base.errors import DamagedError, DataError, FormError
from trainer.base.typed_json import NAMES, excerpt

if TYPE_CHECKING:
    from pydantic import ConfigDict, ValidationError

Model = TypeVar("Model")

STRICT: "ConfigDict" = {"extra": "forbid", "strict": True}
"""Settings of pydantic's types for the content of files."""

_CHECKSUM_KEY = "file_sha256"
_BLANK_CHECKSUM = "0" * 64
# Also matches a key or hash with a flipped bit, which then differs from the actual one.
_CHECKSUM_PATTERN = re.compile(rb'"([^"]{11})":\s*"([^"]{64})"\s*\}\s*$')
_TAIL_BYTES = 400
_EXCERPT = 60
_WRITE_AGAIN = "run the command that writes it again"


@dataclass(frozen=True)
class Form:
    """What a JSON file of kubedet must contain."""

    kind: str = ""  # the value of `kind`; "" for files without it
    version: int = 0  # the newest `version` that can be read; 0 for files without it
    # A type; [shape] for a list; {"*": shape} for a mapping; {"key": shape, "key?": shape} for an object with
    # a required and an optional key, and any others.
    shape: Any = None
    remedy: str = _WRITE_AGAIN
    version_key: str = "version"  # the key of the version


def encode(obj: Any, indent: int | None = None) -> bytes:
    """Return an object as JSON; a mapping gets its hash."""
    if not isinstance(obj, dict):
        return json.dumps(obj, ensure_ascii=False, indent=indent).encode()
    rest = {key: value for key, value in obj.items() if key != _CHECKSUM_KEY}
    data = json.dumps({**rest, _CHECKSUM_KEY: _BLANK_CHECKSUM}, ensure_ascii=False, indent=indent).encode()
    at = data.rindex(_BLANK_CHECKSUM.encode())
    return data[:at] + hashlib.sha256(data).hexdigest().encode() + data[at + 64 :]


def unseal(uri: str, data: bytes, remedy: str = _WRITE_AGAIN) -> bytes:
    """Return the text of a JSON file without its hash, which is checked; text without a hash as it is."""
    sealed = _CHECKSUM_PATTERN.search(data, max(0, len(data) - _TAIL_BYTES))
    if not sealed:
        return data
    blank = data[: sealed.start(2)] + _BLANK_CHECKSUM.encode() + data[sealed.end(2) :]
    actual = hashlib.sha256(blank).hexdigest()
    if sealed[1] != _CHECKSUM_KEY.encode() or sealed[2] != actual.encode():
        expected = sealed[2].decode("ascii", "replace")
        raise DamagedError(f"{uri} is damaged: its sha256 is {actual}, not {expected}", fix=remedy)
    return data[: sealed.start()].rstrip().removesuffix(b",") + b"}"


def parse(kind: type[Model], uri: str, data: bytes, remedy: str = _WRITE_AGAIN) -> Model:
    """Return the content of a JSON file as a pydantic type, strictly.

    Raises:
        DamagedError: it is not JSON, or its hash differs.
        DataError: it has a newer version; FormError: another form.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind).validate_json(unseal(uri, data, remedy), strict=True)
    except ValidationError as error:
        raise translate_validation(error, uri, remedy) from None


def validate(kind: type[Model], value: Any, where: str, remedy: str) -> Model:
    """Return a value as a pydantic type, as `parse` does; `where` is its title in errors."""
    return parse(kind, where, json.dumps(value, default=repr).encode(), remedy)


def translate_validation(error: "ValidationError", where: str, remedy: str) -> DataError | DamagedError:
    """Return pydantic's error as one that names the file, the key and the remedy."""
    first = error.errors(include_url=False)[0]
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])[1:]
    value = repr(first["input"])
    shown = value if len(value) <= _EXCERPT else f"{value[:_EXCERPT]}..."
    if first["type"] == "json_invalid":
        return DamagedError(f"{where} is not JSON: {first['ctx']['error']}", fix=remedy)
    if key in ("version", "form") and isinstance(first["input"], int):
        fix = "use the kubedet that wrote it, or another data root"
        return DataError(f"{where} was written by another kubedet: its {key} is {shown}", fix=fix)
    if first["type"].startswith("missing"):
        return FormError(f"{where} lacks {key}", fix=remedy)
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return FormError(f"{where}: {key} is unknown to this kubedet", fix=remedy)
    message = first["msg"][:1].lower() + first["msg"][1:]
    return FormError(f"{where}: {key or 'its content'} is {shown}: {message}", fix=remedy)


def decode(uri: str, data: bytes, form: Form | None = None) -> Any:
    """Return the content of a JSON file, without its hash; it must have the form, if there is one.

    Raises:
        DamagedError: it is not JSON, or its hash differs.
        DataError: it has a newer version; FormError: another kind or shape.
    """
    remedy = form.remedy if form else _WRITE_AGAIN
    data = unseal(uri, data, remedy)
    try:
        obj = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{uri} is not JSON: {error}", fix=remedy) from error
    if not form:
        return obj
    if not isinstance(obj, dict):
        raise FormError(f"{uri}: must be a JSON object", fix=remedy)
    if form.kind and obj.get("kind") != form.kind:
        raise FormError(f"{uri}: its kind is {excerpt(obj.get('kind'))}, not {form.kind!r}", fix=remedy)
    if form.version:
        key = form.version_key
        version = obj.get(key)
        if type(version) is not int or version < 1:
            raise FormError(f"{uri}: {key} is {excerpt(version)}, which is not a positive number", fix=remedy)
        if version > form.version:
            message = f"{uri} was written by a newer kubedet: its {key} is {version}"
            fix = f"use the newer kubedet, or another data root; this kubedet supports {form.version}"
            raise DataError(message, fix=fix)
    check_shape(uri, obj, form.shape, remedy)
    return obj


def check_shape(uri: str, value: Any, shape: Any, remedy: str = _WRITE_AGAIN, place: str = "") -> None:
    """Compare a value with a shape, see `Form`."""
    kind = dict if isinstance(shape, Mapping) else list if isinstance(shape, list) else shape
    if kind is None:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = is_number if kind is float else isinstance(value, kind) and (is_number or kind is not int)
    if not fits:
        where, expected = place.removeprefix(".") or "its content", NAMES.get(kind, "an object")
        raise FormError(f"{uri}: {where} is {excerpt(value)}, not {expected}", fix=remedy)
    if isinstance(shape, list):
        for number, item in enumerate(value):
            check_shape(uri, item, shape[0], remedy, f"{place}[{number}]")
    elif isinstance(shape, Mapping):
        for name, part in shape.items():
            key = name.removesuffix("?")
            if name != "*" and key == name and key not in value:
                raise FormError(f"{uri} lacks {f'{place}.{key}'.removeprefix('.')}", fix=remedy)
            for one in value if name == "*" else {key} & value.keys():
                check_shape(uri, value[one], part, remedy, f"{place}.{one}")
