"""The rows of a COCO JSON: boxes come in any order, and are grouped by image on disk."""

import json
from array import array
from collections.abc import Callable, Iterator
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np
import pyarrow as pa

from trainer.data import problem_counts as reasons
from trainer.data.images import SHARES_UPRIGHT
from trainer.data.problem_counts import Problems
from trainer.data.sources.coco_boxes import box_of
from trainer.data.sources.coco_images import CocoImages, integer_like, positive
from trainer.data.sources.coco_json import CocoFile
from trainer.data.sources.row_format import BOX, ROWS, batch_of
from trainer.data.sources.source import AS_PUBLISHED, UNKNOWN, Category, Entry, Reading

_PART = 16 * ROWS
"""Images whose boxes are in memory at once."""

_PENDING = 100_000
"""Boxes that are gathered before they go to the disk."""

_UNLISTED = 1000
"""Unlisted categories that are counted one by one."""

_EXCERPT = 120
"""Characters of an annotation in a message."""

_RECORD = np.dtype([("image", "<i4"), ("category", "<i4"), ("values", "<f8", 5), ("crowd", "i1")])


class CocoRows:
    """The images of one file with their boxes. No more than those of some thousand are in memory."""

    def __init__(
        self,
        file: CocoFile,
        images: CocoImages,
        categories: list[Category],
        problems: Problems,
        place: Callable[[Entry], object],
        reading: Reading = AS_PUBLISHED,
    ) -> None:
        """Set the file and its images.

        Args:
            file: the COCO JSON.
            images: those of the file.
            categories: those of all files; a box of another one is of an unknown category.
            problems: grows when the rows are gone through for the first time.
            place: sets an image's `origin` and `version`, or its `fault`.
            reading: how boxes are read.
        """
        self._reading = reading
        self._file, self._images, self._place = file, images, place
        self._positions = {category.original_id: index for index, category in enumerate(categories)}
        self._problems: Problems | None = problems

    def __len__(self) -> int:
        return self._images.count

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield rows of SOURCE_ROW.

        Raises:
            DataError: the annotations are not of their form.
        """
        with TemporaryFile(buffering=0) as file:
            boxes = self._boxes(file)
            for entries in self._images.entries():
                for entry in entries:
                    self._place(entry)
                    if self._reading.box_format == "normalised":
                        entry.width, entry.height = SHARES_UPRIGHT
                yield batch_of(entries, next(boxes))
        self._problems = None

    def _boxes(self, file: IO[bytes]) -> Iterator[pa.ListArray]:
        """Yield the boxes of ROWS images after ROWS images."""
        parts = _Parts(file, self._images.count)
        for records in self._records():
            parts.add(records)
        for part in range(parts.count):
            records = parts.read(part)
            lists = _lists(records, part * _PART, min(_PART, self._images.count - part * _PART))
            for first in range(0, len(lists), ROWS):
                yield lists.slice(first, ROWS)

    def _records(self) -> Iterator[np.ndarray]:
        """Yield the boxes as they come, those of unknown images left out, as records."""
        pending = _Pending()
        for item in self._file.items("annotations"):
            category = item.get("category_id")
            box = box_of(item, self._reading)
            if isinstance(box, str):
                self._note(box, f"{_excerpt(item)} in {self._file.uri}")
                continue
            position = self._positions.get(category, UNKNOWN) if isinstance(category, int) else UNKNOWN
            if position == UNKNOWN and integer_like(category) in self._positions:
                self._note(
                    reasons.BOX_CATEGORY_ID_TYPE, f"category_id {json.dumps(category)} in {self._file.uri}"
                )
                continue
            pending.ids.append(item.get("image_id"))
            pending.categories.append(position)
            if (
                position == UNKNOWN
                and self._problems is not None
                and len(self._problems.unlisted) < _UNLISTED
            ):
                self._problems.unlisted[json.dumps(category)[:40]] += 1
            pending.values.extend((*box, positive(item.get("area"))))
            pending.crowds.append(item.get("iscrowd") in (1, True))
            if len(pending.ids) == _PENDING:
                yield self._assign_images(pending)
                pending = _Pending()
        yield self._assign_images(pending)

    def _assign_images(self, pending: "_Pending") -> np.ndarray:
        places = self._images.places(pending.ids)
        if self._problems is not None:
            for row in np.flatnonzero(places < 0).tolist():
                image_id = pending.ids[row]
                other = self._images.id_of_other_type(image_id)
                example = f"image_id {json.dumps(image_id)[:40]} in {self._file.uri}"
                if other is None:
                    self._problems.add(reasons.BOX_UNKNOWN_IMAGE, example)
                else:
                    example += f", where the image's id is {json.dumps(other)}"
                    self._problems.add(reasons.BOX_IMAGE_ID_TYPE, example)
        records = np.empty(len(places), _RECORD)
        records["image"], records["category"] = places, pending.categories
        records["values"] = np.array(pending.values).reshape(-1, 5)
        records["crowd"] = pending.crowds
        return records[places >= 0]

    def _note(self, reason: str, example: str) -> None:
        """Count a case, when the rows are gone through for the first time."""
        if self._problems is not None:
            self._problems.add(reason, example)


class _Pending:
    """Boxes that were just read."""

    def __init__(self) -> None:
        self.ids: list[Any] = []
        self.categories, self.crowds = array("i"), array("b")
        self.values = array("d")


class _Parts:
    """Records in a file, which gives back those of _PART images at a time."""

    def __init__(self, file: IO[bytes], images: int) -> None:
        self._file = file
        self.count = -(-images // _PART)
        self._runs: list[list[tuple[int, int]]] = [[] for _ in range(self.count)]
        """Where there are records of each part, and how many."""

    def add(self, records: np.ndarray) -> None:
        """Append records of any images."""
        part = records["image"] // _PART
        order = np.argsort(part, kind="stable")
        begin = self._file.seek(0, 2)
        self._file.write(records[order].tobytes())
        parts, first, counts = np.unique(part[order], return_index=True, return_counts=True)
        for one, start, count in zip(parts.tolist(), first.tolist(), counts.tolist(), strict=True):
            self._runs[one].append((begin + start * _RECORD.itemsize, count))

    def read(self, part: int) -> np.ndarray:
        """Return a part's records in the order in which they were added."""
        runs = [np.empty(0, _RECORD)]
        for begin, count in self._runs[part]:
            self._file.seek(begin)
            runs.append(np.fromfile(self._file, _RECORD, count))
        return np.concatenate(runs)


def _lists(records: np.ndarray, first: int, count: int) -> pa.ListArray:
    """Return the boxes of `count` images from the `first` on, each image's in their order."""
    image = records["image"] - first
    order = np.argsort(image, kind="stable")
    records = records[order]
    offsets = np.searchsorted(image[order], np.arange(count + 1)).astype(np.int32)
    fields = [records["category"], *records["values"].T, records["crowd"]]
    columns = [pa.array(np.ascontiguousarray(field)) for field in fields]
    return pa.ListArray.from_arrays(pa.array(offsets), pa.StructArray.from_arrays(columns, fields=list(BOX)))


def _excerpt(item: dict[str, Any]) -> str:
    """Return the fields of an annotation that say which it is, and its box."""
    named = {name: item[name] for name in ("id", "image_id", "bbox") if name in item}
    return json.dumps(named, ensure_ascii=False)[:_EXCERPT]
