"""COCO 2017 (https://cocodataset.org/#download) straight from its zips.

    coco:2017               from COCO's own server
    coco:2017,base=URI      from a mirror: a folder with zips/ and annotations/

Images are fetched from the zips one by one, over many connections; the zips are never copied.
"""

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa

from trainer import storage
from trainer.base.errors import DataError
from trainer.data import problem_counts as reasons
from trainer.data.problem_counts import Problems
from trainer.data.sources.coco import merge_categories
from trainer.data.sources.coco_images import CocoImages
from trainer.data.sources.coco_json import CocoFile
from trainer.data.sources.coco_rows import CocoRows
from trainer.data.sources.source import AS_PUBLISHED, Category, Entry, Listing, Reading
from trainer.data.sources.zip_members import Zip, open_member

BASE = "http://images.cocodataset.org"
ANNOTATIONS = "annotations/annotations_trainval2017.zip"
_SPLITS = {"train": "train2017", "val": "val2017"}
_opened: dict[str, Zip] = {}
_opening = threading.Lock()


@dataclass(frozen=True)
class Coco2017Source:
    """COCO 2017's training and validation images."""

    base: str = BASE
    reading: Reading = AS_PUBLISHED
    cpu_bound = False
    origins_are_uris = False

    @classmethod
    def parse(cls, text: str) -> "Coco2017Source":
        """Read "" or "base=URI".

        Raises:
            DataError: it is something else.
        """
        name, _, value = (part.strip() for part in text.partition("="))
        if text.strip() and (name != "base" or not value):
            raise DataError(f"source coco:2017: cannot use {text!r}", fix="parameters: base=URI")
        return cls(storage.absolute(os.path.expanduser(value))) if value else cls()

    @property
    def uri(self) -> str:
        """Name the source."""
        return "coco:2017" if self.base == BASE else f"coco:2017,base={self.base}"

    @property
    def images_uri(self) -> str:
        """Name where the bytes come from."""
        return self.uri

    def listing(self) -> Listing:
        """Read the categories; annotations and the zips' directories are read with the rows.

        Raises:
            DataError: a zip is missing or not of its form.
            StorageError: it cannot be reached.
        """
        zips = {split: storage.join(self.base, f"zips/{name}.zip") for split, name in _SPLITS.items()}
        annotations = storage.join(self.base, ANNOTATIONS)
        states = []
        for uri in (annotations, *zips.values()):
            state = storage.state(uri)
            if state is None:
                raise DataError(f"source {self.uri}: no file {uri}", fix="check base and the network")
            states.append((uri, state.size, state.version))
        files = {split: _annotations(annotations, name) for split, name in _SPLITS.items()}
        # Both files have the same; that of val is a twentieth as large.
        categories: list[Category] = []
        merge_categories(categories, files["val"])
        problems = Problems()
        splits = {
            split: _Split(files[split], zips[split], name, categories, problems, self.reading)
            for split, name in _SPLITS.items()
        }
        digest = hashlib.sha256(json.dumps(states).encode()).hexdigest()
        return Listing(categories, splits, digest, problems, box_format=self.reading.box_format)

    def read(self, origin: str) -> bytes:
        """Return an image's bytes."""
        uri, _, name = origin.rpartition("#")
        return _directory(uri).read(name)


@dataclass(frozen=True)
class _Split:
    """The images of a split."""

    file: CocoFile
    zip_uri: str
    folder: str
    """Of the images in the zip."""
    categories: list[Category]
    problems: Problems = field(repr=False)
    reading: Reading

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield rows of SOURCE_ROW.

        Raises:
            DataError: the annotations or the zip are not of their form.
        """
        images = CocoImages(self.file, self.problems)
        directory = _directory(self.zip_uri, anew=True)

        def place(entry: Entry) -> None:
            name = f"{self.folder}/{entry.file_name}"
            entry.origin, entry.version = f"{self.zip_uri}#{name}", directory.state(name)
            if not entry.version:
                entry.fault = entry.fault or (reasons.IMAGE_MISSING, f"no {name} in {self.zip_uri}")

        yield from CocoRows(self.file, images, self.categories, self.problems, place, self.reading).batches()


def _annotations(zip_uri: str, name: str) -> CocoFile:
    """Return the annotation file of a split, which is unpacked while it is read."""
    member = f"annotations/instances_{name}.json"
    return CocoFile(f"{zip_uri}#{member}", partial(open_member, zip_uri, member))


def _directory(uri: str, *, anew: bool = False) -> Zip:
    """Return a zip's directory, which is read once in a process, or anew."""
    with _opening:
        if anew or uri not in _opened:
            _opened[uri] = Zip(uri)
        return _opened[uri]
