"""YOLO data sets: data.yaml, images, and a text file of labels for each image.

The labels of `images/train/a.jpg` are in `labels/train/a.txt` (the last folder named images is replaced),
else beside the image. An image whose file is missing or empty has no objects. Boxes are shares of the
sides of the image as it is displayed.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import PurePosixPath
from typing import NamedTuple

import pyarrow as pa

from trainer import storage
from trainer.base.errors import DataError, MissingError
from trainer.data import problem_counts as reasons
from trainer.data.images import IMAGE_SUFFIXES, SHARES_UPRIGHT
from trainer.data.problem_counts import Problems
from trainer.data.sources.annotation_texts import read_all
from trainer.data.sources.row_format import ROWS, batch_of
from trainer.data.sources.source import Category, Entry, Listing
from trainer.data.sources.yolo_labels import parse_labels
from trainer.data.sources.yolo_set import Bounds, YoloSet, read_set, resolve

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
class YoloSource:
    """A YOLO data set: its folder, or the file that describes it."""

    location: str
    confined: str = ""
    """Folder that nothing in it may lead out of; "" where paths may."""
    allow_hosts: tuple[str, ...] = ()
    """Buckets besides its own, see `trainer.config.schema.DataConfig`."""
    cpu_bound = False
    origins_are_uris = True

    @property
    def uri(self) -> str:
        """Name the folder or file."""
        return f"yolo:{self.location}"

    @property
    def images_uri(self) -> str:
        """Name where the bytes come from."""
        return self.uri

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

    def read(self, origin: str) -> bytes:
        """Return an image's bytes."""
        return storage.read_bytes(origin)

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

    def __iter__(self) -> Iterator[Entry]:
        rest = iter(self.images)
        while images := list(islice(rest, ROWS)):
            yield from self._entries(images)
        self.problems = None

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield rows of SOURCE_ROW."""
        rest = iter(self.images)
        while images := list(islice(rest, ROWS)):
            yield batch_of(list(self._entries(images)))
        self.problems = None

    def _entries(self, images: list[_Image]) -> Iterator[Entry]:
        texts = read_all([image.labels for image in images if image.labels])
        for image in images:
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
