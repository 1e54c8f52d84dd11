"""Names of files: URIs, how they are joined, and what is known of the file behind one."""

import os
import re
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from trainer.errors import StorageError

OBJECT_STORES = ("s3", "minio")
WEB = ("http", "https")

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*):")


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


def is_local(uri: str) -> bool:
    """Tell whether the URI is a path on this machine (plain or file:)."""
    return scheme(uri) in ("", "file")


def local_path(uri: str) -> Path:
    """Return the absolute path of a local URI, without following links.

    Raises:
        StorageError: a file: URI names another machine.
    """
    if scheme(uri) != "file":
        return Path(os.path.abspath(uri))
    parts = urlsplit(uri)
    if parts.netloc not in ("", "localhost"):
        raise StorageError(
            f"{uri} names a file of the machine {parts.netloc!r}",
            fix=f"write file:///{parts.netloc}{parts.path} or a plain path",
        )
    return Path(os.path.abspath(unquote(parts.path)))


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


def parent(uri: str) -> str:
    """Return the folder that holds the URI's file."""
    return os.path.dirname(absolute(uri)) if is_local(uri) else uri.rstrip("/").rpartition("/")[0]
