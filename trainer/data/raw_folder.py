"""The files of a folder of raw images: plan, manifest, arrays of sizes and hashes, a table for each split.

A table is a Parquet file (https://parquet.apache.org) with one row an image, whose row groups are blocks of
bounded size: the unit of work, of memory and of dividing a data set among machines. Millions of images are
never in memory at once. No file names another by its whole URI: a data root may be moved, copied or mounted
elsewhere.
"""

import hashlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainer import storage
from trainer.base import typed_json
from trainer.base.errors import DamagedError, DataError, MissingError
from trainer.base.os_errors import refuse_want
from trainer.data.problem_counts import Cases
from trainer.data.sources.source import SOURCE_ROW

BLOCK = 1000
"""Images of a block."""

ROW = pa.schema([("image_id", pa.int64()), ("key", pa.string()), *SOURCE_ROW])
"""A row of a split's table: an id that is unique in the data set, a key that is unique in the split."""


@contextmanager
def new_table(uri: str) -> Iterator["TableWriter"]:
    """Give a writer of a table that appears whole under its URI when the block ends, or not at all.

    Raises:
        StorageError: it cannot be written.
    """
    known: list[str] = []
    with storage.new_file(uri, sha256=lambda: known[0], confirm=True) as path:
        with pq.ParquetWriter(path, ROW, compression="zstd") as file:
            writer = TableWriter(file)
            yield writer
            writer.flush()
        with path.open("rb") as written:
            known.append(hashlib.file_digest(written, "sha256").hexdigest())
        writer.sha256 = known[0]


class TableWriter:
    """Collects rows of any number and writes them in blocks of BLOCK rows."""

    def __init__(self, file: pq.ParquetWriter) -> None:
        self._file = file
        self._pending: list[pa.RecordBatch] = []
        self._count = 0
        self.rows = 0
        """Rows taken so far."""
        self.sha256 = ""
        """Of the file, when it is whole."""

    def add(self, batch: pa.RecordBatch) -> None:
        """Append rows of ROW."""
        self.rows += batch.num_rows
        self._pending.append(batch)
        self._count += batch.num_rows
        if self._count >= BLOCK:
            rows = self._gathered()
            whole = rows.num_rows - rows.num_rows % BLOCK
            self._file.write_table(rows.slice(0, whole), row_group_size=BLOCK)
            # Copied: a slice would keep the whole of it alive.
            self._pending = rows.slice(whole).combine_chunks().to_batches()
            self._count = rows.num_rows - whole

    def flush(self) -> None:
        """Write what is left."""
        if self._count:
            self._file.write_table(self._gathered(), row_group_size=BLOCK)
            self._pending, self._count = [], 0

    def _gathered(self) -> pa.Table:
        return pa.Table.from_batches(self._pending, ROW)


class Table:
    """A table that was written whole."""

    def __init__(self, uri: str, sha256: str = "") -> None:
        """Open it; one in an object store is copied to the local cache.

        Args:
            uri: the file.
            sha256: what its hash must be; "" where it is not known. A process compares it once.

        Raises:
            StorageError: it is missing or cannot be read; DamagedError: it is another one.
            DataError: it is no table.
        """
        self.uri = uri
        try:
            self._file = pq.ParquetFile(storage.local_copy(uri, sha256=sha256))
            sound = self._file.schema_arrow.equals(ROW)
        except (pa.ArrowException, OSError) as error:
            raise self._unread(error) from None
        if not sound:
            raise self._damaged("it has other columns")

    def __len__(self) -> int:
        """Rows."""
        return self._file.metadata.num_rows

    @property
    def blocks(self) -> int:
        """Blocks; all but the last have BLOCK rows."""
        return self._file.metadata.num_row_groups

    def batch(self, block: int, names: list[str]) -> pa.Table:
        """Return some columns of a block."""
        try:
            return self._file.read_row_group(block, columns=names)
        except (pa.ArrowException, OSError) as error:
            raise self._unread(error) from None

    def columns(self, block: int, names: list[str]) -> dict[str, list[Any]]:
        """Return some columns of a block as lists, by name."""
        return self.batch(block, names).to_pydict()

    def rows(self, block: int, positions: list[int] | None = None) -> list[dict[str, Any]]:
        """Return rows of a block as objects of Python; `positions` are those in the block."""
        group = self.batch(block, ROW.names)
        return (group if positions is None else group.take(positions)).to_pylist()

    def box_counts(self, block: int) -> np.ndarray:
        """Boxes of each row of a block, int64 [rows]."""
        lists = self.batch(block, ["boxes"]).column("boxes")
        return np.concatenate([np.diff(chunk.offsets.to_numpy()) for chunk in lists.chunks])

    def _unread(self, error: Exception) -> DataError:
        """Return the error for what cannot be read; want of memory is no damage, and is raised."""
        refuse_want(error, self.uri)
        return self._damaged(str(error))

    def _damaged(self, reason: str) -> DataError:
        return DataError(
            f"{self.uri} is damaged: {reason}", fix="run the command that made it again: it writes it anew"
        )


VERSION = 5
"""Raise it when the same source gives other raw tables."""

PLAN, MANIFEST = "plan.json", "manifest.json"
SUM = np.dtype([("place", "<u8"), ("bytes", "<i4"), ("sha256", "V32")])
"""One row an image by its id: digest of its place (see `image_keys.place`), bytes (0: not there), and hash
(32 zeros: not known)."""

_UNKNOWN = bytes(32)
_REMEDY = "run the same command again, or `kubedet data verify --repair {}`: both write it anew"


@dataclass(frozen=True)
class Category:
    """A class of the data."""

    id: int
    """Label, from 0."""
    name: str
    original_id: int | str = ""
    """Of the source."""


@dataclass(frozen=True)
class SplitCounts:
    """What a split holds."""

    images: int
    boxes: int


@dataclass(frozen=True)
class RawManifest:
    """What a source listed (kind "plan"); with its images stored, which of them there are (kind "raw")."""

    kind: str
    version: int
    fingerprint: str
    source: str
    images: str
    """URI of the folder of the images."""
    splits: dict[str, SplitCounts]
    categories: list[Category]
    hierarchy: dict[str, list[int]]
    """Labels of all categories above one, by its label as text, as JSON has it; one with none above it is
    left out."""
    problems: dict[str, Cases]
    tables: dict[str, str] = field(default_factory=dict)
    """sha256 of the table of each split."""
    warnings: list[str] | None = None
    """What is suspicious, see `trainer.data.plausibility`; None if it was not checked."""
    settings: dict[str, Any] | None = None
    """Keys of the section `data` that it was made with; None in files of before 0.2."""
    uri: str = ""
    """Of the folder."""
    content: str = ""
    """See `content_of`; empty of a plan."""
    sums: str = ""
    """See `digest_of`."""
    unfetched: int = 0
    """Images that the source did not give when it was asked."""
    data_version: str = ""
    """Name of these data, see `components.data_versions`."""

    @classmethod
    def load(cls, record: Any, where: str) -> "RawManifest":
        """Return what `to_json` gave; FormError if it is of another form."""
        return typed_json.load(cls, record, where, "run the download step again")

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON, without empty fields that are optional."""
        return {key: value for key, value in asdict(self).items() if value not in (None, "")}

    @property
    def listed_images(self) -> int:
        """Images of all splits."""
        return sum(split.images for split in self.splits.values())

    @property
    def listed_boxes(self) -> int:
        """Boxes of all splits."""
        return sum(split.boxes for split in self.splits.values())

    def table(self, split: str) -> Table:
        """Open the table of a split; see `Table`."""
        return Table(storage.join(self.uri, f"{split}.parquet"), self.tables.get(split, ""))

    def write(self) -> None:
        """Write it into its folder, without what says where that is.

        Raises:
            StorageError: it cannot be written.
        """
        stored = self.to_json() | {"images": f"images/{_last(self.images)}"}
        del stored["uri"]
        storage.write_json(storage.join(self.uri, PLAN if self.kind == "plan" else MANIFEST), stored)


def read_plan(folder: str) -> RawManifest:
    """Return the plan of a folder of raw images, with the URIs of both as they are now.

    Raises:
        StorageError: it is missing, cannot be read, or is damaged.
        DataError: it is of a newer version, or of another form.
    """
    return _read(folder, PLAN, "plan")


def read_manifest(folder: str) -> RawManifest:
    """Return the manifest of a folder of raw images, with URIs as they are now; see `read_plan`."""
    return _read(folder, MANIFEST, "raw")


def _read(folder: str, name: str, kind: str) -> RawManifest:
    place, remedy, uri = storage.join(folder, name), _REMEDY.format(folder), storage.absolute(folder)
    record = storage.read_json(place, storage.Form(kind, VERSION, remedy=remedy))
    root = storage.parent(storage.parent(uri))
    raw = typed_json.load(RawManifest, record | {"uri": uri}, place, remedy)
    return replace(raw, images=storage.join(root, "images", _last(raw.images)))


def _last(uri: str) -> str:
    return uri.rpartition("/")[2]


def content_of(sizes: np.ndarray) -> str:
    """Return 16 hex digits that tell which images are there, from the bytes of each (0: not there)."""
    return hashlib.sha256(sizes.astype("<i4").tobytes()).hexdigest()[:16]


def sizes_uri(raw: str, content: str) -> str:
    """Return where the bytes of each image are: a .npy file, int32 [images], 0 where one is not there.

    Args:
        raw: URI of the raw folder.
        content: see `content_of`.
    """
    return storage.join(raw, f"sizes-{content}.npy")


def read_sizes(raw: str, content: str) -> np.ndarray:
    """Return the bytes of each image by id - 1, int32; 0 where it is not to be had.

    Raises:
        DamagedError: they are not those that `content` tells.
        StorageError: they cannot be read.
    """
    uri = sizes_uri(raw, content)
    sizes = _array(uri, storage.read_bytes(uri))
    if content_of(sizes) != content:
        raise DamagedError(f"{uri} is damaged: it is not what its name says", fix=_REMEDY.format(raw))
    return sizes


def read_sums(raw: RawManifest) -> np.ndarray | None:
    """Return rows of SUM by id - 1; None of a manifest from before there were any.

    Raises:
        DamagedError: they are not those that the manifest tells.
        StorageError: they cannot be read.
    """
    if not raw.sums:
        return None
    uri = _sums_uri(raw.uri, raw.sums)
    try:
        return _array(uri, storage.read_bytes(uri, sha256=raw.sums))
    except DamagedError as error:
        raise DamagedError(error.message, fix=_REMEDY.format(raw.uri)) from None


def digest_of(sums: np.ndarray) -> str:
    """Return the sha256 that the file of rows of SUM has."""
    return hashlib.sha256(_bytes(sums)).hexdigest()


def write_sums(raw: str, sums: np.ndarray) -> None:
    """Write rows of SUM, in a file that is named by its sha256."""
    storage.write_bytes(_sums_uri(raw, digest_of(sums)), _bytes(sums), confirm=True)


def write_sizes(raw: str, sizes: np.ndarray) -> None:
    """Write the bytes of each image."""
    storage.write_bytes(sizes_uri(raw, content_of(sizes)), _bytes(sizes), confirm=True)


def known_hash(sums: np.ndarray | None, image_id: int) -> str:
    """Return the sha256 of an image in hexadecimal digits; "" where it is not known."""
    if sums is None:
        return ""
    digest = bytes(sums["sha256"][image_id - 1])
    return "" if digest == _UNKNOWN else digest.hex()


def hash_of(data: bytes) -> str:
    """Return the sha256 of an image's bytes in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def table_fault(raw: RawManifest) -> str:
    """Say which table of a plan or manifest is missing or damaged; "" where none is."""
    try:
        for split in raw.splits:
            uri = storage.join(raw.uri, f"{split}.parquet")
            storage.local_copy(uri, sha256=raw.tables.get(split, ""))
    except (DamagedError, MissingError) as error:
        return error.message
    return ""


def arrays_fault(raw: RawManifest) -> str:
    """Say which of a manifest's arrays is missing or damaged; "" where none is."""
    try:
        read_sizes(raw.uri, raw.content)
        read_sums(raw)
    except (DamagedError, MissingError) as error:
        return error.message
    return ""


def _sums_uri(raw: str, digest: str) -> str:
    return storage.join(raw, f"sums-{digest[:16]}.npy")


def _bytes(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def _array(uri: str, data: bytes) -> np.ndarray:
    try:
        return np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DamagedError(f"{uri} is damaged: {error}", fix=_REMEDY.format(storage.parent(uri))) from error
