"""Reads the files of sources: folders, many small text files, and zips and tars, which are not trusted.

Names that lead out of an archive, links, devices, encrypted or overlapping members, zip bombs and more bytes
than the disk holds are refused. From a zip on a server, only the bytes of the requested member are fetched.

Format: PKWARE's APPNOTE 6.3.10, sections 4.3.7 (local file header) and 4.3.12 (central directory).
"""

import lzma
import os
import re
import shutil
import stat
import tarfile
import threading
import unicodedata
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import BufferedIOBase
from itertools import islice
from typing import IO

from trainer import storage
from trainer.base import worker_pool
from trainer.base.errors import DataError, MissingError, StorageError
from trainer.base.os_errors import translate_oserror
from trainer.base.temporary_folders import TemporaryFolder
from trainer.data.images import IMAGE_SUFFIXES
from trainer.data.problem_counts import IMAGE_HIDDEN, Problems
from trainer.storage import FileState

_READERS = 16
_FILES_PER_BATCH = 1000  # Files in memory at the same time.


def read_files(uris: Iterable[str]) -> Iterator[bytes | MissingError]:
    """Yield the contents of files in order; the error in place of a missing file."""
    rest = iter(uris)
    while batch := list(islice(rest, _FILES_PER_BATCH)):
        workers = 1 if storage.is_local(batch[0]) else _READERS
        contents = dict(worker_pool.run(_read, batch, workers, processes=False))
        yield from (contents[uri] for uri in batch)


def _read(uri: str) -> tuple[str, bytes | MissingError]:
    try:
        return uri, storage.read_bytes(uri)
    except MissingError as error:
        return uri, error


def read_lines(uri: str) -> list[str]:
    """Return the lines of a file that are not blank, stripped."""
    text = storage.read_bytes(uri).decode("utf-8-sig", "replace")
    return [stripped for line in text.splitlines() if (stripped := line.strip())]


def read_entries(uri: str) -> list[str]:
    """Return the lines of a file that are neither blank nor comments, stripped."""
    return [line for line in read_lines(uri) if not re.match(r"#+(\s|$)", line)]


def is_hidden(name: str) -> bool:
    """Return whether sources ignore a relative name: a part of it begins with a dot, or is __MACOSX."""
    parts = name.split("/")
    return any(part == "__MACOSX" or (part[:1] == "." and part not in (".", "..")) for part in parts)


def skip_hidden(name: str, problems: Problems) -> bool:
    """Return whether a file is hidden, and count it if it is an image."""
    hidden = is_hidden(name)
    if hidden and name.lower().endswith(IMAGE_SUFFIXES):
        problems.add(IMAGE_HIDDEN, name)
    return hidden


def visible_files(
    folder: str, problems: Problems | None = None, *, recursive: bool = True
) -> Iterator[tuple[str, FileState]]:
    """Yield relative names and states of the visible files in a folder; add hidden images to `problems`."""
    noted = Problems() if problems is None else problems
    for name, state in storage.scan(folder, recursive=recursive):
        if not skip_hidden(name, noted):
            yield name, state


def file_version(state: FileState) -> str:
    """Return text that changes when a file does."""
    return f"{state.size} {state.version}"


class FolderListings:
    """The files directly in folders; each folder is listed once."""

    def __init__(self) -> None:
        self._versions: dict[str, dict[str, str]] = {}
        self._folded: dict[str, dict[str, str]] = {}

    def versions(self, folder: str) -> dict[str, str]:
        """Return the version of each file of a folder by its name; {} if the folder is missing."""
        if folder not in self._versions:
            states = storage.scan(folder, recursive=False)
            self._versions[folder] = {name: file_version(state) for name, state in states}
        return self._versions[folder]

    def version(self, uri: str) -> str:
        """Return the version of a file; "" if there is none."""
        folder, _, name = uri.rpartition("/")
        return self.versions(folder).get(name, "")

    def find(self, folder: str, name: str) -> tuple[str, str] | None:
        """Return URI and version of a file of this name, or of one that differs by case or Unicode form."""
        versions = self.versions(folder)
        if name not in versions:
            if folder not in self._folded:
                self._folded[folder] = {_fold(other): other for other in sorted(versions, reverse=True)}
            name = self._folded[folder].get(_fold(name), "")
        return (storage.join(folder, name), versions[name]) if name else None


def _fold(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


_MAX_RATIO, _MIN_BOMB_BYTES = 200, 16 * 1024 * 1024  # Above both, compressed content counts as a bomb.
_MIN_FREE_BYTES = 256 * 1024 * 1024  # Free disk space to keep.
_BLOCK = 1024 * 1024
_UTF8_FLAG, _ENCRYPTED = 0x800, 0x1
_UNPACK = "unpack it yourself, and use the folder"


@dataclass
class UnpackedArchive:
    """A temporary folder with the content of an archive."""

    folder: str
    keeper: TemporaryFolder  # Removes the folder when it is garbage-collected.
    versions: dict[str, str] = field(default_factory=dict)  # Size and checksum by relative name.
    hidden: list[str] = field(default_factory=list)  # Relative names of hidden files, which are not unpacked.


_unpacked: dict[tuple[str, str], UnpackedArchive] = {}
_lock = threading.Lock()


def unpack(uri: str) -> UnpackedArchive:
    """Unpack a zip or tar into a temporary folder; unpack it again only if it has changed."""
    state = storage.state(uri)
    key = uri, file_version(state) if state else ""
    with _lock:
        if key not in _unpacked:
            path, keeper = str(storage.local_copy(uri)), TemporaryFolder()
            folder = os.path.realpath(keeper.path)
            unpacked = UnpackedArchive(folder, keeper)
            with _name_archive_errors(f"{uri} cannot be unpacked"), translate_oserror(folder, "write"):
                for name, content in _members(uri, path, folder):
                    relative = _safe_name(uri, name)
                    if is_hidden(relative):
                        unpacked.hidden.append(relative)
                    elif relative:
                        target = os.path.join(folder, relative)
                        unpacked.versions[relative] = _write(content, target)
            _unpacked[key] = unpacked
        return _unpacked[key]


@contextmanager
def _name_archive_errors(failure: str, kind: type[DataError | StorageError] = DataError) -> Iterator[None]:
    try:
        yield
    except NotImplementedError as error:
        # zipfile does not know the method or version, so downloading the archive again would not help.
        raise kind(f"{failure}: {error}", fix="compress it again with deflate, as zip -r does") from None
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        # gzip and bz2 raise OSError without a number for damaged bytes.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise kind(f"{failure}: {error}", fix="create or download it again") from None


def _members(uri: str, path: str, folder: str) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield name and content of each file in an archive."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            items = _checked_members(uri, archive)
            _check_disk_space(uri, sum(item.file_size for item in items), folder)
            for item in items:
                name = item.filename
                if not item.flag_bits & _UTF8_FLAG:  # macOS writes UTF-8 without setting it.
                    with suppress(UnicodeError):
                        name = name.encode("cp437").decode("utf-8")
                with archive.open(item) as content:
                    yield name, content
    elif tarfile.is_tarfile(path):
        total, packed = 0, os.path.getsize(path)
        with tarfile.open(path) as tar:
            for member in tar:
                if member.isdir():
                    continue
                if not member.isreg():
                    raise _refusal(uri, member.name, "it is a link or device, not a file")
                total += member.size
                _refuse_bomb(uri, total, packed)
                _check_disk_space(uri, member.size, folder)
                file = tar.extractfile(member)
                assert file is not None
                yield member.name, file
            # gzip verifies its checksum at the end of the file, after the last member.
            assert tar.fileobj is not None
            while tar.fileobj.read(_BLOCK):
                pass
    else:
        raise DataError(f"{uri} is not a readable zip or tar file", fix="create or download it again")


def _checked_members(uri: str, archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """Check the members of a zip, and return the files among them in the order of their bytes."""
    items = sorted(
        (item for item in archive.infolist() if not item.is_dir()), key=lambda item: item.header_offset
    )
    end = 0
    for item in items:
        _safe_name(uri, item.filename)
        reason = (
            "it is a link"
            if stat.S_ISLNK(item.external_attr >> 16)
            else "it is encrypted"
            if item.flag_bits & _ENCRYPTED
            else "it is outside the zip, or within another member"
            if item.header_offset < end
            else ""
        )
        if reason:
            raise _refusal(uri, item.filename, reason)
        end = item.header_offset + _HEADER + item.compress_size
    _refuse_bomb(uri, sum(item.file_size for item in items), min(end, archive.start_dir))
    return items


def _refuse_bomb(uri: str, size: int, packed: int) -> None:
    """Refuse an archive whose members together are suspiciously larger than itself."""
    if size > max(_MIN_BOMB_BYTES, _MAX_RATIO * packed):
        raise DataError(f"refused {uri}: {size:,} bytes are packed into {packed:,}", fix=_UNPACK)


def _refusal(uri: str, name: str, reason: str) -> DataError:
    return DataError(f"refused {name!r} in {uri}: {reason}", fix=_UNPACK)


def _safe_name(uri: str, name: str) -> str:
    """Return a member's relative name with forward slashes; "" for files that operating systems add."""
    if storage.escapes_folder(name) or ":" in name.replace("\\", "/").partition("/")[0]:
        raise _refusal(uri, name, "its name leads out of the archive")
    parts = [part for part in name.replace("\\", "/").split("/") if part not in ("", ".")]
    return "" if not parts or parts[-1] in ("Thumbs.db", "desktop.ini") else "/".join(parts)


def _write(content: IO[bytes], path: str) -> str:
    """Write a file; return its size and checksum."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    checksum = size = 0
    with open(path, "wb") as file:
        while block := content.read(_BLOCK):
            file.write(block)
            checksum, size = zlib.crc32(block, checksum), size + len(block)
    return f"{size} {checksum:08x}"


def _check_disk_space(uri: str, needed: int, folder: str) -> None:
    free = shutil.disk_usage(folder).free - _MIN_FREE_BYTES
    if needed > free:
        has = f"{os.path.dirname(folder)} has {max(0, free) / 1e9:.2f} GB"
        fix = "set TMPDIR to a folder with more room, or unpack it yourself and use the folder"
        raise DataError(f"{uri} needs {needed / 1e9:.2f} GB unpacked, but {has}", fix=fix)


_SIGNATURE, _HEADER = b"PK\x03\x04", 30
_SLACK = 64  # Bytes that are read for a local header's extra field, which may be longer than the directory's.
_MAX_BYTES = 256 * 1024 * 1024  # Bytes of the largest member that is read: an image.


class ZipReader:
    """Reads members of a zip by ranges."""

    def __init__(self, uri: str) -> None:
        """Read the directory at the zip's end."""
        self.uri = uri
        with (
            _name_archive_errors(f"{uri} cannot be read as a zip", StorageError),
            storage.open_reader(uri) as file,
            zipfile.ZipFile(file) as archive,
        ):
            self._end = archive.start_dir
            self._members = {item.filename: item for item in _checked_members(uri, archive)}

    def version(self, name: str) -> str:
        """Return text that changes when a member does; "" if there is no such member."""
        member = self._members.get(name)
        return f"{member.file_size} {member.CRC:08x}" if member else ""

    def read(self, name: str) -> bytes:
        """Return a member's content, after checking its length and checksum."""
        member = self._members.get(name)
        if member is None:
            raise MissingError(f"no such file: {name} in {self.uri}", fix="check that this is the right zip")
        try:
            if max(member.file_size, member.compress_size) > _MAX_BYTES:
                raise ValueError(f"{member.file_size} bytes exceed the limit for an image")
            name_length = len(member.orig_filename.encode("utf-8", "replace"))
            length = _HEADER + name_length + _SLACK + member.compress_size
            length = min(length, self._end - member.header_offset)
            if length < _HEADER:
                raise ValueError("its directory entry points outside the zip file")
            data = storage.read_range(self.uri, member.header_offset, length)
            if data[:4] != _SIGNATURE:
                raise ValueError("its header is not at the position in the directory")
            begin = _HEADER + int.from_bytes(data[26:28], "little") + int.from_bytes(data[28:30], "little")
            content = data[begin : begin + member.compress_size]
            if len(content) < member.compress_size:
                content = storage.read_range(self.uri, member.header_offset + begin, member.compress_size)
            if member.compress_type == zipfile.ZIP_DEFLATED:
                # One byte more than declared is enough to notice a bomb.
                content = zlib.decompressobj(-zlib.MAX_WBITS).decompress(content, member.file_size + 1)
            elif member.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"compressed with the unknown method {member.compress_type}")
            if len(content) != member.file_size or zlib.crc32(content) != member.CRC:
                raise ValueError("checksum mismatch")
            return content
        except (ValueError, zlib.error) as error:
            raise StorageError(f"{name} in {self.uri}: {error}", fix="download the zip again") from None


@contextmanager
def open_member(uri: str, name: str) -> Iterator[BufferedIOBase]:
    """Open a member of a zip as a stream."""
    failure = f"{name} in {uri} cannot be read"
    with _name_archive_errors(failure), zipfile.ZipFile(storage.local_copy(uri)) as archive:
        if name not in {item.filename for item in _checked_members(uri, archive)}:
            raise DataError(f"{failure}: there is no such file", fix="check that this is the right zip")
        with archive.open(name) as file:
            assert isinstance(file, BufferedIOBase)
            yield file
