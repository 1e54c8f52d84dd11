"""kubedet's JSON files: written with their own hash as the last key, and read strictly.

`"file_sha256"` is the hash of the whole text with 64 zeros in its place, so copies can be checked too. Files
of other programs have no such key.
"""

import hashlib
import json
import re
from typing import TYPE_CHECKING, Any, TypeVar

from trainer.base.errors import DamagedError, DataError, FormatError

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


def encode(obj: Any, indent: int | None = None) -> bytes:
    """Return an object as JSON; a mapping gets its hash."""
    if not isinstance(obj, dict):
        return json.dumps(obj, ensure_ascii=False, indent=indent).encode()
    rest = {key: value for key, value in obj.items() if key != _CHECKSUM_KEY}
    data = json.dumps({**rest, _CHECKSUM_KEY: _BLANK_CHECKSUM}, ensure_ascii=False, indent=indent).encode()
    at = data.rindex(_BLANK_CHECKSUM.encode())
    return data[:at] + hashlib.sha256(data).hexdigest().encode() + data[at + 64 :]


def unseal(uri: str, data: bytes, remedy: str = _WRITE_AGAIN) -> bytes:
    """Check the hash of a JSON file and return the text without it; text without a hash is unchanged."""
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
    """Parse a JSON file strictly as a pydantic type.

    Raises:
        DamagedError: it is not JSON, or its hash differs.
        DataError: it has a different version; FormatError: its content does not match the type.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind).validate_json(unseal(uri, data, remedy), strict=True)
    except ValidationError as error:
        raise translate_validation(error, uri, remedy) from None


def validate(kind: type[Model], value: Any, where: str, remedy: str) -> Model:
    """Validate a value as `parse` does; errors call it `where`."""
    return parse(kind, where, json.dumps(value, default=repr).encode(), remedy)


def translate_validation(error: "ValidationError", where: str, remedy: str) -> DataError | DamagedError:
    """Convert pydantic's error to one that names the file, the key and the remedy."""
    errors = error.errors(include_url=False)
    # A file of another version differs in other keys, too.
    first = next((item for item in errors if item["loc"] in (("version",), ("form",))), errors[0])
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])[1:]
    value = repr(first["input"])
    shown = value if len(value) <= _EXCERPT else f"{value[:_EXCERPT]}..."
    if first["type"] == "json_invalid":
        return DamagedError(f"{where} is not JSON: {first['ctx']['error']}", fix=remedy)
    if first["type"] == "literal_error" and key in ("version", "form") and isinstance(first["input"], int):
        fix = "use the kubedet that wrote it, or another data root"
        return DataError(f"{where} was written by another kubedet: its {key} is {shown}", fix=fix)
    if first["type"].startswith("missing"):
        return FormatError(f"{where} lacks {key}", fix=remedy)
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return FormatError(f"{where}: {key} is unknown to this kubedet", fix=remedy)
    message = first["msg"][:1].lower() + first["msg"][1:]
    return FormatError(f"{where}: {key or 'its content'} is {shown}: {message}", fix=remedy)


def decode(uri: str, data: bytes) -> Any:
    """Return the content of a JSON file, without its hash; raise DamagedError as `parse` does."""
    try:
        return json.loads(unseal(uri, data))
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{uri} is not JSON: {error}", fix=_WRITE_AGAIN) from error
