"""Files of a source: a folder's listing that finds files by name; many small files, read in parallel."""

import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from operator import itemgetter

import numpy as np
import pyarrow as pa

from trainer import storage
from trainer.base import worker_pool
from trainer.base.errors import MissingError

_READERS = 16
_TEXTS = 1000
"""Files that are in memory at once."""


def read_all(uris: Iterable[str]) -> Iterator[bytes | MissingError]:
    """Yield the content of files in their order; the error for one that is missing.

    Raises:
        StorageError: one cannot be reached.
    """
    rest = iter(enumerate(uris))
    while batch := list(islice(rest, _TEXTS)):
        workers = 1 if storage.is_local(batch[0][1]) else _READERS
        texts = sorted(worker_pool.run(_read, batch, workers, processes=False), key=itemgetter(0))
        yield from (text for _, text in texts)


def _read(task: tuple[int, str]) -> tuple[int, bytes | MissingError]:
    try:
        return task[0], storage.read_bytes(task[1])
    except MissingError as error:
        return task[0], error


_BATCH = 10_000
_COLUMNS = pa.schema([("name", pa.large_binary()), ("version", pa.large_string())])


class Folder:
    """Finds a file by its name, or by its folded name (case, extension or accents ignored)."""

    def __init__(
        self, uri: str, fold: Callable[[str], str], accepts: Callable[[str], bool] = lambda name: True
    ) -> None:
        """List the files, those in folders below left out.

        Args:
            uri: of the folder; one that is missing has no files.
            fold: folds a name; names with the same result count as equal.
            accepts: tells by its name whether a file is listed.

        Raises:
            StorageError: it cannot be read.
        """
        self.uri = uri
        self._fold = fold
        batches = list(_listed(uri, accepts))
        files = pa.Table.from_batches(batches, _COLUMNS).sort_by("name").combine_chunks()
        batches.clear()
        self._names, self._versions = (files[column].combine_chunks() for column in _COLUMNS.names)
        hashes = np.array(array("q", (hash(fold(name)) for name in self.names())), np.int64)
        self._order = np.argsort(hashes, kind="stable").astype(np.int32)
        self._hashes = hashes[self._order]

    def __len__(self) -> int:
        return len(self._names)

    def names(self) -> Iterator[str]:
        """Yield the names, sorted."""
        for first in range(0, len(self._names), _BATCH):
            yield from map(os.fsdecode, self._names.slice(first, _BATCH).to_pylist())

    def find(self, name: str, folded: str | None = None) -> tuple[str, str] | None:
        """Return name and version of a file; None if there is none.

        Args:
            name: of this name if there is one, else the first by name that counts as equal.
            folded: what `fold` gives of it; by default that of `name`.
        """
        folded = self._fold(name) if folded is None else folded
        folded_hash = hash(folded)
        match: tuple[str, str] | None = None
        at = int(np.searchsorted(self._hashes, folded_hash))
        while at < len(self._hashes) and self._hashes[at] == folded_hash:
            row = int(self._order[at])
            actual = os.fsdecode(self._names[row].as_py())
            if self._fold(actual) == folded and (match is None or actual == name):
                match = actual, self._versions[row].as_py()
            at += 1
        return match


def _listed(uri: str, accepts: Callable[[str], bool]) -> Iterator[pa.RecordBatch]:
    names: list[bytes] = []
    versions: list[str] = []
    for name, state in storage.scan(uri, recursive=False):
        if accepts(name):
            names.append(os.fsencode(name))
            versions.append(f"{state.size} {state.version}")
        if len(names) == _BATCH:
            yield pa.RecordBatch.from_pydict({"name": names, "version": versions}, schema=_COLUMNS)
            names, versions = [], []
    yield pa.RecordBatch.from_pydict({"name": names, "version": versions}, schema=_COLUMNS)
