"""PASCAL VOC folders: Annotations/*.xml, JPEGImages, ImageSets/Main/{train,val,test}.txt.

VOC corners are pixels counted from 1, the last one included (VOC2012 development kit, section
on annotations), while the internal form measures from the image's top left corner. So

    x = xmin - 1, y = ymin - 1, width = xmax - xmin + 1, height = ymax - ymin + 1

and a box from 1 to the image's width covers all of it. COCO JSON that was made from VOC by plain
subtraction (x = xmin, width = xmax - xmin) is one pixel off that. Corners that coincide are a slip
of the annotator and no box of one pixel: such a box has no area here, as it has none there.
"""

import hashlib
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from itertools import islice
from pathlib import PurePosixPath
from tempfile import TemporaryFile
from xml.parsers import expat

import pyarrow as pa

from trainer import storage
from trainer.data import problem_counts as reasons
from trainer.data import worker_pool
from trainer.data.problem_counts import Problems
from trainer.data.sources.folder_listing import Folder
from trainer.data.sources.row_format import batches_of
from trainer.data.sources.source import IMAGE_SUFFIXES, UNKNOWN, Box, Category, Entry, Listing
from trainer.errors import DataError

_IMAGE_FOLDERS = ("JPEGImages", "images", "Images", "Annotations")
_READERS = 16
_BATCH = 1000
"""Annotation files that are in memory at once."""


@dataclass
class _Annotation:
    """What one XML file says."""

    width: int
    height: int
    file_name: str
    objects: list[tuple[str, tuple[float, ...], int]]
    """(class name, bbox, iscrowd)"""
    fault: str = ""


@dataclass(frozen=True)
class VocSource:
    """A folder in the layout of PASCAL VOC."""

    folder: str
    cpu_bound = False
    origins_are_uris = True

    @property
    def uri(self) -> str:
        """Name the folder."""
        return f"voc:{self.folder}"

    @property
    def images_uri(self) -> str:
        """Name where the bytes come from."""
        return self.uri

    def listing(self) -> Listing:
        """Read all annotation files.

        Raises:
            DataError: the folder has no annotations or no images.
        """
        names = Folder(
            storage.join(self.folder, "Annotations"), str, lambda name: name.lower().endswith(".xml")
        )
        files = {name[:-4]: name for name in names.names()}
        if not files:
            raise DataError(
                f"{self.uri}: no Annotations/*.xml",
                fix="name the folder that holds Annotations, JPEGImages and ImageSets",
            )
        images = _images(self.folder)
        splits = _read_splits(self.folder, sorted(files))
        stems_listed = sorted({stem for stems in splits.values() for stem in stems} & files.keys())
        digest = hashlib.sha256()
        annotations = _Annotations()
        for stem, data in _read_all(self.folder, [(stem, files[stem]) for stem in stems_listed]):
            digest.update(f"{stem} {len(data)}\n".encode() + data)
            annotations.add(stem, _parse(data))
        # Sorted, so that labels do not depend on which image comes first.
        classes = sorted(annotations.classes - {""})
        labels = {name: index for index, name in enumerate(classes)}
        rows_by_split = {
            split: VocRows(stems, annotations, images, labels) for split, stems in splits.items()
        }
        for split, entries in rows_by_split.items():
            for entry in entries:
                digest.update(f"{split} {entry.file_name} {entry.version}\n".encode())
        problems = Problems()
        _note_overlaps(splits, problems)
        categories = [Category(name, index + 1) for name, index in labels.items()]
        return Listing(categories, rows_by_split, digest.hexdigest(), problems)

    def read(self, origin: str) -> bytes:
        """Return an image's bytes."""
        return storage.read_bytes(origin)


class _Annotations:
    """What the XML files say, on the disk: memory holds where."""

    def __init__(self) -> None:
        self._lines = TemporaryFile()  # noqa: SIM115 (lives as long as this does)
        self._places: dict[str, int] = {}
        self.classes: set[str] = set()
        """Names of the objects."""

    def add(self, stem: str, annotation: _Annotation) -> None:
        """Keep what the file of this stem says."""
        self._places[stem] = self._lines.tell()
        self.classes.update(item[0] for item in annotation.objects)
        self._lines.write(json.dumps(astuple(annotation)).encode() + b"\n")

    def get(self, stem: str) -> _Annotation | None:
        """Return what the file of this stem says; None if there is none."""
        if stem not in self._places:
            return None
        self._lines.seek(self._places[stem])
        width, height, name, objects, fault = json.loads(self._lines.readline())
        boxes = [(label, tuple(box), crowd) for label, box, crowd in objects]
        return _Annotation(width, height, name, boxes, fault)


@dataclass(frozen=True)
class VocRows:
    """The images of a split."""

    stems: list[str]
    annotations: _Annotations
    images: Folder
    labels: dict[str, int]
    """Position of each class, by name."""

    def __iter__(self) -> Iterator[Entry]:
        return (_entry(stem, self.annotations.get(stem), self.images, self.labels) for stem in self.stems)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield rows of SOURCE_ROW."""
        return batches_of(self)


def _images(root: str) -> Folder:
    """Return the folder with the images, in which names of the same stem count as equal."""
    for name in _IMAGE_FOLDERS:
        folder = Folder(storage.join(root, name), _stem, lambda file: file.lower().endswith(IMAGE_SUFFIXES))
        if len(folder):
            return folder
    raise DataError(f"voc:{root}: no images in JPEGImages", fix="put the images there")


def _stem(name: str) -> str:
    return PurePosixPath(name).stem.lower()


def _read_splits(root: str, stems: list[str]) -> dict[str, list[str]]:
    """Return the image names of each split; all are train where ImageSets lists none."""
    folder = storage.join(root, "ImageSets", "Main")
    states = storage.list_states(folder)
    all_stems = set(stems)
    lists = {
        split: _read_split(storage.join(folder, f"{split}.txt"), all_stems)
        for split in ("train", "val", "test", "trainval")
        if f"{split}.txt" in states
    }
    both = lists.pop("trainval", [])
    if not lists.get("train"):
        held_out = {stem for names in lists.values() for stem in names}
        lists["train"] = [stem for stem in both if stem not in held_out]
    splits = {split: names for split, names in lists.items() if names}
    return splits or {"train": stems}


def _read_split(uri: str, all_stems: set[str]) -> list[str]:
    text = storage.read_bytes(uri).decode("utf-8-sig", "replace")
    stems = []
    for line in filter(None, map(str.strip, text.splitlines())):
        # Some lists add a column of 1, 0, -1, an extension or a folder to the name.
        name = line if line in all_stems else re.sub(r"\s+-?[01]$", "", line)
        if name not in all_stems:
            name = name.rpartition("/")[2]
            name = name[: name.rindex(".")] if name.lower().endswith(IMAGE_SUFFIXES) else name
        stems.append(name)
    return list(dict.fromkeys(stems))


def _read_all(root: str, files: list[tuple[str, str]]) -> Iterator[tuple[str, bytes]]:
    """Yield stem and content of annotation files in their order, some at the same time."""
    workers = 1 if storage.is_local(root) else _READERS
    tasks = iter([(stem, storage.join(root, "Annotations", name)) for stem, name in files])
    while batch := list(islice(tasks, _BATCH)):
        yield from sorted(worker_pool.run(_read_one, batch, workers, processes=False))


def _read_one(task: tuple[str, str]) -> tuple[str, bytes]:
    return task[0], storage.read_bytes(task[1])


def _parse(data: bytes) -> _Annotation:
    """Parse one annotation file; an unreadable one comes back with its fault."""
    try:
        _refuse_doctype(data)
        root = ET.fromstring(data)  # noqa: S314 (no DOCTYPE, so no entities)
    except (ET.ParseError, expat.ExpatError, ValueError, LookupError) as error:
        return _Annotation(0, 0, "", [], fault=f"its annotation is no XML that can be used: {error}")
    if root.tag != "annotation":
        return _Annotation(0, 0, "", [], fault=f"its annotation is no VOC XML: the root is <{root.tag}>")
    width, height = (_number(root.findtext(f"size/{side}")) or 0 for side in ("width", "height"))
    objects = [
        ((item.findtext("name") or "").strip(), _box(item.find("bndbox")), _flag(item.findtext("difficult")))
        for item in root.iterfind("object")
    ]
    return _Annotation(int(width), int(height), (root.findtext("filename") or "").strip(), objects)


def _refuse_doctype(data: bytes) -> None:
    """Raise ValueError at a DOCTYPE: its entities can read files and fill the memory."""

    def refuse(*_: object) -> None:
        raise ValueError("it has a DOCTYPE, which is refused")

    parser = expat.ParserCreate()
    parser.StartDoctypeDeclHandler = refuse
    parser.Parse(data, True)


def _box(corners: ET.Element | None) -> tuple[float, ...]:
    if corners is None:
        return ()
    values = [_number(corners.findtext(name)) for name in ("xmin", "ymin", "xmax", "ymax")]
    xmin, ymin, xmax, ymax = values
    if xmin is None or ymin is None or xmax is None or ymax is None:
        return ()
    wide = xmax - xmin + 1 if xmax > xmin else 0.0
    high = ymax - ymin + 1 if ymax > ymin else 0.0
    return xmin - 1, ymin - 1, wide, high


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if abs(value) < 1e9 else None


def _flag(text: str | None) -> int:
    return int((text or "").strip() == "1")


def _entry(stem: str, annotation: _Annotation | None, images: Folder, labels: dict[str, int]) -> Entry:
    # The file that the annotation names if it has the same stem, else any of that stem.
    named = annotation.file_name if annotation and PurePosixPath(annotation.file_name).stem == stem else ""
    file = images.find(named, stem.lower())
    if file is None:
        fault = (reasons.IMAGE_MISSING, f"no file {stem}.* in {images.uri}")
        return Entry(stem, "", 0, 0, [], fault=fault)
    name, version = file
    origin = storage.join(images.uri, name)
    if annotation is None:
        fault = (reasons.IMAGE_UNREADABLE, f"no Annotations/{stem}.xml")
        return Entry(name, origin, 0, 0, [], fault=fault, version=version)
    boxes = [Box(labels.get(label, UNKNOWN), bbox, 0.0, crowd) for label, bbox, crowd in annotation.objects]
    entry = Entry(name, origin, annotation.width, annotation.height, boxes, version=version)
    if annotation.fault:
        entry.fault = (reasons.IMAGE_UNREADABLE, annotation.fault)
    return entry


def _note_overlaps(splits: dict[str, list[str]], problems: Problems) -> None:
    seen: dict[str, str] = {}
    for split, stems in splits.items():
        for stem in stems:
            if stem in seen:
                problems.add(reasons.IMAGE_IN_TWO_SPLITS, f"{stem} in {seen[stem]} and {split}")
            seen[stem] = split
