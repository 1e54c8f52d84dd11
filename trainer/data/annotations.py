"""From a source's rows to the raw tables: labels, keys, ids, and a validation split where none is.

Labels are contiguous from 0 and the same in all splits; the source's ids are kept as
`original_id`. Boxes stay as the source has them: they are cleaned where the true sizes are known.
"""

import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainer import storage
from trainer.config import DataConfig
from trainer.data import keys
from trainer.data import problems as reasons
from trainer.data.problems import Problems
from trainer.data.sources.base import UNKNOWN, Category, Listing, Rows
from trainer.data.table import BLOCK, ROW, new_table
from trainer.errors import DataError

SPLITS = ("train", "val", "test")

_DROPPED = -2  # The label of a class that data.classes leaves out.


@dataclass
class Built:
    """What `build` made of a listing."""

    categories: list[dict[str, Any]]
    """Of all splits: id (the label), name, original_id."""
    splits: dict[str, dict[str, int]]
    """Rows and boxes of each table, as "images" and "boxes"."""


def build(listing: Listing, config: DataConfig, folder: str) -> Built:
    """Write `<folder>/<split>.parquet` for each split of a source's listing.

    Args:
        listing: what the source has; its `problems` grow.
        config: val_fraction and classes are used.
        folder: URI.

    Raises:
        DataError: unknown class names, no training images, or no box at all.
        StorageError: the folder cannot be written.
    """
    categories, labels = _select_classes(listing, config.classes)
    with tempfile.TemporaryDirectory(prefix="kubedet-") as temporary:
        drafts = {}
        for split, rows in listing.splits.items():
            drafts[split] = _draft(rows, labels, Path(temporary) / split)
        splits = {}
        first = 1
        for split, draft, chosen in _parts(drafts, config.val_fraction):
            splits[split] = _write(draft, chosen, first, storage.join(folder, f"{split}.parquet"))
            first += splits[split].images
    if "train" not in splits:
        raise DataError(
            "no training images", fix="name a source with a train split, or set data.val_fraction lower"
        )
    _check_classes(categories, splits["train"].boxes_of_label, listing.problems)
    return Built(
        categories, {name: {"images": part.images, "boxes": part.boxes} for name, part in splits.items()}
    )


@dataclass
class _Draft:
    """A split as it comes: labelled, but without ids, and keys may be those of two images."""

    path: Path
    keys: np.ndarray
    """uint64 [rows]: `keys.number` of each key."""
    fractions: np.ndarray
    """float64 [rows]: what decides which rows go to val."""


@dataclass
class _Written:
    """A split's table."""

    images: int
    boxes_of_label: Counter[int]

    @property
    def boxes(self) -> int:
        return self.boxes_of_label.total()


def _draft(rows: Rows, labels: np.ndarray, path: Path) -> _Draft:
    """Write a split's rows to a local file, once, as a source may be slow to read."""
    numbers: list[int] = []
    fractions: list[float] = []
    with pq.ParquetWriter(path, ROW, compression="lz4") as file:
        for batch in rows.batches():
            boxes = _labelled(batch.column("boxes"), labels)
            found = [keys.stem(name) for name in batch.column("file_name").to_pylist()]
            numbers += map(keys.number, found)
            fractions += (keys.hash_fraction(key, "val") for key in found)
            columns = [batch.column(name) for name in ROW.names[2:-1]]
            ids = pa.nulls(len(found), pa.int64())
            file.write_batch(pa.RecordBatch.from_arrays([ids, pa.array(found), *columns, boxes], schema=ROW))
    return _Draft(path, np.array(numbers, np.uint64), np.array(fractions))


def _labelled(boxes: pa.ListArray, labels: np.ndarray) -> pa.ListArray:
    """Return the boxes with labels in the place of the source's categories, dropped classes left out."""
    values = boxes.flatten()  # Without what a slice left behind.
    offsets = boxes.offsets.to_numpy()
    offsets = offsets - offsets[0]
    label = labels[values.field("category").to_numpy()]
    kept = label != _DROPPED
    fields = [values.field(index) for index in range(values.type.num_fields)]
    fields[0] = pa.array(label.astype(np.int32))
    relabelled = pa.StructArray.from_arrays(fields, fields=list(values.type)).filter(pa.array(kept))
    after = np.concatenate([[0], np.cumsum(kept)])[offsets]
    return pa.ListArray.from_arrays(pa.array(after.astype(np.int32)), relabelled)


def _parts(drafts: dict[str, _Draft], fraction: float) -> list[tuple[str, _Draft, np.ndarray]]:
    """Return the splits that are not empty: name, draft, and bool [rows], those that belong to it.

    Where there is no val a share of train becomes it. A hash of each key chooses, so the choice
    does not change when images are added; at least one image goes, one stays.
    """
    parts = {split: (draft, np.ones(len(draft.keys), bool)) for split, draft in drafts.items()}
    train = drafts.get("train")
    given = drafts.get("val")
    if train and len(train.keys) > 1 and fraction > 0 and (given is None or len(given.keys) == 0):
        goes = np.zeros(len(train.keys), bool)
        count = int((train.fractions < fraction).sum())
        goes[np.argsort(train.fractions, kind="stable")[: min(max(1, count), len(goes) - 1)]] = True
        parts |= {"train": (train, ~goes), "val": (train, goes)}
    return [(split, *parts[split]) for split in SPLITS if split in parts and parts[split][1].any()]


def _write(draft: _Draft, chosen: np.ndarray, first: int, uri: str) -> _Written:
    """Write a split's table: ids from `first` on, and a key of its own for each image."""
    numbers, counts = np.unique(draft.keys, return_counts=True)
    twice = np.isin(draft.keys, numbers[counts > 1])
    written = _Written(0, Counter())
    with new_table(uri) as table, pq.ParquetFile(draft.path) as file:
        at = 0
        for batch in file.iter_batches(BLOCK):
            here = slice(at, at + len(batch))
            at += len(batch)
            rows = _identified(batch, twice[here], chosen[here], first + written.images)
            table.add(rows)
            written.images += len(rows)
            label, count = np.unique(rows["boxes"].flatten().field("category"), return_counts=True)
            written.boxes_of_label.update(dict(zip(label.tolist(), count.tolist(), strict=True)))
    return written


def _identified(
    batch: pa.RecordBatch, clashing: np.ndarray, chosen: np.ndarray, first: int
) -> pa.RecordBatch:
    """Return the chosen rows with ids from `first` on, and keys that no other image has."""
    if clashing.any():
        found = zip(batch["key"].to_pylist(), batch["file_name"].to_pylist(), clashing, strict=True)
        unique = [keys.told_apart(key, name) if clash else key for key, name, clash in found]
        batch = batch.set_column(1, ROW.field(1), pa.array(unique))
    batch = batch.filter(pa.array(chosen))
    return batch.set_column(0, ROW.field(0), pa.array(first + np.arange(len(batch))))


def _select_classes(listing: Listing, wanted: list[str]) -> tuple[list[dict[str, Any]], np.ndarray]:
    """Return the categories kept, as JSON, and the label of each of the source's categories.

    The labels are an array whose last item, index -1, is for UNKNOWN.
    """
    names = [category.name for category in listing.categories]
    if not names:
        raise DataError("the source lists no classes", fix="add categories to its annotations")
    twice = [name for name, count in Counter(wanted).items() if count > 1]
    unknown = [name for name in wanted if name not in names]
    if unknown or twice:
        what = f"classes unknown: {', '.join(unknown)}" if unknown else f"classes twice: {', '.join(twice)}"
        raise DataError(f"data.classes names {what}", fix=f"the source has: {', '.join(names[:100])}")
    kept: list[Category] = [
        category for name in (wanted or names) for category in listing.categories if category.name == name
    ]
    position = {category: label for label, category in enumerate(kept)}
    categories = [
        {"id": label, "name": category.name, "original_id": category.original_id}
        for label, category in enumerate(kept)
    ]
    labels = [position.get(category, _DROPPED) for category in listing.categories]
    return categories, np.array([*labels, UNKNOWN])


def _check_classes(categories: list[dict[str, Any]], counts: Counter[int], problems: Problems) -> None:
    """Note the classes that have no box in train; raise DataError if none has one."""
    empty = [category["name"] for category in categories if counts[category["id"]] == 0]
    if len(empty) == len(categories):
        raise DataError(
            f"no training image has a box of {', '.join(empty[:20])}",
            fix="check that the annotations belong to these images, or name other data.classes",
        )
    for name in empty:
        problems.add(reasons.CLASS_WITHOUT_BOXES, name)
