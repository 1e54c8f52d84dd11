"""Reads Open Images' boxes from their CSV, a block at a time, as rows of images.

Columns that are needed: ImageID, LabelName (a MID), XMin, XMax, YMin, YMax (shares of the stored
image's sides), IsGroupOf (1: one box around many, a crowd). They are found by name: the file of train
has 21 columns, the others 13. The rows of an image must follow each other, as they do in the published
files; a file that is not too large is sorted first.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainer import storage
from trainer.base.errors import DataError
from trainer.data.sources.openimages_classes import Meaning
from trainer.data.sources.openimages_labels import Verified, read_columns, read_orientations
from trainer.data.sources.row_format import BOX, SOURCE_ROW
from trainer.data.sources.source import Category

_CORNERS = ("XMin", "XMax", "YMin", "YMax")
_COLUMNS = {
    "ImageID": pa.string(),
    "LabelName": pa.string(),
    **dict.fromkeys(_CORNERS, pa.float64()),
    "IsGroupOf": pa.int8(),
}
_STORED = 1  # Exif orientation: boxes match the stored pixels, whatever the file's Exif block says.
_ROWS = 10_000
_SORTABLE = 128 * 1024 * 1024
"""Bytes of a CSV that is sorted in memory."""


@dataclass(frozen=True)
class BoxRows:
    """The images of a split of Open Images."""

    uri: str
    """CSV of the boxes."""
    pixels: str
    """URI of the folder with the images."""
    categories: list[Category]
    present: Meaning
    """What categories a box of each class counts for."""
    absent: Meaning
    """What categories are not in an image that a class is not in."""
    listed: frozenset[str] | None = field(default=None, repr=False)
    """Ids of the images to take; None takes all that have a box or a verified class."""
    rotations: str = ""
    """CSV with each image's Rotation; empty leaves images as they are stored."""
    labels: str = ""
    """CSV with the verified classes of images; empty takes none."""

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield rows of SOURCE_ROW: images with boxes in the file's order, then those without.

        Raises:
            DataError: a column is missing, a value is no number, or an image's rows are apart.
            StorageError: a file is missing.
        """
        verified = Verified(self.labels, self.present, self.absent, self.categories) if self.labels else None
        orientations = read_orientations(self.rotations) if self.rotations else {}
        form = partial(self._rows, verified=verified, orientations=orientations)
        rest = set(self.listed) if self.listed is not None else verified.ids() if verified else set()
        seen: list[np.ndarray] = []
        read = read_columns(self.uri, _COLUMNS)
        if storage.size(self.uri) <= _SORTABLE:
            read = _sorted(read)
        for rows in _whole_images(read):
            starts = _starts(rows["ImageID"])
            ids = rows["ImageID"].take(pa.array(starts))
            seen.append(np.fromiter(map(hash, ids.to_pylist()), np.int64, len(ids)))
            batch = form(ids, self._boxes(rows, np.append(starts, len(rows))))
            if self.listed is not None:
                batch = batch.filter(pa.array([image_id in self.listed for image_id in ids.to_pylist()]))
            rest.difference_update(ids.to_pylist())
            yield batch
        hashes = np.concatenate(seen) if seen else np.zeros(0)
        if len(np.unique(hashes)) < len(hashes):
            raise DataError(
                f"{self.uri}: the rows of an image do not follow each other", fix="sort the file by ImageID"
            )
        without = sorted(rest)
        for first in range(0, len(without), _ROWS):
            ids = pa.array(without[first : first + _ROWS])
            yield form(ids, pa.array([[]] * len(ids), pa.list_(BOX)))

    def _boxes(self, rows: pa.RecordBatch, offsets: np.ndarray) -> pa.ListArray:
        """Return the boxes of each image; `offsets` are where its rows begin, and the last one's end."""
        row_index, labels = self.present.apply(rows["LabelName"])
        x, right, y, below = (rows[name].to_numpy(zero_copy_only=False)[row_index] for name in _CORNERS)
        crowd = pc.equal(rows["IsGroupOf"], 1).fill_null(False).to_numpy(zero_copy_only=False)[row_index]
        fields = [
            labels.astype(np.int32), x, y, right - x, below - y, np.zeros(len(row_index)),
            crowd.astype(np.int8),
        ]  # fmt: skip
        boxes = pa.StructArray.from_arrays([*map(pa.array, fields)], fields=list(BOX))
        after = np.searchsorted(row_index, offsets)
        return pa.ListArray.from_arrays(pa.array(after.astype(np.int32)), boxes)

    def _rows(
        self, ids: pa.Array, boxes: pa.ListArray, verified: Verified | None, orientations: dict[str, int]
    ) -> pa.RecordBatch:
        """Return images with their boxes as rows of SOURCE_ROW."""
        count = len(ids)
        nothing = pa.repeat("", count)
        share = pa.repeat(pa.scalar(1, pa.int32()), count)
        names = pc.binary_join_element_wise(ids, ".jpg", "")
        turned = (
            [orientations.get(image_id, _STORED) for image_id in ids.to_pylist()] if orientations else None
        )
        columns = {
            "file_name": names,
            "origin": pc.binary_join_element_wise(f"{self.pixels}/", names, ""),
            "version": nothing,
            "width": share,
            "height": share,
            "orientation": pa.array(turned or [_STORED] * count, pa.int8()),
            "original_id": pc.binary_join_element_wise('"', ids, '"', ""),
            "fault_reason": nothing,
            "fault_detail": nothing,
            "extra": pa.array(verified.of(ids.to_pylist()), pa.string()) if verified else nothing,
            "boxes": boxes,
        }
        return pa.RecordBatch.from_pydict(columns, schema=SOURCE_ROW)


def _sorted(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield all rows sorted by ImageID; those of an image keep their order."""
    collected = list(batches)
    if collected:
        rows = pa.concat_batches(collected)
        collected.clear()
        order = pc.sort_indices(rows["ImageID"])
        for first in range(0, len(order), _ROWS):
            yield rows.take(order.slice(first, _ROWS))


def _whole_images(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the rows so that those of an image, which follow each other, are never in two parts."""
    rest: pa.RecordBatch | None = None
    for batch in batches:
        rows = batch if rest is None else pa.concat_batches([rest, batch])
        last = int(_starts(rows["ImageID"])[-1])
        if last:
            yield rows.slice(0, last)
        # Copied: a slice would keep the whole block alive.
        rest = pa.concat_batches([rows.slice(last)])
    if rest is not None:
        yield rest


def _starts(ids: pa.Array) -> np.ndarray:
    """Return where each run of equal ids begins; there is at least one id."""
    differs = pc.not_equal(ids.slice(1), ids.slice(0, len(ids) - 1)).fill_null(True)
    return np.concatenate([[0], np.flatnonzero(differs.to_numpy(zero_copy_only=False)) + 1])
