"""COCO data sets: JSON files (https://cocodataset.org/#format-data) with images near them or by their
`coco_url`.

COCO 2017 (https://cocodataset.org/#download) is read from its zips, or from a mirror with zips/ and
annotations/. Its images are fetched one by one over many connections; the zips are not copied.
"""

import hashlib
import json
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import PurePosixPath

from trainer import storage
from trainer.base.errors import DataError
from trainer.data import problem_counts as reasons
from trainer.data.problem_counts import Problems
from trainer.data.sources.coco_json import CocoFile, CocoImages, is_fetched
from trainer.data.sources.files import Folders, Zip, open_member
from trainer.data.sources.source import (
    AS_PUBLISHED,
    ROWS,
    Category,
    Entry,
    Listing,
    Reading,
    Rows,
    Source,
    SplitOverlaps,
    batched,
    split_of,
)

_SPLIT_FOLDERS = {
    "train": ("train2017", "train2014", "train"),
    "val": ("val2017", "val2014", "val", "valid", "validation"),
    "test": ("test2017", "test2014", "test"),
}
_ANNOTATION_FOLDERS: tuple[tuple[str, ...], ...] = (
    ("annotations",), ("Annotations",), ("",), ("coco",), ("train", "valid", "val", "test"),
)  # fmt: skip


class ImageLocator:
    """Finds the images of an annotation file: near it, else by their `coco_url`."""

    def __init__(self, uri: str, split: str, images: CocoImages) -> None:
        """Choose the folder that holds most of 20 `images` from all over the file."""
        self._on_web = storage.scheme(uri) in storage.WEB
        self._base = storage.parent(uri)
        self._folders = Folders()
        self._best = ""
        if self._on_web:
            return
        probes = list(islice(images.entries(max(1, images.count // 20)), 20))
        stem = PurePosixPath(uri).stem.rpartition("_")[2]  # val2017 of instances_val2017.json
        others = [name for names in _SPLIT_FOLDERS.values() for name in names]
        names = (stem or split, *_SPLIT_FOLDERS[split], "images", "JPEGImages", "data", *others)
        places = []
        for base in dict.fromkeys((self._base, storage.parent(self._base))):
            for name in names:
                places += [storage.join(base, "images", name), storage.join(base, name)]
            places.append(base)
        hits = {place: sum(self._look(place, probe) is not None for probe in probes) for place in places}
        best = max(places, key=lambda place: hits[place])
        if hits[best]:
            self._best = best
        elif not any(probe.origin for probe in probes):
            raise DataError(
                f"the images of {uri} are not beside it; looked for {probes[0].file_name} in {self._base} "
                f"and {storage.parent(self._base)}, and in their folders {', '.join(dict.fromkeys(names))}",
                fix="put the images in one of these folders, or give them a coco_url",
            )

    def locate(self, entry: Entry) -> str:
        """Set an entry's `origin` and `version`, or its `fault`; return text that changes with its file."""
        folder = "/" if entry.origin.startswith("/") else self._best  # "/": an absolute file_name.
        located = self._look(folder, entry) if folder else None
        if located:
            entry.origin, entry.version = located
            return f"{entry.file_name} {entry.version}"
        if is_fetched(entry.origin):
            return f"{entry.file_name} {entry.origin}"
        if self._on_web:
            entry.origin = storage.join(self._base, entry.file_name)
            return ""
        entry.fault = entry.fault or (reasons.IMAGE_MISSING, f"not in {self._best}, and without a coco_url")
        return f"{entry.file_name} missing"

    def _look(self, place: str, entry: Entry) -> tuple[str, str] | None:
        """Return URI and version of an entry's file under a place, or None."""
        path = PurePosixPath(entry.file_name)
        folder = place if path.parent == PurePosixPath(".") else storage.join(place, str(path.parent))
        return self._folders.find(folder, path.name)


@dataclass(frozen=True)
class CocoSource(Source):
    """A COCO JSON or a folder with such files."""

    location: str
    reading: Reading = AS_PUBLISHED
    confined: str = ""
    """Folder that no file_name may lead out of; "" if absolute ones are taken."""

    @property
    def uri(self) -> str:
        return f"coco:{self.location}"

    def listing(self) -> Listing:
        """Read images and categories; the boxes are read when the rows are gone through."""
        digest, problems = hashlib.sha256(), Problems()
        uris = self._files()
        files = {split: CocoFile.at(uri, confined=bool(self.confined)) for split, uri in uris.items()}
        for split, file in files.items():
            with file.open() as data:
                digest.update(f"{split} {hashlib.file_digest(data, 'sha256').hexdigest()}\n".encode())
        categories = merged_categories(files.values())
        splits, overlaps = {}, SplitOverlaps(problems)
        for split, file in files.items():
            images = CocoImages(file, problems)
            locator = ImageLocator(file.uri, split, images)
            for entries in batched(images.entries(), ROWS):
                for entry in entries:
                    digest.update(locator.locate(entry).encode("utf-8", "surrogatepass") + b"\n")
                overlaps.add(split, [(entry.file_name, entry.origin) for entry in entries])
            read = partial(images.annotated, categories, self.reading, locator.locate)
            splits[split] = Rows.of(read, problems)
        names = [f"{split} of {uri.removeprefix(f'{self.location}/')}" for split, uri in uris.items()]
        return Listing(
            categories, splits, digest.hexdigest(), problems,
            read_as=f"COCO JSON: {'; '.join(names)}", box_format=self.reading.box_format,
        )  # fmt: skip

    def _files(self) -> dict[str, str]:
        """Return the annotation file of each split; a lone file is train whatever its name."""
        if self.location.lower().endswith(".json"):
            return {"train": self.location}
        uris = annotation_files(self.location)
        if not uris:
            raise DataError(
                f"{self.uri}: no COCO JSON in it",
                fix="name a JSON file, or a folder that holds annotations/instances_train.json and the like",
            )
        if len(uris) == 1:
            return {"train": uris[0]}
        splits: dict[str, str] = {}
        for uri in uris:
            split = split_of(PurePosixPath(uri).name) or split_of(storage.parent(uri).rpartition("/")[2])
            if split in splits:
                raise DataError(
                    f"{self.uri}: both {splits[split]} and {uri} are split {split!r}",
                    fix="name one JSON file, or leave one file a split in the folder",
                )
            if split:
                splits[split] = uri
        if "train" not in splits:
            raise DataError(
                f"{self.uri}: no training split among {', '.join(uris)}",
                fix="give the file's name the word train, or name that file as the source",
            )
        return {split: splits[split] for split in ("train", "val", "test") if split in splits}


def annotation_files(folder: str) -> list[str]:
    """Return the URIs of the COCO JSON files in a folder; those of box annotations if there are any.

    The first of annotations/, the folder itself, coco/, and the folders train, valid, val, test that has any
    is taken. In the folders of splits a lone file may have any name.
    """
    for place in _ANNOTATION_FOLDERS:
        uris = [
            storage.join(holder, name)
            for holder in (storage.join(folder, name) if name else folder for name in place)
            for name in sorted(storage.list_states(holder))
            if name.lower().endswith(".json")
        ]
        names = [PurePosixPath(uri).name for uri in uris]
        boxes = [
            uri for uri, name in zip(uris, names, strict=True)
            if name.startswith("instances_") or name.endswith("_annotations.coco.json")
        ]  # fmt: skip
        one_each = len(place) > 1 and len(uris) == len({storage.parent(uri) for uri in uris})
        if boxes or one_each or any(map(split_of, names)) or len(uris) == 1:
            return boxes or uris
    return []


def merged_categories(files: Iterable[CocoFile]) -> list[Category]:
    """Return the categories of files, by their ids; raise DataError if they contradict each other."""
    by_id: dict[int, str] = {}
    by_name: dict[str, int] = {}
    for file in files:
        for item in file.items("categories"):
            number, name = item.get("id"), item.get("name")
            named = isinstance(name, str) and name.strip()
            if not isinstance(number, int) or abs(number) >= 2**63 or not named:
                raise DataError(
                    f"{file.uri}: category {json.dumps(item)[:80]} lacks an integer id of 64 bits or a name",
                    fix="give each category an integer id and a name, and use the id in the annotations",
                )
            if by_id.setdefault(number, name) != name or by_name.setdefault(name, number) != number:
                raise DataError(
                    f"{file.uri}: category {number} {name!r} is {by_name.get(name, number)} "
                    f"{by_id[number]!r} elsewhere",
                    fix="give the categories the same ids and names in all files, each once",
                )
    return [Category(by_id[number], number) for number in sorted(by_id)]


BASE = "http://images.cocodataset.org"
ANNOTATIONS = "annotations/annotations_trainval2017.zip"
_SPLITS = {"train": "train2017", "val": "val2017"}
_opened: dict[str, Zip] = {}
_opening = threading.Lock()


@dataclass(frozen=True)
class Coco2017Source(Source):
    """COCO 2017's training and validation images."""

    base: str = BASE
    reading: Reading = AS_PUBLISHED
    origins_are_uris = False

    @classmethod
    def parse(cls, text: str) -> "Coco2017Source":
        """Read "" or "base=URI"."""
        name, _, value = (part.strip() for part in text.partition("="))
        if text.strip() and (name != "base" or not value):
            raise DataError(f"source coco:2017: cannot use {text!r}", fix="parameters: base=URI")
        return cls(storage.absolute(os.path.expanduser(value))) if value else cls()

    @property
    def uri(self) -> str:
        return "coco:2017" if self.base == BASE else f"coco:2017,base={self.base}"

    def listing(self) -> Listing:
        """Read the categories; annotations and the zips' directories are read with the rows."""
        zips = {split: storage.join(self.base, f"zips/{name}.zip") for split, name in _SPLITS.items()}
        annotations = storage.join(self.base, ANNOTATIONS)
        states = []
        for uri in (annotations, *zips.values()):
            state = storage.state(uri)
            if state is None:
                raise DataError(f"source {self.uri}: no file {uri}", fix="check base and the network")
            states.append((uri, state.size, state.version))
        files = {}
        for split, name in _SPLITS.items():
            member = f"annotations/instances_{name}.json"
            files[split] = CocoFile(f"{annotations}#{member}", partial(open_member, annotations, member))
        # Both files have the same; that of val is a twentieth as large.
        categories, problems = merged_categories([files["val"]]), Problems()
        splits = {
            split: Rows.of(partial(self._entries, files[split], zips[split], name, categories), problems)
            for split, name in _SPLITS.items()
        }
        digest = hashlib.sha256(json.dumps(states).encode()).hexdigest()
        return Listing(categories, splits, digest, problems, box_format=self.reading.box_format)

    def _entries(
        self, file: CocoFile, zip_uri: str, folder: str, categories: list[Category], problems: Problems
    ) -> Iterator[Entry]:
        directory = _directory(zip_uri, fresh=True)

        def locate(entry: Entry) -> None:
            name = f"{folder}/{entry.file_name}"
            entry.origin, entry.version = f"{zip_uri}#{name}", directory.state(name)
            if not entry.version:
                entry.fault = entry.fault or (reasons.IMAGE_MISSING, f"no {name} in {zip_uri}")

        return CocoImages(file, problems).annotated(categories, self.reading, locate, problems)

    def read(self, origin: str) -> bytes:
        uri, _, name = origin.rpartition("#")
        return _directory(uri).read(name)


def _directory(uri: str, *, fresh: bool = False) -> Zip:
    """Return a zip's directory, which is read once in a process, or again if asked to."""
    with _opening:
        if fresh or uri not in _opened:
            _opened[uri] = Zip(uri)
        return _opened[uri]
