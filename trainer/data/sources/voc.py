"""PASCAL VOC data sets: an XML file for each image.

The folder has VOC's own layout or another: see `trainer.data.sources.voc_layouts`; what the boxes mean
stands in `trainer.data.sources.voc_xml`.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from tempfile import TemporaryFile

import pyarrow as pa

from trainer import storage
from trainer.base.errors import MissingError
from trainer.data import problem_counts as reasons
from trainer.data.problem_counts import Problems
from trainer.data.sources.annotation_texts import read_all
from trainer.data.sources.row_format import batches_of
from trainer.data.sources.source import UNKNOWN, Box, Category, Entry, Listing
from trainer.data.sources.voc_layouts import VocLayout, layout_of
from trainer.data.sources.voc_xml import VocAnnotation, parse_xml


@dataclass(frozen=True)
class VocSource:
    """A folder with VOC's XML files and images."""

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
        layout = layout_of(self.folder)
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
        """Yield rows of SOURCE_ROW."""
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
