"""Reads and writes kubedet's JSON files, whose last key is the hash of the file.

`"file_sha256"` is the hash of the whole text with 64 zeros in place of the hash, so a copy of the file can be
checked too. Files of other programs do not have this key.
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
"""Pydantic configuration of the types of files: no unknown keys and no conversions."""

_CHECKSUM_KEY = "file_sha256"
_BLANK_CHECKSUM = "0" * 64
# Also matches a key or hash with a flipped bit, so that this is reported as damage.
_CHECKSUM_PATTERN = re.compile(rb'"([^"]{11})":\s*"([^"]{64})"\s*\}\s*$')
_TAIL_BYTES = 400
_EXCERPT = 60
_WRITE_AGAIN = "run the command that writes it again"


def encode(obj: Any, indent: int | None = None) -> bytes:
    """Encode an object as JSON; a mapping gets its hash as the last key."""
    if not isinstance(obj, dict):
        return json.dumps(obj, ensure_ascii=False, indent=indent).encode()
    rest = {key: value for key, value in obj.items() if key != _CHECKSUM_KEY}
    data = json.dumps({**rest, _CHECKSUM_KEY: _BLANK_CHECKSUM}, ensure_ascii=False, indent=indent).encode()
    at = data.rindex(_BLANK_CHECKSUM.encode())
    return data[:at] + hashlib.sha256(data).hexdigest().encode() + data[at + 64 :]


def verify_and_strip_hash(uri: str, data: bytes, remedy: str = _WRITE_AGAIN) -> bytes:
    """Check the hash of a JSON file and return the text without it; text without a hash is unchanged."""
    match = _CHECKSUM_PATTERN.search(data, max(0, len(data) - _TAIL_BYTES))
    if not match:
        return data
    blank = data[: match.start(2)] + _BLANK_CHECKSUM.encode() + data[match.end(2) :]
    actual = hashlib.sha256(blank).hexdigest()
    if match[1] != _CHECKSUM_KEY.encode() or match[2] != actual.encode():
        expected = match[2].decode("ascii", "replace")
        raise DamagedError(f"{uri} is damaged: its sha256 is {actual}, not {expected}", fix=remedy)
    return data[: match.start()].rstrip().removesuffix(b",") + b"}"


def parse(kind: type[Model], uri: str, data: bytes, remedy: str = _WRITE_AGAIN) -> Model:
    """Parse a JSON file strictly as a pydantic type.

    Raises:
        DamagedError: it is not JSON, or its hash differs.
        DataError: it has a different version; FormatError: its content does not match the type.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind).validate_json(verify_and_strip_hash(uri, data, remedy), strict=True)
    except ValidationError as error:
        raise translate_validation(error, uri, remedy) from None


def validate(kind: type[Model], value: Any, where: str, remedy: str) -> Model:
    """Validate a value as `parse` does; `where` names it in errors."""
    return parse(kind, where, json.dumps(value, default=repr).encode(), remedy)


def translate_validation(error: "ValidationError", where: str, remedy: str) -> DataError | DamagedError:
    """Convert pydantic's error to one that names the file, the key and the remedy."""
    errors = error.errors(include_url=False)
    # A file of another version has other invalid keys too.
    first = next((item for item in errors if item["loc"] in (("version",), ("form",))), errors[0])
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])[1:]
    value = repr(first["input"])
    shown = value if len(value) <= _EXCERPT else f"{value[:_EXCERPT]}..."
    if first["type"] == "json_invalid":
        return DamagedError(f"{where} is not JSON: {first['ctx']['error']}", fix=remedy)
    if first["type"] == "literal_error" and key in ("version", "form") and isinstance(first["input"], int):
        fix = "use the version of kubedet that wrote it, or another data root"
        return DataError(f"{where} was written by another version of kubedet: its {key} is {shown}", fix=fix)
    if first["type"].startswith("missing"):
        return FormatError(f"{where} lacks {key}", fix=remedy)
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return FormatError(f"{where}: {key} is unknown to this version of kubedet", fix=remedy)
    message = first["msg"][:1].lower() + first["msg"][1:]
    return FormatError(f"{where}: {key or 'its content'} is {shown}: {message}", fix=remedy)


def decode(uri: str, data: bytes) -> Any:
    """Parse a JSON file without a type, and drop its hash; raise DamagedError as `parse` does."""
    try:
        return json.loads(verify_and_strip_hash(uri, data))
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{uri} is not JSON: {error}", fix=_WRITE_AGAIN) from error
