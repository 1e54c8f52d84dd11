"""Unpacks a data set's zip or tar into a temporary folder, which goes when the process ends.

The archive is not trusted: names that lead out of the folder, links and devices are refused, and so is more
than the disk holds or than an archive of its size can hold in earnest.
"""

import os
import shutil
import tarfile
import threading
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO

from trainer import storage
from trainer.base.errors import DataError
from trainer.base.os_errors import explained
from trainer.base.temporary_folders import TemporaryFolder
from trainer.data.sources.archive_errors import archive_explained
from trainer.data.sources.zip_members import checked_members

SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
_MOST_FILES = 5_000_000
_RATIO, _HARMLESS = 200, 16 * 1024 * 1024
"""Times that a tar may be larger than it is packed, from so many bytes on."""

_RESERVE = 256 * 1024 * 1024
"""Bytes of the disk that are left free."""

_BLOCK = 1024 * 1024
_UTF8_FLAG = 0x800
_unpacked: dict[tuple[str, str], "Unpacked"] = {}
_lock = threading.Lock()


@dataclass
class Unpacked:
    """What was in an archive."""

    folder: str
    """Where it is now."""
    versions: dict[str, str] = field(default_factory=dict)
    """Bytes and checksum of each file, by its relative name."""
    keeper: TemporaryFolder | None = None
    """Removes the folder when it goes."""


def is_archive(uri: str) -> bool:
    """Tell by its name whether this is an archive."""
    return uri.lower().endswith(SUFFIXES)


def unpack(uri: str) -> Unpacked:
    """Unpack an archive, once in a process as long as it does not change.

    Args:
        uri: of a zip or tar; one that is not local is copied to the local cache.

    Raises:
        DataError: it is none, is damaged, or holds what is refused.
        StorageError: it is missing or cannot be reached, or the folder cannot be written.
    """
    state = storage.state(uri)
    key = uri, "" if state is None else f"{state.size} {state.version}"
    with _lock:
        if key not in _unpacked:
            _unpacked[key] = _unpack(uri)
        return _unpacked[key]


def _unpack(uri: str) -> Unpacked:
    path = str(storage.local_copy(uri))
    keeper = TemporaryFolder()
    unpacked = Unpacked(os.path.realpath(keeper.path), keeper=keeper)
    with archive_explained(f"{uri} cannot be unpacked"), explained(unpacked.folder, "write"):
        for name, content in _members(uri, path, unpacked.folder):
            if len(unpacked.versions) >= _MOST_FILES:
                raise _refused(uri, name, f"it is one of more than {_MOST_FILES:,} files")
            unpacked.versions[name] = _write(content, os.path.join(unpacked.folder, name))
    return unpacked


def _members(uri: str, path: str, folder: str) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield relative name and content of each file; what an operating system adds is left out."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            items = checked_members(uri, archive)
            _check_room(uri, sum(item.file_size for item in items), folder)
            for item in items:
                name = _name(uri, _decoded(item))
                if name:
                    with archive.open(item) as content:
                        yield name, content
    elif tarfile.is_tarfile(path):
        size = os.path.getsize(path)
        total = 0
        with tarfile.open(path) as tar:
            for member in tar:
                if member.isdir():
                    continue
                if not member.isreg():
                    raise _refused(uri, member.name, "it is a link or device, not a file")
                total += member.size
                if total > max(_HARMLESS, _RATIO * size):
                    raise _refused(uri, member.name, f"{total:,} bytes are packed into {size:,}")
                _check_room(uri, member.size, folder)
                name = _name(uri, member.name)
                file = tar.extractfile(member)
                if name and file is not None:
                    yield name, file
            _read_to_the_end(uri, tar, max(_HARMLESS, _RATIO * size))
    else:
        raise DataError(f"{uri} is neither a zip nor a tar that can be read", fix="pack or fetch it again")


def _read_to_the_end(uri: str, tar: tarfile.TarFile, most: int) -> None:
    """Read what is behind a tar's last member: gzip's checksum is there, and only then compared."""
    assert tar.fileobj is not None
    while block := tar.fileobj.read(_BLOCK):
        most -= len(block)
        if most < 0:
            raise _refused(uri, "its end", "there is more behind the last file than an archive has")


def _decoded(item: zipfile.ZipInfo) -> str:
    """Return a member's name: macOS writes UTF-8 without saying so."""
    if item.flag_bits & _UTF8_FLAG:
        return item.filename
    try:
        return item.filename.encode("cp437").decode("utf-8")
    except UnicodeError:
        return item.filename


def _name(uri: str, name: str) -> str:
    """Return a member's relative name with forward slashes; "" for what no data set needs."""
    if storage.climbs(name) or ":" in name.replace("\\", "/").partition("/")[0]:
        raise _refused(uri, name, "its name leads out of the archive")
    parts = [part for part in name.replace("\\", "/").split("/") if part not in ("", ".")]
    added = "__MACOSX" in parts or any(part.startswith("._") for part in parts)
    return "" if added or parts[-1] in (".DS_Store", "Thumbs.db", "desktop.ini") else "/".join(parts)


def _write(content: IO[bytes], path: str) -> str:
    """Write a file; return its bytes and checksum."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    checksum = size = 0
    with open(path, "wb") as file:
        while block := content.read(_BLOCK):
            file.write(block)
            checksum, size = zlib.crc32(block, checksum), size + len(block)
    return f"{size} {checksum:08x}"


def _check_room(uri: str, needed: int, folder: str) -> None:
    free = shutil.disk_usage(folder).free - _RESERVE
    if needed > free:
        raise DataError(
            f"{uri} needs {needed / 1e9:.2f} GB unpacked, but {os.path.dirname(folder)} has "
            f"{max(0, free) / 1e9:.2f} GB",
            fix="let TMPDIR name a folder with more room, or unpack it yourself and name the folder",
        )


def _refused(uri: str, name: str, why: str) -> DataError:
    return DataError(f"refused {name!r} in {uri}: {why}", fix="unpack it yourself and name the folder")
