"""The interface of all sources: a listing of images and boxes, and the bytes of each image.

A source yields its images as record batches of bounded size, with the columns of SOURCE_ROW.
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
    """One annotated object as the source has it, before cleaning."""

    category: int  # Position in the listing's categories, or UNKNOWN.
    bbox: tuple[float, ...]  # [x, y, width, height] in pixels from the image's top left corner.
    area: float  # Of the object, in square pixels; 0 is unknown.
    iscrowd: int  # 1 for a region of several objects: ignored in scoring.


@dataclass(slots=True)
class Entry:
    """One image of a source."""

    file_name: str  # Relative name in the source, unique in its split.
    origin: str  # Location of its bytes, for `Source.read`.
    width: int
    """As annotated, in pixels, see `annotated_side`; or STORED_SHARES or DISPLAYED_SHARES of
    `trainer.data.images` if boxes are fractions of the image's sides."""
    height: int
    boxes: list[Box]
    original_id: int | str | None = None
    fault: tuple[str, str] | None = None  # (reason, detail) if the listing shows that it is unusable.
    version: str = ""  # Changes with the image: an ETag, size and time; "" is unknown.
    extra: str = ""  # See SOURCE_ROW.


def annotated_side(value: Any) -> int:
    """Return a side of an annotated size in pixels: 0 if it is unknown, -1 if no image can have it.

    No file can thus contain STORED_SHARES or DISPLAYED_SHARES.
    """
    if not isinstance(value, int | float) or value == 0:
        return 0
    return int(value) if 1 <= value < 2**31 else -1


class Rows:
    """The images of a split, which can be read repeatedly."""

    def __init__(
        self, read: Callable[[Problems], Iterator[pa.RecordBatch]], problems: Problems | None = None
    ) -> None:
        """Read rows of SOURCE_ROW by `read`, which yields a bounded number at a time and adds their problems.

        `problems` gets these when the rows have been read to the end for the first time.
        """
        self._read, self._problems = read, problems

    @classmethod
    def of(cls, entries: Callable[[Problems], Iterable["Entry"]], problems: Problems | None = None) -> "Rows":
        """Return the rows of images that a function lists."""
        return cls(lambda found: map(to_record_batch, _batched(entries(found))), problems)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield rows of SOURCE_ROW, a bounded number at a time."""
        found = Problems()
        yield from self._read(found)
        if self._problems is not None:
            self._problems.merge(found.cases())
            self._problems = None


class Category(NamedTuple):
    """One class of a source."""

    name: str
    original_id: int | str
    frequency: str = ""  # of LVIS: r (rare), c (common) or f (frequent), by its training images


@dataclass
class Listing:
    """The content of a source except the pixels."""

    categories: list[Category]
    splits: Mapping[str, Rows]  # By the names train, val, test.
    state: str  # Digest that changes when annotations or images change.
    problems: Problems = field(default_factory=Problems)  # Complete when all rows have been read.
    exhaustive: bool = True  # Whether all objects are boxed: an image without boxes is a negative example.
    hierarchy: Mapping[Any, Collection[int | str]] = field(default_factory=dict)
    """Original ids of all categories above one, for evaluation."""
    box_format: str = ""
    """See `trainer.config.schema.DataConfig`; "corners" for VOC's, "" if the format leaves no doubt."""
    read_as: str = ""  # Recognized layout and splits, for people.


class BoxOptions(NamedTuple):
    """How boxes in COCO annotations are read, see `trainer.config.schema.DataConfig`."""

    boxes_from: str = "bbox"
    box_format: str = "auto"


DEFAULT_OPTIONS = BoxOptions()  # COCO's own form.


class Source:
    """A source of images and boxes."""

    cpu_bound: ClassVar[bool] = False  # Whether `read` computes, so that processes help rather than threads.

    @property
    def uri(self) -> str:
        """The text that names the source, independent of the working directory."""
        raise NotImplementedError

    @property
    def images_uri(self) -> str:
        """The origin of the bytes: sources with the same one share fetched images."""
        return self.uri

    def listing(self) -> Listing:
        """List images and boxes; rows may be read later, when they are iterated.

        Raises:
            DataError: the source is missing, empty, or not of its format.
            StorageError: it cannot be reached.
        """
        raise NotImplementedError

    def read(self, origin: str) -> bytes:
        """Return the bytes of the image that has this `origin`, which by default is a URI.

        It may come from annotations: servers and buckets must be on the allow-list of `trainer.storage.web`.

        Raises:
            StorageError: the bytes cannot be read; Refused: the address is not on the list.
        """
        return storage.read_allowed(origin)


class SplitOverlaps:
    """Adds images that are in two splits to the problems. Memory: eight bytes per image."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._hashes: dict[str, np.ndarray] = {}

    def add(self, split: str, images: Iterable[tuple[str, str]]) -> None:
        """Add the names and identities ("" is unknown) of all images of a split."""
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
    """Return train, val or test for a source's name of a split (val2017, validation), or None."""
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
"""A box in pixels as the source has it; NaN where a number is missing."""

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
"""The fields of `Entry` (`original_id` as JSON), and `extra`, JSON for the ground truth."""

Item = TypeVar("Item")


def _batched(items: Iterable[Item], size: int = 1000) -> Iterator[list[Item]]:
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


def to_record_batch(entries: list[Entry]) -> pa.RecordBatch:
    """Return entries as rows of SOURCE_ROW."""
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
    """Return text that is UTF-8: names of files may hold bytes that are not."""
    return text.encode("utf-8", "backslashreplace").decode()
