"""Defines the interface of sources: a listing of images and boxes, and the bytes of each image.

A source yields its listing as record batches of bounded size, with the columns of SOURCE_ROW.
"""

import json
import re
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from trainer import storage
from trainer.data.problem_counts import IMAGE_IN_TWO_SPLITS, Problems

UNKNOWN = -1  # Category of a box whose category the source does not list.


class Box(NamedTuple):
    """An annotated object as given by the source, before cleaning."""

    category: int  # Position in the listing's categories, or UNKNOWN.
    bbox: tuple[float, ...]  # [x, y, width, height] in pixels from the image's top left corner.
    area: float  # Of the object, in square pixels; 0 if unknown.
    iscrowd: int  # 1 for a region of several objects, which is ignored in scoring.


@dataclass(slots=True)
class Entry:
    """One image of a source."""

    file_name: str  # Relative to the source, unique in the split.
    origin: str  # Location of the bytes, for `Source.read`.
    width: int
    """The annotated width in pixels (see `parse_side`), or that of STORED_SHARES or DISPLAYED_SHARES in
    `trainer.data.images` if boxes are fractions of the image's sides."""
    height: int
    boxes: list[Box]
    original_id: int | str | None = None
    fault: tuple[str, str] | None = None  # (reason, detail) if the image is unusable.
    version: str = ""  # Changes with the file, e.g. an ETag; "" if unknown.
    extra: str = ""  # See SOURCE_ROW.


def parse_side(value: Any) -> int:
    """Parse a side of an annotated size in pixels: 0 if it is unknown, -1 if it is impossible.

    The result is never a side of STORED_SHARES or DISPLAYED_SHARES.
    """
    if not isinstance(value, int | float) or value == 0:
        return 0
    return int(value) if 1 <= value < 2**31 else -1


class Rows:
    """The listed images of a split, which can be iterated repeatedly."""

    def __init__(
        self, read: Callable[[Problems], Iterator[pa.RecordBatch]], problems: Problems | None = None
    ) -> None:
        """Set the function that yields rows of SOURCE_ROW in batches, and adds problems to its argument.

        When the rows have been read to the end for the first time, its problems are added to `problems`.
        """
        self._read, self._problems = read, problems

    @classmethod
    def of(cls, entries: Callable[[Problems], Iterable["Entry"]], problems: Problems | None = None) -> "Rows":
        """Create rows from a function that yields entries."""
        return cls(lambda found: map(to_record_batch, _batched(entries(found))), problems)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield rows of SOURCE_ROW in batches of bounded size."""
        found = Problems()
        yield from self._read(found)
        if self._problems is not None:
            self._problems.merge(found.cases())
            self._problems = None


class Category(NamedTuple):
    """One class of a source."""

    name: str
    original_id: int | str
    frequency: str = ""  # of LVIS: r (rare), c (common) or f (frequent) among training images


@dataclass
class Listing:
    """The content of a source without the pixels."""

    categories: list[Category]
    splits: Mapping[str, Rows]  # By the names train, val, test.
    state: str  # Digest that changes with the annotations or images.
    problems: Problems = field(default_factory=Problems)  # Complete after all rows have been read.
    exhaustive: bool = True  # Whether all objects have boxes, so that images without boxes are negative.
    hierarchy: Mapping[Any, Collection[int | str]] = field(default_factory=dict)
    """Original ids of all ancestors of a category, for evaluation."""
    box_format: str = ""
    """See `trainer.config.schema.DataConfig`; "corners" for VOC, "" if the format is unambiguous."""
    read_as: str = ""  # Recognized layout and splits, for display.


class BoxOptions(NamedTuple):
    """How boxes in COCO annotations are read; see `trainer.config.schema.DataConfig`."""

    boxes_from: str = "bbox"
    box_format: str = "auto"


DEFAULT_OPTIONS = BoxOptions()  # The format that COCO defines.


class Source:
    """A source of images and boxes."""

    cpu_bound: ClassVar[bool] = False  # Whether `read` needs processes rather than threads.

    @property
    def uri(self) -> str:
        """The text that names the source, with absolute paths."""
        raise NotImplementedError

    @property
    def images_uri(self) -> str:
        """The origin of the images; sources with the same origin share fetched images."""
        return self.uri

    def listing(self) -> Listing:
        """List images and boxes; rows may be read only when they are iterated.

        Raises:
            DataError: the source is missing, empty, or not of its format.
            StorageError: it cannot be reached.
        """
        raise NotImplementedError

    def read(self, origin: str) -> bytes:
        """Return the bytes of the image with this `origin`, which by default is a URI.

        Since annotations may name the URI, its host must be on the allow-list of `trainer.storage.web`.

        Raises:
            StorageError: the bytes cannot be read; AddressNotAllowed: the host is not on the allow-list.
        """
        return storage.read_allowed(origin)


class SplitOverlaps:
    """Detects images that are in two splits, and adds them to the problems. Uses eight bytes per image."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._hashes: dict[str, np.ndarray] = {}

    def add(self, split: str, images: Iterable[tuple[str, str]]) -> None:
        """Add all images of a split as names and identities ("" if unknown)."""
        added = array("q")
        for batch in _batched(images):
            hashes = np.array([hash(identity) for _, identity in batch], np.int64)
            for other, others in self._hashes.items():
                for row in np.flatnonzero(np.isin(hashes, others)).tolist():
                    if batch[row][1]:
                        self._problems.add(IMAGE_IN_TWO_SPLITS, f"{batch[row][0]} in {other} and {split}")
            added.extend(hashes.tolist())
        self._hashes[split] = np.unique(np.array(added))


def parse_split(name: str) -> str | None:
    """Return train, val or test for a split name such as val2017 or validation; None for other names."""
    match = re.search(r"(?:^|[^a-z])(train|val|test)", name, re.IGNORECASE)
    return match.group(1).lower() if match else None


BOX = pa.struct(
    [
        ("category", pa.int32()),
        *((name, pa.float64()) for name in "xywh"),
        ("area", pa.float64()),
        ("iscrowd", pa.int8()),
    ]
)
"""A box in pixels as given by the source; NaN for a missing number."""

_TEXT = pa.string()
SOURCE_ROW = pa.schema(
    [
        ("file_name", _TEXT),
        ("origin", _TEXT),
        ("version", _TEXT),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("original_id", _TEXT),
        ("fault_reason", _TEXT),
        ("fault_detail", _TEXT),
        ("extra", _TEXT),
        ("boxes", pa.list_(BOX)),
    ]
)
"""The fields of `Entry`; `original_id` is JSON, and so is `extra`, which is for the ground truth."""

Item = TypeVar("Item")


def _batched(items: Iterable[Item], size: int = 1000) -> Iterator[list[Item]]:
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


def to_record_batch(entries: list[Entry]) -> pa.RecordBatch:
    """Convert entries to rows of SOURCE_ROW."""
    rows = [
        {
            "file_name": _to_utf8(entry.file_name),
            "origin": _to_utf8(entry.origin),
            "version": entry.version,
            "width": entry.width,
            "height": entry.height,
            "original_id": json.dumps(entry.original_id),
            "fault_reason": entry.fault[0] if entry.fault else "",
            "fault_detail": _to_utf8(entry.fault[1]) if entry.fault else "",
            "extra": entry.extra,
            "boxes": [(box.category, *box.bbox, box.area, box.iscrowd) for box in entry.boxes],
        }
        for entry in entries
    ]
    return pa.RecordBatch.from_pylist(rows, schema=SOURCE_ROW)


def _to_utf8(text: str) -> str:
    """Escape surrogates: file names may contain bytes that are not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()
