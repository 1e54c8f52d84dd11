"""PASCAL VOC data sets: an XML file for each image, in a layout of `trainer.data.sources.voc_layouts`.

VOC corners are pixels counted from 1, the last one included (VOC2012 development kit, section
on annotations), while the internal form measures from the image's top left corner. So

    x = xmin - 1, y = ymin - 1, width = xmax - xmin + 1, height = ymax - ymin + 1

and a box from 1 to the image's width covers all of it. COCO JSON that was made from VOC by plain
subtraction (x = xmin, width = xmax - xmin) is one pixel off that. Corners that coincide are a slip
of the annotator, not a box of one pixel: such a box has no area here, as it has none there.
"""

import hashlib
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass, field
from tempfile import TemporaryFile
from xml.parsers import expat

import pyarrow as pa

from trainer.base.errors import MissingError
from trainer.data import problem_counts as reasons
from trainer.data.problem_counts import Problems
from trainer.data.sources.files import read_all
from trainer.data.sources.source import UNKNOWN, Box, Category, Entry, Listing, Source, batches_of
from trainer.data.sources.voc_layouts import VocLayout

_CORNERS = ("xmin", "ymin", "xmax", "ymax")
_COMMA = re.compile(r"-?\d+,\d+")


@dataclass
class VocAnnotation:
    """What one XML file says."""

    width: int
    height: int
    file_name: str
    objects: list[tuple[str, tuple[float, ...], int]]
    """(class name, bbox, iscrowd)"""
    fault: str = ""
    """Why nothing of it can be used."""
    bad_objects: list[tuple[str, str]] = field(default_factory=list)
    """(reason, what it is) of objects that have no box that can be used."""


def parse_xml(data: bytes) -> VocAnnotation:
    """Parse one annotation file; an unreadable one comes back with its fault."""
    try:
        _refuse_doctype(data)
        root = ET.fromstring(data)  # noqa: S314 (no DOCTYPE, so no entities)
    except (ET.ParseError, expat.ExpatError, ValueError, LookupError) as error:
        return VocAnnotation(0, 0, "", [], fault=f"its annotation is no XML that can be used: {error}")
    if root.tag != "annotation":
        of_cvat = "; it is CVAT's own: export as COCO or VOC there" if root.tag == "annotations" else ""
        fault = f"its annotation is no VOC XML: the root is <{root.tag}>{of_cvat}"
        return VocAnnotation(0, 0, "", [], fault=fault)
    width, height = (_number(root.findtext(f"size/{side}")) or 0 for side in ("width", "height"))
    # A backslash is Windows' way to part folders.
    name = (root.findtext("filename") or "").strip().replace("\\", "/")
    annotation = VocAnnotation(int(width), int(height), name, [])
    for number, item in enumerate(root.iterfind("object"), 1):
        label = (item.findtext("name") or "").strip()
        box = _box(item.find("bndbox"))
        if isinstance(box, str):
            annotation.bad_objects.append((box, f"object {number} ({label})"))
        else:
            annotation.objects.append((label, box, _flag(item.findtext("difficult"))))
    return annotation


def _refuse_doctype(data: bytes) -> None:
    """Raise ValueError at a DOCTYPE: its entities can read files and fill the memory."""

    def refuse(*_: object) -> None:
        raise ValueError("it has a DOCTYPE, which is refused")

    parser = expat.ParserCreate()
    parser.StartDoctypeDeclHandler = refuse
    parser.Parse(data, True)


def _box(corners: ET.Element | None) -> tuple[float, ...] | str:
    """Return [x, y, width, height], or the reason why there is none."""
    if corners is None:
        return reasons.BOX_ABSENT
    texts = [(corners.findtext(name) or "").strip() for name in _CORNERS]
    if not any(texts):
        return reasons.BOX_ABSENT
    xmin, ymin, xmax, ymax = map(_number, texts)
    if xmin is None or ymin is None or xmax is None or ymax is None:
        commas = any(_COMMA.fullmatch(text) for text in texts)
        return reasons.BOX_DECIMAL_COMMA if commas else reasons.BOX_NOT_FINITE
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


@dataclass(frozen=True)
class VocSource(Source):
    """A folder with VOC's XML files and images."""

    folder: str

    @property
    def uri(self) -> str:
        return f"voc:{self.folder}"

    def listing(self) -> Listing:
        """Read all annotation files.

        Raises:
            DataError: the folder has no annotations or no images.
        """
        layout = VocLayout(self.folder)
        keys = sorted(
            {key for of_split in layout.splits.values() for key in of_split if layout.annotation(key)}
        )
        digest = hashlib.sha256()
        annotations, problems = _Annotations(), Problems()
        texts = read_all(layout.annotation(key) for key in keys)
        for key, data in zip(keys, texts, strict=True):
            text = b"" if isinstance(data, MissingError) else data
            digest.update(f"{key} {len(text)}\n".encode() + text)
            annotation = parse_xml(text)
            if isinstance(data, MissingError):
                annotation.fault = data.message
            annotations.add(key, annotation)
            for reason, item in annotation.bad_objects:
                problems.add(reason, f"{item} in {layout.annotation(key)}")
        # Sorted, so that labels do not depend on which image comes first.
        classes = sorted(annotations.classes - {""})
        labels = {name: index for index, name in enumerate(classes)}
        rows_by_split = {
            split: VocRows(of_split, annotations, layout, labels) for split, of_split in layout.splits.items()
        }
        for split, entries in rows_by_split.items():
            for entry in entries:
                digest.update(f"{split} {entry.file_name} {entry.version}\n".encode("utf-8", "replace"))
        _note_overlaps(layout.splits, problems)
        for name in layout.unannotated():
            problems.add(reasons.IMAGE_WITHOUT_ANNOTATION, name)
        categories = [Category(name, index + 1) for name, index in labels.items()]
        return Listing(categories, rows_by_split, digest.hexdigest(), problems, read_as=layout.read_as)


class _Annotations:
    """What the XML files say, on the disk: memory holds where."""

    def __init__(self) -> None:
        self._lines = TemporaryFile()  # noqa: SIM115 (lives as long as this does)
        self._places: dict[str, int] = {}
        self.classes: set[str] = set()
        """Names of the objects."""

    def add(self, key: str, annotation: VocAnnotation) -> None:
        """Keep what the file of this key says."""
        self._places[key] = self._lines.tell()
        self.classes.update(item[0] for item in annotation.objects)
        fields = (
            annotation.width,
            annotation.height,
            annotation.file_name,
            annotation.objects,
            annotation.fault,
        )
        self._lines.write(json.dumps(fields).encode() + b"\n")

    def get(self, key: str) -> VocAnnotation | None:
        """Return what the file of this key says; None if there is none."""
        if key not in self._places:
            return None
        self._lines.seek(self._places[key])
        width, height, name, objects, fault = json.loads(self._lines.readline())
        boxes = [(label, tuple(box), crowd) for label, box, crowd in objects]
        return VocAnnotation(width, height, name, boxes, fault)


@dataclass(frozen=True)
class VocRows:
    """The images of a split."""

    keys: list[str]
    annotations: _Annotations
    layout: VocLayout
    labels: dict[str, int]
    """Position of each class, by name."""

    def __iter__(self) -> Iterator[Entry]:
        return (_entry(key, self.annotations.get(key), self.layout, self.labels) for key in self.keys)

    def batches(self) -> Iterator[pa.RecordBatch]:
        return batches_of(self)


def _entry(key: str, annotation: VocAnnotation | None, layout: VocLayout, labels: dict[str, int]) -> Entry:
    file = layout.image(key, annotation.file_name if annotation else "")
    if file is None:
        return Entry(key, "", 0, 0, [], fault=(reasons.IMAGE_MISSING, layout.looked(key)))
    name, origin, version = file
    if annotation is None:
        fault = (reasons.IMAGE_UNREADABLE, f"no Annotations/{key}.xml")
        return Entry(name, origin, 0, 0, [], fault=fault, version=version)
    boxes = [Box(labels.get(label, UNKNOWN), bbox, 0.0, crowd) for label, bbox, crowd in annotation.objects]
    entry = Entry(name, origin, annotation.width, annotation.height, boxes, version=version)
    if annotation.fault:
        entry.fault = (reasons.IMAGE_UNREADABLE, annotation.fault)
    return entry


def _note_overlaps(splits: dict[str, list[str]], problems: Problems) -> None:
    seen: dict[str, str] = {}
    for split, keys in splits.items():
        for key in keys:
            if key in seen:
                problems.add(reasons.IMAGE_IN_TWO_SPLITS, f"{key} in {seen[key]} and {split}")
            seen[key] = split
