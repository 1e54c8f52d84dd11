"""Parses URIs, and checks the state and hashes of files."""

import hashlib
import os
import re
import stat
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from trainer.base.errors import DamagedError, MissingError, StorageError, refuse_userinfo
from trainer.base.os_errors import translate_oserror

OBJECT_STORES = ("s3", "minio", "gs")
WEB = ("http", "https")
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*):")
_BUCKET = re.compile(r"(?!.*(\.\.|\.-|-\.)|(\d+\.){3}\d+$)[A-Za-z0-9$][A-Za-z0-9._:-]{1,220}[A-Za-z0-9]")
_PORTS = {"http": 80, "https": 443}


class FileState(NamedTuple):
    """The state of a file."""

    size: int  # bytes
    modified: float | None  # seconds since 1970; None if the server does not report it
    etag: str  # the store's ETag; for a local file, the modification time in nanoseconds

    @property
    def version(self) -> str:
        """The ETag, or else the modification time: text that changes with the content."""
        return self.etag or ("" if self.modified is None else str(self.modified))


def scheme(uri: str) -> str:
    """Return the URI's scheme in lower case; "" for a plain path, "file" for file: URIs."""
    match = _SCHEME.match(uri)
    return match.group(1).lower() if match else ""


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
                raise StorageError(f"{uri} refers to a file on the machine {host!r}", fix=fix)
        path = unquote(path)
    try:
        if b"\0" in os.fsencode(path):
            raise ValueError
    except ValueError:  # This includes UnicodeEncodeError.
        fix = "use letters, digits, '.', '_' and '-'"
        raise StorageError(f"{path!r} is not a valid file name", fix=fix) from None
    return Path(os.path.abspath(path))


def absolute(uri: str) -> str:
    """Return a local URI as an absolute path, and any other without a trailing slash."""
    return str(local_path(uri)) if is_local(uri) else uri.rstrip("/")


def escapes_folder(name: str) -> bool:
    """Return whether a relative name is empty, absolute, or points outside the folder it is joined to."""
    plain = name.replace("\\", "/")
    pieces = set(plain.split("/"))
    return plain.startswith("/") or ".." in pieces or "\0" in name or not pieces - {"", "."}


def join(uri: str, *parts: str) -> str:
    """Append names to a URI."""
    for part in parts:
        if escapes_folder(part):
            raise StorageError(f"invalid name {part!r} under {uri}", fix="use a relative name without '..'")
    return "/".join([uri.rstrip("/"), *parts])


def parent(uri: str) -> str:
    """Return the URI of the folder that contains a file."""
    return os.path.dirname(absolute(uri)) if is_local(uri) else uri.rstrip("/").rpartition("/")[0]


def host_or_bucket(uri: str) -> str:
    """Return host and port of a web address, as urllib3 parses it, or scheme and bucket of an object."""
    from urllib3.exceptions import HTTPError
    from urllib3.util import parse_url

    kind = scheme(uri)
    if kind not in WEB:
        return f"{kind}://{uri.partition('://')[2].partition('/')[0]}".lower()
    try:
        address = parse_url(uri)
        if not address.host or address.port == 0:
            raise ValueError("its host or port is missing or invalid")
    except (ValueError, HTTPError) as error:
        raise MissingError(f"{uri} is not a valid address: {error}", fix="correct the address") from None
    return f"{address.host}:{address.port or _PORTS[kind]}"


def check_uri(uri: str) -> None:
    """Raise an error if a URI is malformed, without sending a request."""
    refuse_userinfo(uri, "the URI")
    kind = scheme(uri)
    if kind in WEB:
        host_or_bucket(uri)
    if kind not in OBJECT_STORES:
        return
    bucket = uri.partition("://")[2].partition("/")[0]
    if not bucket:
        raise StorageError(f"{uri} has no bucket", fix=f"use {kind}://bucket/key")
    if not _BUCKET.fullmatch(bucket):
        fix = "a name has 3 to 63 characters of a-z, 0-9, . and -, and begins and ends with a letter or digit"
        raise StorageError(f"{uri}: invalid bucket name {bucket!r}", fix=fix)


def check_digest(uri: str, digest: str, expected: str, kind: type[DamagedError] = DamagedError) -> None:
    """Raise an error if a file's hash is not the expected one."""
    if digest != expected:
        message = f"{uri} is damaged: its sha256 is {digest}, not {expected}"
        raise kind(message, fix="run the command that writes it again")


def open_file(path: Path) -> BufferedReader:
    """Open a regular file for reading; reject FIFOs and devices, which may never end."""
    opener = lambda name, flags: os.open(name, flags | os.O_NONBLOCK)  # noqa: E731
    file = open(path, "rb", opener=opener)  # noqa: SIM115 (the caller closes it)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise StorageError(f"{path} is not a regular file", fix="replace it with the expected file")
    return file


_hashes: dict[tuple[str, int, int, int], str] = {}  # by path, inode, size and modification time


def check_hash(path: Path, uri: str, sha256: str) -> None:
    """Check the hash of the local copy of a URI; an unchanged file is hashed only once."""
    with translate_oserror(uri, "read"), open_file(path) as file:
        status = os.fstat(file.fileno())
        key = (str(path), status.st_ino, status.st_size, status.st_mtime_ns)
        if key not in _hashes:
            _hashes[key] = hashlib.file_digest(file, "sha256").hexdigest()
    check_digest(uri, _hashes[key], sha256)
