"""Reads single members of a zip; of a zip on a server only the bytes of the member are fetched.

The zip is not trusted: names that lead out of it, links, overlapping members and zip bombs are refused.

Format: PKWARE's APPNOTE 6.3.10, sections 4.3.7 (local file header) and 4.3.12 (central directory).
"""

import lzma
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedIOBase

from trainer import storage
from trainer.base.errors import DataError, MissingError, StorageError

_DAMAGED = (zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error, lzma.LZMAError)


@contextmanager
def archive_explained(said: str, kind: type[DataError] | type[StorageError] = DataError) -> Iterator[None]:
    """Turn what is raised for an archive that cannot be read into an error of the program.

    Args:
        said: what cannot be done with which archive.
        kind: of the error.

    Raises:
        DataError, StorageError: it is damaged, or packed in a way that Python does not know.
    """
    try:
        yield
    except NotImplementedError as error:
        # zipfile's, of a method or version of the format; fetched again it would be no other.
        raise kind(f"{said}: {error}", fix="pack it anew with deflate, as zip -r does") from None
    except _DAMAGED as error:
        raise kind(f"{said}: {error}", fix="pack or fetch it again") from None
    except OSError as error:
        # Of gzip and bz2 for damaged bytes; those of the system have a number.
        if error.errno is not None:
            raise
        raise kind(f"{said}: {error}", fix="pack or fetch it again") from None


_SIGNATURE, _HEADER = b"PK\x03\x04", 30
_SLACK = 64
"""Bytes of a local header's extra field that are read along; the directory's may have another length."""

_STORED, _DEFLATED = 0, 8
_ENCRYPTED = 0x1
_LARGEST = 256 * 1024 * 1024
"""Bytes of a member that is read at once: an image."""

_RATIO, _HARMLESS = 200, 16 * 1024 * 1024
"""Times that a member may be larger than it is packed, from so many bytes on."""


@dataclass(frozen=True, slots=True)
class _Member:
    """Where a member is, as the directory tells."""

    start: int
    packed: int
    size: int
    crc: int
    method: int
    name_length: int


class Zip:
    """A zip's directory."""

    def __init__(self, uri: str) -> None:
        """Read the directory, which is at the zip's end.

        Raises:
            DataError: it holds what is refused (see above).
            StorageError: it is missing, cannot be reached, or is no zip.
        """
        self.uri = uri
        self._members: dict[str, _Member] = {}
        with (
            archive_explained(f"{uri} is no zip that can be read", StorageError),
            storage.open_reader(uri) as file,
            zipfile.ZipFile(file) as archive,
        ):
            self._end = archive.start_dir
            for item in checked_members(uri, archive):
                self._members[item.filename] = _Member(
                    item.header_offset, item.compress_size, item.file_size, item.CRC,
                    item.compress_type, len(item.orig_filename.encode("utf-8", "replace")),
                )  # fmt: skip

    def state(self, name: str) -> str:
        """Return what changes when a member does; "" if there is none of this name."""
        member = self._members.get(name)
        return f"{member.size} {member.crc:08x}" if member else ""

    def read(self, name: str) -> bytes:
        """Return a member's content, after checking its length and checksum.

        Raises:
            StorageError: there is none of this name, it is damaged or packed in a way that is not
                known, or the zip cannot be reached.
        """
        member = self._members.get(name)
        if member is None:
            raise MissingError(
                f"no such file: {name} in {self.uri}", fix="check that the zip is the right one"
            )
        if member.size > _LARGEST or member.packed > _LARGEST:
            raise self._damaged(name, f"{member.size} bytes are too many for an image")
        length = min(_HEADER + member.name_length + _SLACK + member.packed, self._end - member.start)
        if length < _HEADER:
            raise self._damaged(name, "the directory says that it is outside the zip")
        data = storage.read_range(self.uri, member.start, length)
        if data[:4] != _SIGNATURE:
            raise self._damaged(name, "its header is not where the directory says")
        begin = _HEADER + int.from_bytes(data[26:28], "little") + int.from_bytes(data[28:30], "little")
        packed = data[begin : begin + member.packed]
        if len(packed) < member.packed:
            packed = storage.read_range(self.uri, member.start + begin, member.packed)
        content = self._unpacked(name, member, packed)
        if len(content) != member.size or zlib.crc32(content) != member.crc:
            raise self._damaged(name, "its checksum is another one")
        return content

    def _unpacked(self, name: str, member: _Member, packed: bytes) -> bytes:
        if member.method == _STORED:
            return packed
        if member.method != _DEFLATED:
            raise self._damaged(name, f"packed by method {member.method}, which is not known")
        try:
            # One byte more than declared is enough to notice a bomb.
            return zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, member.size + 1)
        except zlib.error as error:
            raise self._damaged(name, str(error)) from None

    def _damaged(self, name: str, why: str) -> StorageError:
        return StorageError(f"{name} in {self.uri}: {why}", fix="fetch the zip again")


@contextmanager
def open_member(uri: str, name: str) -> Iterator[BufferedIOBase]:
    """Open one member of a zip, however large it is; it is unpacked while it is read.

    Args:
        uri: of the zip; one that is not local is copied to the local cache.
        name: of the member.

    Raises:
        DataError: the zip or the member is damaged, holds what is refused, or there is none of this name.
        StorageError: the zip is missing or cannot be reached.
    """
    said = f"{name} in {uri} cannot be read"
    with archive_explained(said), zipfile.ZipFile(storage.local_copy(uri)) as archive:
        if name not in {item.filename for item in checked_members(uri, archive)}:
            raise DataError(f"{said}: there is none of this name", fix="check that the zip is the right one")
        with archive.open(name) as file:
            assert isinstance(file, BufferedIOBase)
            yield file


def checked_members(uri: str, archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """Return a zip's members without its folders, in the order in which they are stored.

    Args:
        uri: names the zip in messages.
        archive: the zip.

    Raises:
        DataError: one is refused.
    """
    items = sorted(
        (item for item in archive.infolist() if not item.is_dir()), key=lambda item: item.header_offset
    )
    end = 0
    for item in items:
        bomb = item.file_size > max(_HARMLESS, _RATIO * item.compress_size)
        why = (
            "its name leads out of the zip" if storage.climbs(item.filename)
            else "it is a link" if stat.S_ISLNK(item.external_attr >> 16)
            else "it is encrypted" if item.flag_bits & _ENCRYPTED
            else "it is outside the zip, or within another member" if item.header_offset < end
            else f"{item.file_size:,} bytes are packed into {item.compress_size:,}" if bomb
            else ""
        )  # fmt: skip
        if why:
            raise DataError(
                f"refused {item.filename!r} in {uri}: {why}", fix="take the zip from where it is published"
            )
        end = item.header_offset + _HEADER + item.compress_size
    return items
