"""Reads, checks and writes the files of a folder of raw images.

<raw>/plan.json                     what the source lists
<raw>/<split>.parquet               a table of images and annotations
<raw>/fetched/<part>-<sha256>.parquet   which images of a part were fetched
<raw>/images-<content>.npy          path digest, size and sha256 of each image
<raw>/failed.csv                    the images that could not be fetched, and why
<raw>/manifest.json                 written last

A table is a Parquet file with one row per image; its row groups are blocks of bounded size. No file contains
an absolute URI of another, so a data root may be moved, copied or mounted elsewhere.
"""

import hashlib
import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainer import storage
from trainer.base.errors import DamagedError, DataError
from trainer.base.os_errors import raise_if_exhausted
from trainer.data.raw_manifest import MANIFEST, RawManifest
from trainer.data.sources.source import SOURCE_ROW

VERSION: Literal[7] = 7  # Increase it, also in `RawManifest`, if the same source would give other raw tables.

BLOCK = 1000  # Rows per block.

ROW = pa.schema([("image_id", pa.int64()), ("key", pa.string()), *SOURCE_ROW])
"""A row of a split's table; ids are unique in the data set, keys are unique in the split."""

FETCHED = np.dtype([("place", "<u8"), ("bytes", "<i4"), ("sha256", "V32")])
"""One row per image: digest of its path (see `image_keys.image_path`), size (0: not fetched), and hash."""

_REMEDY = "run the same command again, or `kubedet data verify --repair {}`: both rewrite it"


def write_table(uri: str, batches: Iterable[pa.RecordBatch]) -> str:
    """Write rows of ROW as a table with blocks of BLOCK rows; return the sha256 of the file."""
    sha256 = ""
    with storage.new_file(uri, sha256=lambda: sha256, confirm=True) as path:
        with pq.ParquetWriter(path, ROW, compression="zstd") as file:
            pending = ROW.empty_table()
            for batch in batches:
                pending = pa.concat_tables([pending, pa.Table.from_batches([batch])])
                ready = len(pending) - len(pending) % BLOCK
                if ready:
                    file.write_table(pending.slice(0, ready), row_group_size=BLOCK)
                    # Copy the rest, because a slice would keep all rows in memory.
                    pending = pa.Table.from_batches(pending.slice(ready).combine_chunks().to_batches(), ROW)
            if len(pending):
                file.write_table(pending, row_group_size=BLOCK)
        with path.open("rb") as written:
            sha256 = hashlib.file_digest(written, "sha256").hexdigest()
    return sha256


class RawTable:
    """Reads a table of raw annotations."""

    def __init__(self, uri: str, sha256: str = "") -> None:
        """Open a table; one in an object store is cached. `sha256` is checked unless it is ""."""
        self.uri = uri
        with self._translate_errors():
            self._file = pq.ParquetFile(storage.local_copy(uri, sha256=sha256))
            if not self._file.schema_arrow.equals(ROW):
                raise pa.ArrowInvalid("its columns are different")
        self.block_count = self._file.metadata.num_row_groups  # All but the last have BLOCK rows.

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self._file.metadata.num_rows)

    def read_block(self, block: int, names: list[str] | None = None) -> pa.Table:
        """Read a block, or only the columns in `names`."""
        with self._translate_errors():
            return self._file.read_row_group(block, columns=names)

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError) as error:
            raise_if_exhausted(error, self.uri)  # A lack of memory is not damage.
            fix = "run the command that wrote this table again"
            raise DataError(f"{self.uri} is damaged: {error}", fix=fix) from None


def open_table(raw: RawManifest, split: str) -> RawTable:
    """Open the table of a split."""
    return RawTable(storage.join(raw.uri, f"{split}.parquet"), raw.tables.get(split, ""))


def read_manifest(folder: str, name: str = MANIFEST) -> RawManifest:
    """Read the manifest of a folder of raw images, or its PLAN; set the folder's current URIs.

    Raises:
        StorageError: it is missing, cannot be read, or is damaged.
        DataError: it has another version, or unexpected content.
    """
    place, remedy, uri = storage.join(folder, name), _REMEDY.format(folder), storage.absolute(folder)
    raw = storage.read_model(place, RawManifest, remedy)
    root = storage.parent(storage.parent(uri))
    return replace(raw, uri=uri, images=storage.join(root, "images", raw.images.rpartition("/")[2]))


def image_table_uri(raw: str, content: str) -> str:
    """Return the URI of the table of images, a .npy file with rows of FETCHED."""
    return f"{raw}/images-{content}.npy"


def read_image_table(raw: RawManifest) -> np.ndarray:
    """Read the rows of FETCHED; the index is the image id - 1."""
    uri, remedy = image_table_uri(raw.uri, raw.content), _REMEDY.format(raw.uri)
    data = storage.read_bytes(uri)
    if hashlib.sha256(data).hexdigest()[: len(raw.content)] != raw.content:
        raise DamagedError(f"{uri} is damaged: its hash differs from its name", fix=remedy)
    return parse_npy(uri, data, remedy)


def write_image_table(raw_uri: str, images: np.ndarray) -> str:
    """Write rows of FETCHED; return their digest, 16 hex digits, which is part of the file's name."""
    data = to_npy(images)
    content = hashlib.sha256(data).hexdigest()[:16]
    storage.write_bytes(image_table_uri(raw_uri, content), data, confirm=True)
    return content


def to_npy(array: np.ndarray) -> bytes:
    """Encode an array as a .npy file."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def parse_npy(uri: str, data: bytes, remedy: str) -> np.ndarray:
    """Decode a .npy file; raise DamagedError with this remedy if it is invalid."""
    try:
        buffer = io.BytesIO(data)
        array: np.ndarray = np.load(buffer, allow_pickle=False)
        if extra := len(buffer.read()):
            raise ValueError(f"{extra:,} bytes follow its array")
        return array
    except (ValueError, EOFError) as error:
        raise DamagedError(f"{uri} is damaged: {error}", fix=remedy) from error
