"""Names of files: URIs, how they are joined, and what is known of the file behind one."""

import os
import re
from contextlib import suppress
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from trainer.base.errors import MissingError, StorageError, refuse_userinfo

CLOUDS = ("gs", "az")
"""Object stores that are no S3."""
OBJECT_STORES = ("s3", "minio", *CLOUDS)
WEB = ("http", "https")

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*):")
_AUTHORITY = re.compile(r"https?://([^/?#]*)", re.IGNORECASE)
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:]+)(?::([0-9]*))?")
_LABEL = re.compile(r"[A-Za-z0-9_-]{1,63}")
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")
_PORTS = {"http": 80, "https": 443}
_ENDS = "and begins and ends with a letter or digit"
_AMAZONS = r"(?!.*(\.\.|\.-|-\.))(?!.*(-s3alias|--ol-s3)$)"
_LAX = (
    re.compile(f"{_AMAZONS}[A-Za-z0-9][A-Za-z0-9._:-]+[A-Za-z0-9]"),
    f"a name has 3 to 63 of a-z 0-9 . - {_ENDS}",
)
_BUCKETS = {
    "amazon": (
        re.compile(f"(?!xn--){_AMAZONS}[a-z0-9][a-z0-9.-]+[a-z0-9]"),
        f"{_LAX[1]}; for another store than Amazon's set AWS_ENDPOINT_URL",
    ),
    "s3": _LAX,
    "minio": _LAX,
    "gs": (
        re.compile(r"(?=[^.]{1,63}(\.[^.]{1,63})*$)[a-z0-9][a-z0-9._-]+[a-z0-9]"),
        f"a name has 3 to 63 of a-z 0-9 . _ - {_ENDS}",
    ),
    "az": (re.compile(r"[a-z0-9]+(-[a-z0-9]+)*|\$root|\$web"), f"a name has 3 to 63 of a-z 0-9 - {_ENDS}"),
}
"""What names of buckets are like, and what to do about others. Amazon's rules:
https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html; Google's:
https://cloud.google.com/storage/docs/buckets#naming; Azure's:
https://learn.microsoft.com/rest/api/storageservices/naming-and-referencing-containers--blobs--and-metadata"""


class InvalidAddress(MissingError):
    """An address of the web that no server can have: asking again gives the same answer."""


class FileState(NamedTuple):
    """What is known of a file without reading it."""

    size: int
    """Bytes."""
    modified: float | None
    """Seconds since 1970; None where a server does not tell. A listing may be finer than a single answer."""
    etag: str
    """The store's mark of this content; of a local file, its time of change in nanoseconds."""

    @property
    def version(self) -> str:
        """Changes when the content does: the mark, or the time where there is none."""
        return self.etag or ("" if self.modified is None else str(self.modified))


def scheme(uri: str) -> str:
    """Return the URI's scheme in lower case; "" for a plain path, "file" for file: URIs."""
    match = _SCHEME.match(uri)
    return match.group(1).lower() if match else ""


def host_and_port(uri: str) -> tuple[str, int]:
    """Return the host of an address of the web, in lower case and without brackets, and its port.

    Clients disagree about odd hosts such as `0177.0.0.1`, so only what all read alike is accepted: names of
    letters, digits, `-` and `_` (others as in IDNA), IPv4 as four decimal numbers, and IPv6 in brackets
    (RFC 3986, section 3.2.2; RFC 1035, section 2.3.4; https://url.spec.whatwg.org/#host-parsing).

    Raises:
        InvalidAddress: it is none.
    """
    authority = _AUTHORITY.match(uri)
    named = authority[1].rpartition("@")[2] if authority else ""
    try:
        return _host_and_port(named, _PORTS.get(scheme(uri), 0))
    except ValueError as error:  # UnicodeError is one.
        raise invalid_address(uri, str(error)) from None


@lru_cache(maxsize=1024)
def _host_and_port(named: str, default_port: int) -> tuple[str, int]:
    match = _HOST.fullmatch(named)
    if match is None:
        raise ValueError("it names no host" if not named else f"{named!r} is no host and port")
    host, port = match[1].lower(), int(match[2][:6] if match[2] else default_port)
    if not 0 < port < 2**16:
        raise ValueError(f"there is no port {match[2]}")
    if host.startswith("["):
        return str(IPv6Address(host[1:-1])), port
    labels = host.encode("idna").decode("ascii").removesuffix(".").split(".")
    ".".join(labels).encode("ascii").decode("idna")
    if not all(map(_LABEL.fullmatch, labels)) or len(".".join(labels)) > 253:
        raise ValueError(f"no host can be named {host!r}")
    if _NUMBER.fullmatch(labels[-1]) and not _is_address(".".join(labels)):
        raise ValueError(f"{host!r} is neither a name nor an IPv4 address")
    return host.removesuffix("."), port


def invalid_address(uri: str, reason: str) -> InvalidAddress:
    """Return the error for an address that no server can have."""
    return InvalidAddress(f"{uri} is no address: {reason}", fix="correct it")


def is_local(uri: str) -> bool:
    """Tell whether the URI is a path on this machine (plain or file:)."""
    return scheme(uri) in ("", "file")


def local_path(uri: str) -> Path:
    """Return the absolute path of a local URI, without following links.

    Raises:
        StorageError: a file: URI names another machine, or the name cannot be one.
    """
    if scheme(uri) != "file":
        return Path(os.path.abspath(_usable(uri)))
    try:
        parts = urlsplit(uri)
    except ValueError as error:
        raise StorageError(f"{uri} is no address: {error}", fix="write a plain path") from None
    if parts.netloc not in ("", "localhost"):
        raise StorageError(
            f"{uri} names a file of the machine {parts.netloc!r}",
            fix=f"write file:///{parts.netloc}{parts.path} or a plain path",
        )
    return Path(os.path.abspath(_usable(unquote(parts.path))))


def _usable(path: str) -> str:
    """Return a path; refuse what the system cannot have in one."""
    try:
        name = os.fsencode(path)
    except UnicodeEncodeError:
        name = b"\0"
    if b"\0" in name:
        raise StorageError(
            f"{path!r} cannot be the name of a file", fix="use letters, digits, '.', '_' and '-'"
        )
    return path


def absolute(uri: str) -> str:
    """Return one spelling of the URI: a local one as an absolute path, others without a last slash."""
    return str(local_path(uri)) if is_local(uri) else uri.rstrip("/")


def climbs(name: str) -> bool:
    """Tell whether a relative name is empty, absolute, or leads out of the folder it is joined to."""
    plain = name.replace("\\", "/")
    pieces = set(plain.split("/"))
    return plain.startswith("/") or ".." in pieces or "\0" in name or not pieces - {"", "."}


def join(uri: str, *parts: str) -> str:
    """Append names to a URI.

    Raises:
        StorageError: a part is absolute or contains `..`: names must not climb out of a folder.
    """
    for part in parts:
        if climbs(part):
            raise StorageError(f"refused name {part!r} under {uri}", fix="use a relative name without '..'")
    return "/".join([uri.rstrip("/"), *parts])


def check_bucket(uri: str, *, strict: bool = False) -> None:
    """Refuse a URI of an object store whose bucket has a name that no bucket can have.

    Args:
        uri: any; nothing is said against those of other schemes.
        strict: whether the store takes what Amazon S3 takes and no more. Others of S3 know capitals, `_`
            and `:` too, as buckets of Amazon's early years did; the minio client lets these pass.

    Raises:
        StorageError: no bucket can have this name.
    """
    if scheme(uri) not in OBJECT_STORES:
        return
    refuse_userinfo(uri, f"the {scheme(uri)}:// URI")
    kind, bucket = scheme(uri), uri.partition("://")[2].partition("/")[0]
    if not bucket:
        raise StorageError(f"{uri} names no bucket", fix=f"use {kind}://bucket/key")
    known, fix = _BUCKETS["amazon" if strict and kind not in CLOUDS else kind]
    most = 222 if kind == "gs" and "." in bucket else 63
    good = known.fullmatch(bucket) and 3 <= len(bucket) <= most and not _is_address(bucket)
    if not good:
        raise StorageError(f"{uri}: no bucket can be named {bucket!r}", fix=fix)


def _is_address(text: str) -> bool:
    with suppress(ValueError):
        return bool(IPv4Address(text))
    return False


def check_place(uri: str) -> None:
    """Refuse, without asking anybody, a URI that can name no file in the store that it would lead to.

    Raises:
        StorageError: the name of its bucket cannot be one.
        ConfigError: it holds a name or password.
    """
    refuse_userinfo(uri, "the URI")
    if scheme(uri) in WEB:
        host_and_port(uri)
    elif scheme(uri) in CLOUDS:
        check_bucket(uri)
    elif scheme(uri) in OBJECT_STORES:
        from trainer.storage import environment

        check_bucket(uri, strict=environment.is_amazon(scheme(uri)))


def parent(uri: str) -> str:
    """Return the folder that holds the URI's file."""
    return os.path.dirname(absolute(uri)) if is_local(uri) else uri.rstrip("/").rpartition("/")[0]
