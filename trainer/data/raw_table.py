"""The annotations of a split as a table: one row an image, in blocks of a bounded size.

A Parquet file (https://parquet.apache.org) whose row groups are the blocks: the unit of work, of
memory and of dividing a data set among machines. Millions of images are never in memory at once.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainer import storage
from trainer.base.errors import DataError
from trainer.base.os_errors import refuse_want
from trainer.data.sources.row_format import SOURCE_ROW

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

    def columns(self, block: int, names: list[str]) -> dict[str, list[Any]]:
        """Return some columns of a block, by name."""
        try:
            return self._file.read_row_group(block, columns=names).to_pydict()
        except (pa.ArrowException, OSError) as error:
            raise self._unread(error) from None

    def batch(self, block: int, names: list[str]) -> pa.Table:
        """Return some columns of a block."""
        try:
            return self._file.read_row_group(block, columns=names)
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(str(error)) from None

    def rows(self, block: int, positions: list[int] | None = None) -> list[dict[str, Any]]:
        """Return rows of a block as objects of Python; `positions` are those in the block."""
        try:
            group = self._file.read_row_group(block)
        except (pa.ArrowException, OSError) as error:
            raise self._unread(error) from None
        return (group if positions is None else group.take(positions)).to_pylist()

    def box_counts(self, block: int) -> np.ndarray:
        """Boxes of each row of a block, int64 [rows]."""
        lists = self._file.read_row_group(block, columns=["boxes"]).column("boxes")
        return np.concatenate([np.diff(chunk.offsets.to_numpy()) for chunk in lists.chunks])

    def _unread(self, error: Exception) -> DataError:
        """Return the error for what cannot be read; want of memory is no damage, and is raised."""
        refuse_want(error, self.uri)
        return self._damaged(str(error))

    def _damaged(self, reason: str) -> DataError:
        return DataError(
            f"{self.uri} is damaged: {reason}", fix="run the command that made it again: it writes it anew"
        )
