"""The rows of a COCO JSON: boxes come in any order, and are grouped by image on disk.

A box is that of the annotation's bbox or of its segmentation: a list of polygons, of which COCO's own boxes
are the extent, or a run-length encoded mask (RLE), which pycocotools reads.
"""

import json
import re
from array import array
from collections.abc import Callable, Iterator
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np
import pyarrow as pa

from trainer.data import problem_counts as reasons
from trainer.data.images import SHARES_UPRIGHT
from trainer.data.problem_counts import Problems
from trainer.data.sources.coco_json import CocoFile, CocoImages, integer_like, positive
from trainer.data.sources.source import AS_PUBLISHED, BOX, ROWS, UNKNOWN, Category, Entry, Reading, batch_of

_LARGEST = 1e9
_MOST_PIXELS = 2**31
_COMMA = re.compile(r"-?\d+,\d+")
_CONTINUED = 0x20
"""Bit of a character of a compressed RLE that says that its number goes on."""


def box_of(annotation: dict[str, Any], reading: Reading = AS_PUBLISHED) -> tuple[float, ...] | str:
    """Return an annotation's box [x, y, width, height], or the reason why it has none.

    Args:
        annotation: an object of the list `annotations`.
        reading: whether the box is that of the segmentation, where there is one, and how a bbox is written.
    """
    if reading.boxes_from == "segmentation" and annotation.get("segmentation"):
        return _box_of_segmentation(annotation["segmentation"]) or reasons.SEGMENTATION_UNUSABLE
    box = _box_of_bbox(annotation)
    if reading.box_format == "xyxy" and not isinstance(box, str):
        left, top, right, bottom = box
        return left, top, right - left, bottom - top
    return box


def _box_of_bbox(annotation: dict[str, Any]) -> tuple[float, ...] | str:
    value = annotation.get("bbox")
    if value is None or value == []:
        return reasons.BOX_ONLY_SEGMENTATION if annotation.get("segmentation") else reasons.BOX_ABSENT
    if isinstance(value, str):
        return reasons.BOX_DECIMAL_COMMA if len(_COMMA.findall(value)) >= 4 else reasons.BOX_OF_TEXT
    if not isinstance(value, list):
        return reasons.BOX_NOT_FINITE
    if any(isinstance(part, str) for part in value):
        commas = any(isinstance(part, str) and _COMMA.fullmatch(part.strip()) for part in value)
        return reasons.BOX_DECIMAL_COMMA if commas else reasons.BOX_OF_TEXT
    if len(value) != 4:
        # Unquoted decimal commas make two numbers of each: [1,5, 2,5, 3,5, 4,5].
        return reasons.BOX_DECIMAL_COMMA if len(value) == 8 else reasons.BOX_OTHER_LENGTH
    numbers = _finite(value)
    return tuple(numbers) if numbers else reasons.BOX_NOT_FINITE


def _box_of_segmentation(segmentation: Any) -> tuple[float, ...] | None:
    return _box_of_rle(segmentation) if isinstance(segmentation, dict) else _box_of_polygons(segmentation)


def _box_of_polygons(polygons: Any) -> tuple[float, ...] | None:
    """Return the extent of polygons [[x1, y1, x2, y2, ...], ...]."""
    if not isinstance(polygons, list):
        return None
    if all(isinstance(part, int | float) for part in polygons):
        polygons = [polygons]
    xs: list[float] = []
    ys: list[float] = []
    for polygon in polygons:
        numbers = _finite(polygon) if isinstance(polygon, list) else None
        if numbers is None or len(numbers) < 4 or len(numbers) % 2:
            return None
        xs += numbers[::2]
        ys += numbers[1::2]
    return min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)


def _box_of_rle(mask: dict[str, Any]) -> tuple[float, ...] | None:
    """Return the extent of a mask {"size": [height, width], "counts": runs}, compressed or not."""
    size, counts = mask.get("size"), mask.get("counts")
    if not isinstance(size, list) or len(size) != 2 or not all(isinstance(side, int) for side in size):
        return None
    if min(size) < 1 or size[0] * size[1] >= _MOST_PIXELS:
        return None
    from pycocotools import mask as runs

    # The library reads past the end of runs that are not whole, and trusts their sum.
    if isinstance(counts, list):
        whole = all(isinstance(run, int) and run >= 0 for run in counts) and sum(counts) == size[0] * size[1]
        encoded = runs.frPyObjects({"size": size, "counts": counts}, *size) if whole else None
    else:
        data = counts.encode("ascii", "replace") if isinstance(counts, str) else b""
        whole = _is_whole(data, size[0] * size[1])
        encoded = {"size": size, "counts": data} if whole else None
    return tuple(map(float, runs.toBbox(encoded))) if encoded else None


def _is_whole(data: bytes, pixels: int) -> bool:
    """Tell whether a compressed RLE is made of whole numbers whose runs fill the mask."""
    runs: list[int] = []
    number = bits = 0
    for byte in data:
        part = byte - 48
        if not 0 <= part < 64 or bits > 30:
            return False
        number |= (part & 0x1F) << bits
        bits += 5
        if not part & _CONTINUED:
            if part & 0x10:
                number -= 1 << bits
            # From the third run on each is told as the difference to the one before the last.
            runs.append(number + (runs[-2] if len(runs) > 2 else 0))
            number = bits = 0
    return bits == 0 and all(run >= 0 for run in runs) and sum(runs) == pixels


def _finite(value: list[Any]) -> list[float] | None:
    """Return numbers as floats; None if one is no finite number."""
    if not all(
        isinstance(part, int | float) and not isinstance(part, bool) and abs(part) < _LARGEST
        for part in value
    ):  # fmt: skip
        return None
    return [float(part) for part in value]


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
