"""Open Images' classes: their MIDs (such as /m/01g317), names and hierarchy."""

import csv
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainer import storage
from trainer.base.errors import DataError
from trainer.data.sources.source import UNKNOWN, Category


def read_descriptions(uri: str) -> list[Category]:
    """Read all classes, in the file's order: display name, and MID as original_id.

    Args:
        uri: CSV of a MID and a display name, with or without a header.

    Raises:
        DataError: it has another form.
        StorageError: it is missing.
    """
    try:
        rows = [row for row in csv.reader(io.StringIO(storage.read_bytes(uri).decode("utf-8-sig"))) if row]
    except (UnicodeDecodeError, csv.Error):
        rows = []
    if rows and not rows[0][0].startswith("/"):
        del rows[0]
    if not rows or any(len(row) != 2 or not row[0].startswith("/") or not row[1] for row in rows):
        raise DataError(
            f"{uri} does not hold lines of a MID and a display name",
            fix="take Open Images' class descriptions of boxable classes",
        )
    return [Category(name, mid) for mid, name in rows]


def select(described: list[Category], names: tuple[str, ...], uri: str) -> list[Category]:
    """Return the classes of some names, in that order.

    Raises:
        DataError: one is not described in the file `uri`.
    """
    by_name = {category.name: category for category in described}
    absent = [name for name in names if name not in by_name]
    if absent:
        raise DataError(
            f"{uri} describes no class {', '.join(absent[:10])}", fix="take the file of V7's boxable classes"
        )
    return [by_name[name] for name in names]


def read_hierarchy(uri: str) -> dict[str, set[str]]:
    """Return the MIDs above each MID, from the JSON of nested Subcategory lists.

    Raises:
        DataError: it has another form.
        StorageError: it is missing, or no JSON.
    """
    above: dict[str, set[str]] = {}

    def visit(node: dict[str, Any], path: tuple[str, ...]) -> None:
        mid = node["LabelName"]
        above.setdefault(mid, set()).update(path)
        for child in node.get("Subcategory", []):
            visit(child, (*path, mid))

    try:
        visit(storage.read_json(uri), ())
    except (TypeError, KeyError, AttributeError, RecursionError):
        raise DataError(
            f"{uri} is no hierarchy of classes", fix="take Open Images' bbox_labels_600_hierarchy.json"
        ) from None
    return above


def inverted(above: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the MIDs below each MID from those above each."""
    below: dict[str, set[str]] = {}
    for mid, higher in above.items():
        for one in higher:
            below.setdefault(one, set()).add(mid)
    return below


@dataclass(frozen=True)
class Meaning:
    """The categories that a box of each MID counts for: none, its own, or also those above it."""

    mids: pa.Array
    """All MIDs that are known."""
    counts: np.ndarray
    """int64 [MIDs + 1]: categories of each MID; the last is for MIDs that are not known."""
    labels: np.ndarray
    """int64 [sum of counts]: the categories."""

    @classmethod
    def of(
        cls, described: list[Category], categories: list[Category], above: dict[str, set[str]] | None = None
    ) -> "Meaning":
        """Build it from all classes, the kept ones, and the hierarchy if it is applied."""
        position = {category.original_id: index for index, category in enumerate(categories)}
        mids = [str(category.original_id) for category in described]
        groups = [
            [position[name] for name in (mid, *sorted((above or {}).get(mid, ()))) if name in position]
            for mid in mids
        ]
        groups.append([UNKNOWN])
        labels = np.array([label for group in groups for label in group], np.int64)
        return cls(pa.array(mids, pa.string()), np.array([len(group) for group in groups]), labels)

    def apply(self, mids: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """Return row and category of each box that rows of these MIDs give, in the rows' order."""
        indices = pc.index_in(mids, self.mids).fill_null(len(self.mids)).to_numpy(zero_copy_only=False)
        counts = self.counts[indices]
        rows = np.repeat(np.arange(len(indices)), counts)
        nth = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        first = np.cumsum(self.counts) - self.counts
        return rows, self.labels[first[indices][rows] + nth]
