"""URIs: their parts, how they are joined, and the state of the files behind them."""

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
"""Object stores other than S3."""
OBJECT_STORES = ("s3", "minio", *CLOUDS)
WEB = ("http", "https")

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*):")
_AUTHORITY = re.compile(r"https?://([^/?#]*)", re.IGNORECASE)
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:]+)(?::([0-9]*))?")
_LABEL = re.compile(r"[A-Za-z0-9_-]{1,63}")
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")
_PORTS = {"http": 80, "https": 443}
_S3_BUCKET = re.compile(r"(?!.*(\.\.|\.-|-\.))[A-Za-z0-9][A-Za-z0-9._:-]{1,61}[A-Za-z0-9]")
_BUCKETS = {
    "s3": _S3_BUCKET,
    "minio": _S3_BUCKET,
    "gs": re.compile(r"(?=[^.]{1,63}(\.[^.]{1,63})*$)[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]"),
    "az": re.compile(r"(?=.{3,63}$)[a-z0-9]+(-[a-z0-9]+)*|\$root|\$web"),
}
"""Names of buckets. S3 stores other than Amazon's allow capitals, `_` and `:`.
https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html
https://cloud.google.com/storage/docs/buckets#naming
https://learn.microsoft.com/rest/api/storageservices/naming-and-referencing-containers--blobs--and-metadata"""


class InvalidAddress(MissingError):
    """A web address that no server can have."""


class FileState(NamedTuple):
    """The state of a file."""

    size: int
    """Bytes."""
    modified: float | None
    """Seconds since 1970; None if the server does not report it. Listings may be more precise."""
    etag: str
    """The store's mark of this content; of a local file, its modification time in nanoseconds."""

    @property
    def version(self) -> str:
        """Changes with the content: the ETag, or the time if there is none."""
        return self.etag or ("" if self.modified is None else str(self.modified))


def scheme(uri: str) -> str:
    """Return the URI's scheme in lower case; "" for a plain path, "file" for file: URIs."""
    match = _SCHEME.match(uri)
    return match.group(1).lower() if match else ""


def host_and_port(uri: str) -> tuple[str, int]:
    """Return the host of a web address, in lower case and without brackets, and its port.

    Clients disagree about odd hosts such as `0177.0.0.1`, so only hosts that all read alike are accepted:
    names of letters, digits, `-` and `_` (others as in IDNA), IPv4 as four decimal numbers, and IPv6 in
    brackets (RFC 3986, section 3.2.2; RFC 1035, section 2.3.4; https://url.spec.whatwg.org/#host-parsing).

    Raises:
        InvalidAddress: there is no such host or port.
    """
    authority = _AUTHORITY.match(uri)
    named = authority[1].rpartition("@")[2] if authority else ""
    try:
        return _host_and_port(named, _PORTS.get(scheme(uri), 0))
    except ValueError as error:  # Also UnicodeError.
        raise invalid_address(uri, str(error)) from None


@lru_cache(maxsize=1024)
def _host_and_port(named: str, default_port: int) -> tuple[str, int]:
    match = _HOST.fullmatch(named)
    if match is None:
        raise ValueError(f"{named!r} is no host and port")
    host, port = match[1].lower(), int(match[2][:6] if match[2] else default_port)
    if not 0 < port < 2**16:
        raise ValueError(f"there is no port {match[2]}")
    if host.startswith("["):
        return str(IPv6Address(host[1:-1])), port
    labels = host.encode("idna").decode("ascii").removesuffix(".").split(".")
    ".".join(labels).encode("ascii").decode("idna")
    if not all(map(_LABEL.fullmatch, labels)) or len(".".join(labels)) > 253:
        raise ValueError(f"{host!r} cannot be a host name")
    if _NUMBER.fullmatch(labels[-1]) and not _is_address(".".join(labels)):
        raise ValueError(f"{host!r} is neither a name nor an IPv4 address")
    return host.removesuffix("."), port


def invalid_address(uri: str, reason: str) -> InvalidAddress:
    """Return the error for an address that no server can have."""
    return InvalidAddress(f"{uri} is no address: {reason}", fix="correct it")


def is_local(uri: str) -> bool:
    """Return whether the URI is a path on this machine (plain or file:)."""
    return scheme(uri) in ("", "file")


def local_path(uri: str) -> Path:
    """Return the absolute path of a local URI, without following links.

    Raises:
        StorageError: it names another machine, or cannot be a path.
    """
    path = uri
    if scheme(uri) == "file":
        try:
            parts = urlsplit(uri)
        except ValueError as error:
            raise StorageError(f"{uri} is no address: {error}", fix="write a plain path") from None
        if parts.netloc not in ("", "localhost"):
            fix = f"write file:///{parts.netloc}{parts.path} or a plain path"
            raise StorageError(f"{uri} names a file of the machine {parts.netloc!r}", fix=fix)
        path = unquote(parts.path)
    try:
        is_name = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        is_name = False
    if not is_name:
        fix = "use letters, digits, '.', '_' and '-'"
        raise StorageError(f"{path!r} cannot be the name of a file", fix=fix)
    return Path(os.path.abspath(path))


def absolute(uri: str) -> str:
    """Return one spelling of the URI: a local one as an absolute path, others without a final slash."""
    return str(local_path(uri)) if is_local(uri) else uri.rstrip("/")


def climbs(name: str) -> bool:
    """Return whether a relative name is empty, absolute, or leads out of the folder it is joined to."""
    plain = name.replace("\\", "/")
    pieces = set(plain.split("/"))
    return plain.startswith("/") or ".." in pieces or "\0" in name or not pieces - {"", "."}


def join(uri: str, *parts: str) -> str:
    """Append names to a URI.

    Raises:
        StorageError: a part is absolute or contains `..`.
    """
    for part in parts:
        if climbs(part):
            raise StorageError(f"refused name {part!r} under {uri}", fix="use a relative name without '..'")
    return "/".join([uri.rstrip("/"), *parts])


def parent(uri: str) -> str:
    """Return the folder of the URI's file."""
    return os.path.dirname(absolute(uri)) if is_local(uri) else uri.rstrip("/").rpartition("/")[0]


def check_place(uri: str) -> None:
    """Refuse a URI that cannot name a file, without a request.

    Raises:
        StorageError: it has no valid bucket or host.
        ConfigError: it contains a name or password.
    """
    refuse_userinfo(uri, "the URI")
    kind = scheme(uri)
    if kind in WEB:
        host_and_port(uri)
    if kind not in OBJECT_STORES:
        return
    bucket = uri.partition("://")[2].partition("/")[0]
    if not bucket:
        raise StorageError(f"{uri} names no bucket", fix=f"use {kind}://bucket/key")
    if not _BUCKETS[kind].fullmatch(bucket) or _is_address(bucket):
        fix = "a name has 3 to 63 of a-z 0-9 . - and begins and ends with a letter or digit"
        raise StorageError(f"{uri}: no bucket can be named {bucket!r}", fix=fix)


def _is_address(text: str) -> bool:
    with suppress(ValueError):
        return bool(IPv4Address(text))
    return False
