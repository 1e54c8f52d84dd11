"""What the headers of an answer say of a file: its size, its mark, its hash."""

import base64
import re
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Protocol

_SHA256 = re.compile(r"[0-9a-f]{64}")
_MD5 = re.compile(r"[0-9a-f]{32}")
_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")
_GOOGLE = re.compile(r"md5=([A-Za-z0-9+/]{22}==)")
_KEYS = ("x-amz-server-side-encryption-customer-algorithm", "x-amz-server-side-encryption-aws-kms-key-id")


class Response(Protocol):
    """An answer whose body is not read yet: urllib3's, or one of `quick`."""

    headers: Any
    """A mapping; names in lower case find their value."""

    def read1(self, amt: int = -1, decode_content: bool | None = None) -> bytes:
        """Return what has arrived, b"" at the end; raises HTTPError of urllib3."""

    def shutdown(self) -> None:
        """Let a thread that reads from it end now."""

    def close(self) -> None:
        """Close its connection, unless all was read."""

    def release_conn(self) -> None:
        """Give its connection back."""


@dataclass(frozen=True, slots=True)
class Head:
    """What an answer says of the whole file."""

    size: int | None
    """Bytes; None where the server does not tell."""
    start: int
    """The place of the answer's first byte."""
    etag: str
    ranges: bool
    """The server answered with the range it was asked for."""
    algorithm: str
    digest: str
    """Hash of the whole content: "sha256" or "md5" and its hexadecimal digits, or "" and ""."""


def head_of(response: Response) -> Head:
    """Return what an answer's headers say of the whole file."""
    headers = response.headers
    etag = headers.get("etag", "")
    bare = etag.strip('"')
    told = headers.get("content-range")
    found = _RANGE.match(told) if told else None
    length = headers.get("content-length")
    start, size = 0, int(length) if length and length.isdecimal() else None
    if found:
        start, size = int(found.group(1)), None if found.group(2) == "*" else int(found.group(2))
    algorithm, digest = _hash_of(headers, bare)
    return Head(size, start, etag if bare else "", found is not None, algorithm, digest)


def _hash_of(headers: Any, etag: str) -> tuple[str, str]:
    """Return the hash that a store tells: ours, Google's, or an ETag of S3 that is one."""
    ours = headers.get("x-amz-meta-sha256", "")
    if _SHA256.fullmatch(ours):
        return "sha256", ours
    google = _GOOGLE.search(headers.get("x-goog-hash", ""))
    if google and not headers.get("content-encoding"):
        return "md5", base64.b64decode(google.group(1)).hex()
    if headers.get("x-amz-request-id") and _MD5.fullmatch(etag) and not encrypted(headers):
        return "md5", etag
    return "", ""


def encrypted(headers: Any) -> bool:
    """Tell whether a store encrypts an object with keys that make its ETag something else than a hash."""
    return headers.get("x-amz-server-side-encryption", "AES256") != "AES256" or any(
        headers.get(name) for name in _KEYS
    )


def modified(headers: Any) -> float | None:
    """Return when the file was changed, in seconds since 1970, or None where the server does not tell."""
    try:
        return parsedate_to_datetime(headers["Last-Modified"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return None
