"""Zip and tar archives behind URIs, read member by member: never whole in memory, never unpacked blindly.

A zip in an object store or on the web is read by ranges: its directory first, then the members that
are wanted, ahead of the one who reads. Nothing is written here, and nothing that an archive says of
itself is believed: names that climb out, links, members that are larger than they say, or much
larger than what they were packed into, are refused.
"""

import bz2
import gzip
import lzma
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

from trainer import storage
from trainer.errors import DataError
from trainer.os_errors import explained

_PACKED: tuple[tuple[bytes, Callable[[Any], Any]], ...] = (
    (b"\x1f\x8b", lambda file: gzip.GzipFile(fileobj=file)),
    (b"BZh", bz2.BZ2File),
    (b"\xfd7zXZ\x00", lzma.LZMAFile),
)
_ZIP = (b"PK\x03\x04", b"PK\x05\x06")
_BLOCK = 512
_FILLING = 10 * 1024
_DAMAGED = (zipfile.BadZipFile, tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, NotImplementedError)


@dataclass(frozen=True)
class Limits:
    """What an archive may hold."""

    member: int = 8 * 2**30
    """Bytes of one member, unpacked."""
    ratio: int = 200
    """Times that something may be larger than what it is packed into..."""
    from_bytes: int = 64 * 2**20
    """...from this size on."""


class Member:
    """A file in an archive. It can be read until the next one is asked for."""

    def __init__(self, archive: str, name: str, size: int, open_file: Callable[[], IO[bytes] | None]) -> None:
        self.name = name
        """Relative, with '/', without '..'."""
        self.size = size
        """Bytes, unpacked."""
        self._archive, self._open = archive, open_file

    def __repr__(self) -> str:
        return f"Member({self.name!r}, {self.size})"

    def read(self, limit: int = 256 * 2**20) -> bytes:
        """Return the content, checked against the size and the checksum that the archive holds.

        Raises:
            DataError: it is damaged, or larger than `limit` bytes.
        """
        if self.size > limit:
            raise _refused(self._archive, self.name, f"it has more than {limit:,} bytes")
        return b"".join(self.blocks())

    def blocks(self, size: int = 2**20) -> Iterator[bytes]:
        """Yield the content in blocks of at most `size` bytes; what `read` checks is checked at the end.

        Raises:
            DataError: it is damaged.
        """
        done = 0
        with _explained(self._archive, self.name):
            file = self._open()
            if file is None:
                raise tarfile.ReadError("it has no content")
            with file:
                while block := file.read(size):
                    done += len(block)
                    if done > self.size:
                        break
                    yield block
        if done != self.size:
            raise _damaged(
                self._archive, self.name, f"it has not the {self.size:,} bytes that it should have"
            )


def members(
    uri: str, wanted: Callable[[str], bool] = lambda name: True, limits: Limits | None = None
) -> Iterator[Member]:
    """Yield the files of an archive in the order in which they are stored, without the folders.

    Args:
        uri: a zip, or a tar that may be packed with gzip, bzip2 or xz; recognised by its content.
        wanted: tells by its name whether a member is yielded; what a zip holds of others is not read.
        limits: what it may hold.

    Raises:
        DataError: it is no archive, damaged, or holds what is refused (see above). That a packed tar
            is damaged may show only at its end, after all members.
        StorageError: it cannot be read.
    """
    limits = limits or Limits()
    with storage.open_reader(uri) as file:
        magic = file.read(8)
        file.seek(0)
        found = _zip_members if magic.startswith(_ZIP) else _tar_members
        for member in found(uri, file, limits):
            if wanted(member.name):
                yield member


def _zip_members(uri: str, file: IO[bytes], limits: Limits) -> Iterator[Member]:
    with _explained(uri):
        archive = zipfile.ZipFile(file)
    with archive:
        end = 0
        for info in sorted(archive.infolist(), key=lambda info: info.header_offset):
            if info.is_dir():
                continue
            name = _safe(uri, info.filename)
            if stat.S_ISLNK(info.external_attr >> 16):
                raise _refused(uri, name, "it is a link")
            if info.flag_bits & 1:
                raise _refused(uri, name, "it is encrypted")
            if info.header_offset < end:
                raise _refused(uri, name, "it overlaps with another member")
            end = info.header_offset + info.compress_size
            _check_size(uri, name, info.file_size, None, limits)
            _check_size(uri, name, info.file_size, info.compress_size, limits)
            yield Member(uri, name, info.file_size, lambda info=info: archive.open(info))  # type: ignore[misc]


def _tar_members(uri: str, file: IO[bytes], limits: Limits) -> Iterator[Member]:
    magic = file.read(8)
    file.seek(0)
    unpack = next((unpack for start, unpack in _PACKED if magic.startswith(start)), None)
    watched = _Watched(unpack(file) if unpack else file)
    with _explained(uri):
        archive = tarfile.TarFile(fileobj=watched)  # type: ignore[arg-type]
    while True:
        with _explained(uri):
            info = archive.next()
        if info is None:
            break
        archive.members.clear()  # type: ignore[attr-defined]  # it would remember every one
        if info.isdir():
            continue
        name = _safe(uri, info.name)
        if not info.isreg() or info.issparse():
            raise _refused(uri, name, "it is a link, a device or has holes")
        _check_size(uri, name, info.size, None, limits)
        if unpack:
            _check_size(uri, name, info.offset, file.tell(), limits)
        yield Member(uri, name, info.size, lambda info=info: archive.extractfile(info))  # type: ignore[misc]
    if len(watched.header) < _BLOCK or any(watched.header):
        raise _damaged(uri, "", "it does not end as it should: it is cut off or broken in the midst")
    left = limits.from_bytes
    with _explained(uri):
        # Up to the checksum behind the end; no more than the filling that a tar may have.
        while left > 0 and (data := watched.read(_FILLING)):
            left -= len(data)


class _Watched:
    """What a tar is read from; it keeps the last header, whose errors tarfile takes for the end."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.header = b""
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        if size == _BLOCK:
            self.header = data
        return data


def _safe(uri: str, name: str) -> str:
    """Return a member's name in one spelling."""
    plain = name.replace("\\", "/")
    if storage.climbs(plain):
        raise _refused(uri, name, "its name leads out of the folder")
    return "/".join(piece for piece in plain.split("/") if piece not in ("", "."))


def _check_size(uri: str, name: str, size: int, packed: int | None, limits: Limits) -> None:
    if size < 0 or (packed is None and size > limits.member):
        raise _refused(uri, name, f"it has {size:,} bytes, more than {limits.member:,}")
    if packed is not None and size > max(limits.from_bytes, limits.ratio * packed):
        raise _refused(
            uri, name, f"{size:,} bytes are packed into {packed:,}: it may be made to fill the disk"
        )


@contextmanager
def _explained(uri: str, name: str = "") -> Iterator[None]:
    try:
        with explained(uri, "read"):
            yield
    except _DAMAGED as error:
        raise _damaged(uri, name, str(error)) from error
    except OSError as error:  # of a decompressor: those of the system are explained already
        raise _damaged(uri, name, str(error)) from error


def _damaged(uri: str, name: str, why: str) -> DataError:
    what = f"{name!r} in {uri}" if name else uri
    return DataError(
        f"{what} is no archive or damaged: {why}", fix="compare it with its source, and download it again"
    )


def _refused(uri: str, name: str, why: str) -> DataError:
    return DataError(
        f"refused {name!r} in {uri}: {why}", fix="unpack it yourself if you trust it, and give the folder"
    )
