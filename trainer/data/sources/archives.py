"""A zip or tar of a data set of any kind: unpacked into a temporary folder, and read as that folder.

The archive is not trusted: names that lead out of the folder, links and devices are refused, and so is more
than the disk holds or than an archive of its size can reasonably hold. The folder is removed when the process
ends.
"""

import hashlib
import os
import shutil
import tarfile
import threading
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import IO

import pyarrow as pa

from trainer import storage
from trainer.base.errors import DataError
from trainer.base.os_errors import explained
from trainer.base.temporary_folders import TemporaryFolder
from trainer.data.problem_counts import Problems
from trainer.data.sources.coco import CocoSource
from trainer.data.sources.recognition import KINDS, kind_of, refuse_foreign
from trainer.data.sources.source import (
    AS_PUBLISHED,
    SOURCE_ROW,
    Listing,
    Reading,
    Rows,
    Source,
    refuse_reading,
)
from trainer.data.sources.zip_members import archive_explained, checked_members

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


@dataclass(frozen=True)
class ArchiveSource(Source):
    """A data set in a zip or tar."""

    kind: str
    """One of `recognition.KINDS`; "" is to be seen when it is unpacked."""
    location: str
    """URI of the archive."""
    reading: Reading = AS_PUBLISHED
    origins_are_uris = False

    @property
    def uri(self) -> str:
        """Name the archive and its kind, for which it is unpacked where nobody told."""
        return f"{self.kind or self._kind_and_root(unpack(self.location))[0]}:{self.location}"

    @property
    def images_uri(self) -> str:
        return f"archive:{self.location}"

    def listing(self) -> Listing:
        """Unpack the archive and list what is in it.

        Raises:
            DataError: it cannot be unpacked, or what is in it cannot be used.
            StorageError: it cannot be reached.
        """
        unpacked = unpack(self.location)
        try:
            listing = self._inner(unpacked).listing()
        except DataError as error:
            raise DataError(self._outside(error.message, unpacked), fix=error.fix) from None
        lines = [f"{name} {version}\n" for name, version in sorted(unpacked.versions.items())]
        digest = hashlib.sha256(f"{self.uri}\n".encode())
        digest.update("".join(lines).encode("utf-8", "surrogateescape"))
        splits = {
            split: ArchivedRows(rows, self, unpacked, listing.problems)
            for split, rows in listing.splits.items()
        }
        self.name_outside(listing.problems, unpacked)
        return replace(listing, splits=splits, state=digest.hexdigest())

    def read(self, origin: str) -> bytes:
        archive, _, name = origin.partition("#")
        if archive != self.location or not name:
            return storage.read_bytes(origin)
        return storage.read_bytes(storage.join(unpack(self.location).folder, name))

    def name_outside(self, problems: Problems, unpacked: Unpacked) -> None:
        """Let examples name the archive, not the folder that it was unpacked into."""
        for examples in problems.examples.values():
            examples[:] = [self._outside(example, unpacked) for example in examples]

    def place(self, origin: str, version: str, unpacked: Unpacked) -> tuple[str, str]:
        """Return an image's origin and version as they are on any machine."""
        folder = f"{unpacked.folder}/"
        if not origin.startswith(folder):
            return origin, version
        name = origin.removeprefix(folder)
        return f"{self.location}#{name}", unpacked.versions[name]

    def _outside(self, text: str, unpacked: Unpacked) -> str:
        return text.replace(unpacked.folder, self.location)

    def _inner(self, unpacked: Unpacked) -> Source:
        kind, root = self._kind_and_root(unpacked)
        source = KINDS[kind](root, unpacked.folder)
        if isinstance(source, CocoSource):
            return replace(source, reading=self.reading)
        refuse_reading(source, self.reading)
        return source

    def _kind_and_root(self, unpacked: Unpacked) -> tuple[str, str]:
        """Return the kind of what is in the archive, and its folder: often one that holds all."""
        roots = [unpacked.folder, *_lone_folders(unpacked)]
        for root in reversed(roots):
            kind = kind_of(root)
            refuse_foreign(root, kind)
            if kind and self.kind in ("", kind):
                return kind, root
        if self.kind:
            return self.kind, roots[-1]
        raise DataError(
            f"{self.location} holds no data set that is known",
            fix="pack a folder with a COCO JSON, VOC's XML files, or a YOLO data.yaml, and its images",
        )


@dataclass
class ArchivedRows:
    """The images of a split, named by their place in the archive."""

    rows: Rows
    source: ArchiveSource
    unpacked: Unpacked = field(repr=False)
    problems: Problems = field(repr=False)

    def batches(self) -> Iterator[pa.RecordBatch]:
        for batch in self.rows.batches():
            pairs = zip(batch["origin"].to_pylist(), batch["version"].to_pylist(), strict=True)
            places = [self.source.place(*pair, self.unpacked) for pair in pairs]
            columns = {name: batch[name] for name in SOURCE_ROW.names}
            columns["origin"] = pa.array([origin for origin, _ in places], pa.string())
            columns["version"] = pa.array([version for _, version in places], pa.string())
            details = batch["fault_detail"].to_pylist()
            outside = [text.replace(self.unpacked.folder, self.source.location) for text in details]
            columns["fault_detail"] = pa.array(outside, pa.string())
            yield pa.RecordBatch.from_pydict(columns, schema=SOURCE_ROW)
        self.source.name_outside(self.problems, self.unpacked)


def _lone_folders(unpacked: Unpacked) -> Iterator[str]:
    """Yield the folders that hold all of an archive, the outer ones first."""
    parents = [name.split("/")[:-1] for name in unpacked.versions]
    for depth in range(min(map(len, parents), default=0)):
        if len({tuple(parts[: depth + 1]) for parts in parents}) > 1:
            return
        yield "/".join([unpacked.folder, *parents[0][: depth + 1]])
