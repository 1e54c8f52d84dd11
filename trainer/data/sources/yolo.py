"""YOLO data sets: data.yaml, images, and a text file of labels for each image.

The labels of `images/train/a.jpg` are in `labels/train/a.txt` (the last folder named images is replaced),
or beside the image. An image whose file is missing or empty has no objects. Boxes are fractions of the
sides of the image as it is displayed, one line for each object:

    class x y width height            a box by its centre
    class x1 y1 x2 y2 x3 y3 ...       an outline, or a rotated box by its corners: the box around it
    class x y width height keypoints  if data.yaml has kpt_shape
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePosixPath
from typing import NamedTuple

import pyarrow as pa

from trainer import storage
from trainer.base.errors import DataError, MissingError
from trainer.data import problem_counts as reasons
from trainer.data.images import IMAGE_SUFFIXES, SHARES_UPRIGHT
from trainer.data.problem_counts import Problems
from trainer.data.sources.files import read_all
from trainer.data.sources.source import Box, Category, Entry, Listing, Source, batches_of
from trainer.data.sources.yolo_set import Bounds, YoloSet, read_set, resolve

_SLACK = 0.01
"""How far a coordinate may be outside, as rounding leaves it; what is outside is cut off."""

_ROUNDING = 1e-5
"""What is less far outside is no mistake: labels have six digits, and half of a width is subtracted."""

_SHOWN = 60


def parse_labels(
    data: bytes, positions: Mapping[int, int], keypoints: bool = False
) -> tuple[list[Box], list[tuple[int, str]]]:
    """Return the boxes of a label file, and what is wrong: line (from 1) and why.

    Args:
        data: the file's content; nothing means that there are no objects.
        positions: of each class in the listing's categories, by its number.
        keypoints: whether key points follow the box.
    """
    if data.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in data:
        return [], [(1, "it is UTF-16 or no text: save it as UTF-8")]
    boxes: list[Box] = []
    wrong: list[tuple[int, str]] = []
    for number, line in enumerate(data.decode("utf-8-sig", "replace").splitlines(), 1):
        words = line.split()
        if not words:
            continue
        box_or_fault = _box(words, positions, keypoints)
        if isinstance(box_or_fault, Box):
            boxes.append(box_or_fault)
        else:
            wrong.append((number, f"{line.strip()[:_SHOWN]!r} {box_or_fault}"))
    # The same line twice is one object.
    return list(dict.fromkeys(boxes)), wrong


def _box(words: list[str], positions: Mapping[int, int], keypoints: bool) -> Box | str:
    """Return the box of a line, or why it has none."""
    values = [_number(word) for word in words]
    if None in values:
        word = words[values.index(None)]
        return f"has {word!r}, a decimal comma" if _is_comma(word) else f"has {word!r}, which is no number"
    numbers = [value for value in values if value is not None]
    label, coordinates = numbers[0], numbers[1:]
    if not label.is_integer() or int(label) not in positions:
        return f"is of class {words[0]}, but the classes are {_range(positions)}"
    if keypoints and len(coordinates) > 4:
        coordinates = coordinates[:4]
    problem = _misfit(coordinates)
    if problem:
        return problem
    if len(coordinates) == 4:
        x, y, width, height = coordinates
        if min(x - width / 2, y - height / 2) >= 0 and max(x + width / 2, y + height / 2) <= 1:
            return Box(positions[int(label)], (x - width / 2, y - height / 2, width, height), 0.0, 0)
        edges = (x - width / 2, x + width / 2), (y - height / 2, y + height / 2)
    else:
        edges = (
            (min(coordinates[::2]), max(coordinates[::2])),
            (min(coordinates[1::2]), max(coordinates[1::2])),
        )
    (left, right), (top, bottom) = (tuple(map(_rounded, pair)) for pair in edges)
    return Box(positions[int(label)], (left, top, right - left, bottom - top), 0.0, 0)


def _rounded(edge: float) -> float:
    """Return the image's edge for what is outside of it by no more than six digits leave."""
    if -_ROUNDING < edge < 0 or 1 < edge < 1 + _ROUNDING:
        return float(edge > 0.5)
    return edge


def _misfit(coordinates: list[float]) -> str:
    """Return why these numbers are neither a box nor an outline; "" if they are one."""
    count = len(coordinates)
    if count < 4:
        return f"has {count} numbers after the class, not four"
    if count == 5:
        return "has five numbers after the class: is the last a confidence? leave it out"
    if count % 2:
        return f"has {count} numbers after the class: neither four nor pairs of x and y"
    outside = [value for value in coordinates if not -_SLACK <= value <= 1 + _SLACK]
    if outside and max(outside) > 2:
        return f"has {outside[0]:g}, no share of a side: divide pixels by the image's width or height"
    return f"has {outside[0]:g}, which is outside of 0 to 1" if outside else ""


def _number(word: str) -> float | None:
    try:
        value = float(word)
    except ValueError:
        return None
    return value if math.isfinite(value) and "_" not in word else None


def _is_comma(word: str) -> bool:
    return "," in word and _number(word.replace(",", ".")) is not None


def _range(positions: Mapping[int, int]) -> str:
    """Name the numbers of the classes: 0 to 5."""
    low, high = min(positions), max(positions)
    return f"{low} to {high}" if len(positions) == high - low + 1 else ", ".join(map(str, positions))[:_SHOWN]


_MISSING = ""
_PROBES = 20
"""Images of a list that are looked for until one tells where those of their folder are."""


class _Image(NamedTuple):
    """An image of a split."""

    file_name: str
    """Relative to the set's root."""
    origin: str
    version: str
    """"" where there is no such file."""
    labels: str
    """URI of its label file; "" if there is none."""


@dataclass(frozen=True)
class YoloSource(Source):
    """A YOLO data set: its folder, or the file that describes it."""

    location: str
    confined: str = ""
    """Folder that nothing in it may lead out of; "" where paths may."""
    allow_hosts: tuple[str, ...] = ()
    """Buckets besides its own, see `trainer.config.schema.DataConfig`."""

    @property
    def uri(self) -> str:
        return f"yolo:{self.location}"

    def listing(self) -> Listing:
        """List images and label files; the labels are read when the rows are gone through.

        Raises:
            DataError: the set has no description, no images, or no label file at all.
            StorageError: it cannot be reached.
        """
        if storage.scheme(self.location) in storage.WEB:
            raise DataError(
                f"{self.uri}: a YOLO set on the web cannot be listed",
                fix="put it into a folder or bucket, or into one zip and name that",
            )
        yolo_set = read_set(self.location, Bounds(self.confined, self.allow_hosts))
        numbers = list(yolo_set.names)
        positions = {number: place for place, number in enumerate(numbers)}
        categories = [Category(yolo_set.names[number], number) for number in numbers]
        digest = hashlib.sha256(yolo_set.content)
        problems = Problems()
        folders = _LabelFolders()
        rows = {}
        seen: dict[str, str] = {}
        for split, places in yolo_set.splits.items():
            images = list(_images(yolo_set, split, places, folders, problems))
            for image in images:
                described = f"{split} {image.file_name} {image.version} {image.labels} "
                digest.update(f"{described}{folders.version(image.labels)}\n".encode("utf-8", "replace"))
                if seen.setdefault(image.origin, split) != split:
                    problems.add(
                        reasons.IMAGE_IN_TWO_SPLITS, f"{image.file_name} in {seen[image.origin]} and {split}"
                    )
            rows[split] = YoloRows(images, positions, yolo_set.keypoints, problems)
        self._check(yolo_set, rows)
        return Listing(categories, {split: part for split, part in rows.items() if part.images},
                       digest.hexdigest(), problems, read_as=_described(yolo_set))  # fmt: skip

    def _check(self, yolo_set: YoloSet, rows: Mapping[str, "YoloRows"]) -> None:
        train = rows["train"].images
        if not train:
            raise DataError(
                f"{self.uri}: no images in {', '.join(yolo_set.splits['train'])}",
                fix=f"put them there, as {', '.join(IMAGE_SUFFIXES)}",
            )
        if not any(image.labels for image in train):
            example = train[0]
            raise DataError(
                f"{self.uri}: none of {len(train)} images of train has a label file; looked for "
                f"{' and '.join(_label_places(example.origin))}",
                fix="put the label files into a folder labels beside the folder images",
            )


@dataclass
class YoloRows:
    """The images of a split."""

    images: list[_Image]
    positions: Mapping[int, int]
    keypoints: bool
    problems: Problems | None = field(repr=False)
    """Grows when the rows are gone through for the first time."""

    def __len__(self) -> int:
        return len(self.images)

    def batches(self) -> Iterator[pa.RecordBatch]:
        return batches_of(self)

    def __iter__(self) -> Iterator[Entry]:
        texts = read_all(image.labels for image in self.images if image.labels)
        for image in self.images:
            data = next(texts) if image.labels else b""
            lost = data.message if isinstance(data, MissingError) else ""
            text = b"" if isinstance(data, MissingError) else data
            boxes, wrong = parse_labels(text, self.positions, self.keypoints)
            if self.problems is not None:
                for line, why in wrong:
                    self.problems.add(reasons.LABEL_LINE, f"{image.labels}:{line}: {why}")
            entry = Entry(image.file_name, image.origin, *SHARES_UPRIGHT, boxes, version=image.version)
            if lost:
                entry.fault = (reasons.IMAGE_UNREADABLE, lost)
            elif image.version == _MISSING:
                entry.fault = (reasons.IMAGE_MISSING, f"no file {image.origin}")
            yield entry
        self.problems = None


def _described(yolo_set: YoloSet) -> str:
    """Say how a set was read: YOLO, by data.yaml: train of images/train, val of images/val."""
    splits = [
        f"{split} of {', '.join(_relative(place, yolo_set.root) for place in places)}"
        for split, places in yolo_set.splits.items()
    ]
    return f"YOLO, by {yolo_set.uri.rpartition('/')[2]}: {'; '.join(splits)}"


class _LabelFolders:
    """The label files by folder, each listed once."""

    def __init__(self) -> None:
        self._versions: dict[str, dict[str, str]] = {}

    def find(self, image: str) -> str:
        """Return the URI of an image's label file; "" if there is none."""
        for uri in _label_places(image):
            folder, _, name = uri.rpartition("/")
            if name in self._listed(folder):
                return uri
        return ""

    def version(self, uri: str) -> str:
        """Return what changes when a label file does; "" where there is none."""
        folder, _, name = uri.rpartition("/")
        return self._listed(folder)[name] if uri else ""

    def _listed(self, folder: str) -> dict[str, str]:
        if folder not in self._versions:
            self._versions[folder] = {
                name: f"{state.size} {state.version}"
                for name, state in storage.scan(folder, recursive=False)
                if name.endswith(".txt")
            }
        return self._versions[folder]


def _label_places(image: str) -> list[str]:
    """Return where an image's label file may be, the likeliest first."""
    beside = f"{image[: -len(PurePosixPath(image).suffix)]}.txt"
    before, separator, after = beside.rpartition("/images/")
    return [f"{before}/labels/{after}", beside] if separator else [beside]


def _images(
    yolo_set: YoloSet, split: str, places: list[str], folders: _LabelFolders, problems: Problems
) -> Iterator[_Image]:
    """Yield the images of a split, each once."""
    seen: set[str] = set()
    for place in places:
        pairs = _in_list(yolo_set, place) if place.lower().endswith(".txt") else _in_folder(place)
        for origin, version in pairs:
            name = _relative(origin, yolo_set.root)
            if origin in seen:
                problems.add(reasons.IMAGE_LISTED_TWICE, name)
                continue
            seen.add(origin)
            yield _Image(name, origin, version, folders.find(origin))


def _in_folder(folder: str) -> Iterator[tuple[str, str]]:
    """Yield URI and version of the images in a folder and below."""
    states = ((name, state) for name, state in storage.scan(folder) if name.lower().endswith(IMAGE_SUFFIXES))
    for name, state in sorted(states, key=lambda item: item[0]):
        yield storage.join(folder, name), f"{state.size} {state.version}"


def _in_list(yolo_set: YoloSet, uri: str) -> Iterator[tuple[str, str]]:
    """Yield URI and version of the images that a list names; "" is the version of what is not there."""
    text = storage.read_bytes(uri).decode("utf-8-sig", "replace")
    bases = list(dict.fromkeys([storage.parent(uri), yolo_set.root]))
    find = partial(resolve, bases=bases, bounds=yolo_set.bounds, is_file=True)
    folders: dict[str, tuple[str, dict[str, str]]] = {}
    misses: Counter[str] = Counter()
    for line in filter(None, map(str.strip, text.replace("\\", "/").splitlines())):
        folder, _, name = line.rpartition("/")
        if folder not in folders and misses[folder] < _PROBES:
            origin = find(line)
            misses[folder] += 1
            if origin:
                holder = storage.parent(origin)
                states = storage.scan(holder, recursive=False)
                folders[folder] = holder, {one: f"{state.size} {state.version}" for one, state in states}
        holder, versions = folders.get(folder, ("", {}))
        if name in versions:
            yield storage.join(holder, name), versions[name]
        else:
            yield f"{holder}/{name}" if holder else f"{yolo_set.root}/{line.lstrip('./')}", _MISSING


def _relative(origin: str, root: str) -> str:
    """Return an image's name relative to the set, or all of its path where it lies elsewhere."""
    inside = origin.startswith(f"{root.rstrip('/')}/")
    return origin[len(root.rstrip("/")) + 1 :] if inside else origin.partition("://")[2] or origin.lstrip("/")
