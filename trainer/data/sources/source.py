"""The interface of all sources: a listing of images and boxes, and the bytes of each image.

A source yields its images as record batches of bounded size, with the columns of SOURCE_ROW.
"""

import json
import re
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa

from trainer import storage
from trainer.data.problem_counts import IMAGE_IN_TWO_SPLITS, Problems

UNKNOWN = -1
"""Category of a box whose category the source does not list."""


class Box(NamedTuple):
    """One annotated object, as the source has it: nothing is cleaned yet."""

    category: int
    """Position in the listing's categories, or UNKNOWN."""
    bbox: tuple[float, ...]
    """[x, y, width, height] in pixels, (0, 0) being the image's top left corner; empty if the
    source's is not four numbers."""
    area: float
    """Of the object, in square pixels; 0 where the source does not say."""
    iscrowd: int
    """1 for a region that is not one object: ignored in scoring."""


@dataclass(slots=True)
class Entry:
    """One image of a source."""

    file_name: str
    """Relative name in the source, unique in its split."""
    origin: str
    """Where its bytes are; what that means is the source's affair."""
    width: int
    """As annotated, in pixels; 0 where the source does not say, SHARES or SHARES_UPRIGHT (of
    `trainer.data.images`) where boxes are shares of the image's sides."""
    height: int
    boxes: list[Box]
    original_id: int | str | None = None
    fault: tuple[str, str] | None = None
    """(reason, detail) where the listing alone shows that the image cannot be used."""
    version: str = ""
    """Changes when the image does, where the source tells: an ETag, size and time."""
    extra: dict[str, Any] | None = None
    """Further data of the source about the image, kept in the ground truth."""
    orientation: int = 0
    """How the stored image is turned to be shown, as an Exif orientation (1 to 8); 0 where its own
    Exif block tells."""


class Rows:
    """The images of a split, which can be read again and again."""

    def __init__(
        self, read: Callable[[Problems], Iterator[pa.RecordBatch]], problems: Problems | None = None
    ) -> None:
        """Set how they are read.

        Args:
            read: yields rows of SOURCE_ROW, a bounded number at a time, and counts what is wrong with them.
            problems: grows once, when the rows have been read to the end for the first time.
        """
        self._read, self._problems = read, problems

    @classmethod
    def of(cls, entries: Callable[[Problems], Iterable["Entry"]], problems: Problems | None = None) -> "Rows":
        """Return the rows of images that a function lists."""
        return cls(lambda found: map(batch_of, batched(entries(found), ROWS)), problems)

    @classmethod
    def of_list(cls, entries: Sequence["Entry"]) -> "Rows":
        """Return the rows of images that fit in memory."""
        return cls.of(lambda _: entries)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield rows of SOURCE_ROW, a bounded number at a time."""
        found = Problems()
        yield from self._read(found)
        if self._problems is not None:
            self._problems.merge(found.cases())
            self._problems.unlisted.update(found.unlisted)
            self._problems = None


class Category(NamedTuple):
    """One class of a source."""

    name: str
    original_id: int | str


@dataclass
class Listing:
    """All that a source holds, apart from the pixels."""

    categories: list[Category]
    splits: Mapping[str, Rows]
    """By the names train, val, test."""
    state: str
    """Digest that changes when annotations or images change."""
    problems: Problems = field(default_factory=Problems)
    """What was wrong; whole when all rows have been gone through."""
    exhaustive: bool = True
    """Whether every object of the categories is annotated, so that an image without boxes has none."""
    hierarchy: Mapping[Any, Collection[int | str]] = field(default_factory=dict)
    """Original ids of all categories above one, for evaluation; empty where they have no order, or
    where each object has boxes of these too."""
    box_format: str = ""
    """How boxes were read, see `trainer.config.schema.DataConfig`; "" where the format itself defines it."""
    read_as: str = ""
    """How the source was understood, for people; "" where its name says it."""


class Reading(NamedTuple):
    """How the boxes of COCO annotations are read, see `trainer.config.schema.DataConfig`."""

    boxes_from: str = "bbox"
    box_format: str = "auto"


AS_PUBLISHED = Reading()
"""COCO's own form."""


class Source:
    """A place that images and boxes come from."""

    cpu_bound: ClassVar[bool] = False
    """Whether `read` computes (processes help) rather than waits (threads do)."""
    origins_are_uris: ClassVar[bool] = True
    """Whether `read` returns the content of the file that `origin` names, and does nothing else."""
    composes_addresses: ClassVar[bool] = False
    """Whether each `origin` is below an address that the user named, and none is from the source's data."""

    @property
    def uri(self) -> str:
        """Name the source so that it means the same from every folder."""
        raise NotImplementedError

    @property
    def images_uri(self) -> str:
        """Name where the bytes come from: sources with the same one share what was fetched."""
        return self.uri

    def listing(self) -> Listing:
        """List images and boxes; rows may be read later, when they are iterated.

        Raises:
            DataError: the source is missing, empty, or not of its format.
            StorageError: it cannot be reached.
        """
        raise NotImplementedError

    def read(self, origin: str) -> bytes:
        """Return the bytes of the image that has this `origin`.

        Raises:
            StorageError: it is missing or cannot be reached.
        """
        return storage.read_bytes(origin)


class SplitOverlaps:
    """Counts images that are in two splits, which makes scores too good. Memory: eight bytes an image."""

    def __init__(self, problems: Problems) -> None:
        """Begin without images; `problems` grows."""
        self._problems = problems
        self._hashes: dict[str, array[int]] = {}
        self._sorted: dict[str, np.ndarray] = {}

    def add(self, split: str, images: Sequence[tuple[str, str]]) -> None:
        """Take the name and identity of images of a split; all of one split come before the next one."""
        if split not in self._hashes:
            self._sorted = {name: np.unique(np.array(hashes)) for name, hashes in self._hashes.items()}
            self._hashes[split] = array("q")
        hashes = np.array([hash(identity) if identity else 0 for _, identity in images], np.int64)
        for other, others in self._sorted.items():
            for row in np.flatnonzero(np.isin(hashes, others) & (hashes != 0)).tolist():
                self._problems.add(IMAGE_IN_TWO_SPLITS, f"{images[row][0]} in {other} and {split}")
        self._hashes[split].extend(hashes.tolist())


_SPLIT = re.compile(r"(?:^|[^a-z])(train|val|test)", re.IGNORECASE)


def split_of(name: str) -> str | None:
    """Return train, val or test for a source's name of a split (val2017, validation), or None."""
    match = _SPLIT.search(name)
    return match.group(1).lower() if match else None


ROWS = 1000
"""Images of a batch of rows."""

BOX = pa.struct(
    [("category", pa.int32()), *((name, pa.float64()) for name in "xywh"), ("area", pa.float64()),
     ("iscrowd", pa.int8())]
)  # fmt: skip
"""A box in pixels as the source has it; NaN where the source's is not four numbers."""

SOURCE_ROW = pa.schema(
    [
        ("file_name", pa.string()),
        ("origin", pa.string()),
        ("version", pa.string()),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("orientation", pa.int8()),
        ("original_id", pa.string()),
        ("fault_reason", pa.string()),
        ("fault_detail", pa.string()),
        ("extra", pa.string()),
        ("boxes", pa.list_(BOX)),
    ]
)
"""What a source tells of an image: the fields of `Entry`; `original_id` and `extra` as JSON texts."""

_NAN = (float("nan"),) * 4


def batched(entries: Iterable[Entry], size: int) -> Iterator[list[Entry]]:
    """Yield entries, so many at a time."""
    rest = iter(entries)
    while batch := list(islice(rest, size)):
        yield batch


def batch_of(entries: list[Entry]) -> pa.RecordBatch:
    """Return entries as rows of SOURCE_ROW."""
    rows = [
        {
            "file_name": _text(entry.file_name),
            "origin": _text(entry.origin),
            "version": entry.version,
            "width": entry.width,
            "height": entry.height,
            "orientation": entry.orientation,
            "original_id": json.dumps(entry.original_id),
            "fault_reason": entry.fault[0] if entry.fault else "",
            "fault_detail": _text(entry.fault[1]) if entry.fault else "",
            "extra": json.dumps(entry.extra) if entry.extra else "",
            "boxes": [_box(box) for box in entry.boxes],
        }
        for entry in entries
    ]
    return pa.RecordBatch.from_pylist(rows, schema=SOURCE_ROW)


def _text(text: str) -> str:
    """Return text that is UTF-8: names of files may hold bytes that are not."""
    return text.encode("utf-8", "backslashreplace").decode()


def _box(box: Box) -> tuple[Any, ...]:
    return (box.category, *(box.bbox or _NAN), box.area, box.iscrowd)
