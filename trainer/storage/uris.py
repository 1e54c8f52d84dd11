"""URIs: their parts, how they are joined, and the state of the files behind them."""

import os
import re
from contextlib import suppress
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from trainer.base.errors import ConfigError, MissingError, StorageError, refuse_userinfo

CLOUDS = ("gs", "az")  # object stores other than S3
OBJECT_STORES = ("s3", "minio", *CLOUDS)
WEB = ("http", "https")
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*):")
_AUTHORITY = re.compile(r"https?://([^/?#]*)", re.IGNORECASE)
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:]+)(?::([0-9]*))?")
_LABEL = re.compile(r"[A-Za-z0-9_-]{1,63}")
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")
_PORTS = {"http": 80, "https": 443}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_BUCKET = re.compile(r"(?!.*(\.\.|\.-|-\.))[A-Za-z0-9$][A-Za-z0-9._:-]{1,220}[A-Za-z0-9]")


class FileState(NamedTuple):
    """The state of a file."""

    size: int  # bytes
    modified: float | None  # seconds since 1970; None if it is not reported; listings may be more precise
    etag: str  # the store's mark of this content; of a local file, its modification time in nanoseconds

    @property
    def version(self) -> str:
        """Changes with the content: the ETag, or the time if there is none."""
        return self.etag or ("" if self.modified is None else str(self.modified))


def scheme(uri: str) -> str:
    """Return the URI's scheme in lower case; "" for a plain path, "file" for file: URIs."""
    match = _SCHEME.match(uri)
    return match.group(1).lower() if match else ""


@lru_cache(maxsize=1024)
def host_and_port(uri: str) -> tuple[str, int]:
    """Return the host of a web address, in lower case and without brackets, and its port.

    Clients disagree about odd hosts such as `0177.0.0.1`, so only hosts that all read alike are accepted:
    names of letters, digits, `-` and `_` (others as in IDNA), IPv4 as four decimal numbers, and IPv6 in
    brackets (RFC 3986, section 3.2.2; RFC 1035, section 2.3.4; https://url.spec.whatwg.org/#host-parsing).
    """
    authority = _AUTHORITY.match(uri)
    named = authority[1].rpartition("@")[2] if authority else ""
    match = _HOST.fullmatch(named)
    try:
        if match is None:
            raise ValueError(f"{named!r} is no host and port")
        host, port = match[1].lower(), int(match[2][:6] if match[2] else _PORTS.get(scheme(uri), 0))
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
    except ValueError as error:  # Also UnicodeError.
        raise invalid_address(uri, str(error)) from None


def invalid_address(uri: str, reason: str) -> MissingError:
    """Return the error for an address that no server can have."""
    return MissingError(f"{uri} is no address: {reason}", fix="correct it")


def is_local(uri: str) -> bool:
    """Return whether the URI is a path on this machine (plain or file:)."""
    return scheme(uri) in ("", "file")


def local_path(uri: str) -> Path:
    """Return the absolute path of a local URI, without following links."""
    path = uri
    if scheme(uri) == "file":
        path = uri.partition(":")[2]
        if path.startswith("//"):
            host, slash, rest = path[2:].partition("/")
            path = slash + rest
            if host not in ("", "localhost"):
                fix = f"write file:///{host}{path} or a plain path"
                raise StorageError(f"{uri} names a file of the machine {host!r}", fix=fix)
        path = unquote(path)
    try:
        if b"\0" in os.fsencode(path):
            raise ValueError
    except ValueError:  # Also UnicodeEncodeError.
        fix = "use letters, digits, '.', '_' and '-'"
        raise StorageError(f"{path!r} cannot be the name of a file", fix=fix) from None
    return Path(os.path.abspath(path))


def absolute(uri: str) -> str:
    """Return one spelling of the URI: a local one as an absolute path, others without a final slash."""
    return str(local_path(uri)) if is_local(uri) else uri.rstrip("/")


def check_name(name: str, noun: str) -> None:
    """Refuse a name, of what `noun` says, that cannot be part of a file's name."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"the {noun} {name!r} cannot be a name",
            fix="use letters, digits, '.', '_' and '-', beginning with a letter or digit, at most 100",
        )


def climbs(name: str) -> bool:
    """Return whether a relative name is empty, absolute, or leads out of the folder it is joined to."""
    plain = name.replace("\\", "/")
    pieces = set(plain.split("/"))
    return plain.startswith("/") or ".." in pieces or "\0" in name or not pieces - {"", "."}


def join(uri: str, *parts: str) -> str:
    """Append names to a URI."""
    for part in parts:
        if climbs(part):
            raise StorageError(f"refused name {part!r} under {uri}", fix="use a relative name without '..'")
    return "/".join([uri.rstrip("/"), *parts])


def parent(uri: str) -> str:
    """Return the folder of the URI's file."""
    return os.path.dirname(absolute(uri)) if is_local(uri) else uri.rstrip("/").rpartition("/")[0]


def check_place(uri: str) -> None:
    """Refuse a URI that cannot name a file, without a request."""
    refuse_userinfo(uri, "the URI")
    kind = scheme(uri)
    if kind in WEB:
        host_and_port(uri)
    if kind not in OBJECT_STORES:
        return
    bucket = uri.partition("://")[2].partition("/")[0]
    if not bucket:
        raise StorageError(f"{uri} names no bucket", fix=f"use {kind}://bucket/key")
    if not _BUCKET.fullmatch(bucket) or _is_address(bucket):
        fix = "a name has 3 to 63 of a-z 0-9 . - and begins and ends with a letter or digit"
        raise StorageError(f"{uri}: no bucket can be named {bucket!r}", fix=fix)


def _is_address(text: str) -> bool:
    with suppress(ValueError):
        return bool(IPv4Address(text))
    return False
