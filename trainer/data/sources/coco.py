"""COCO data sets: JSON files with their images, and COCO 2017 from its published zips.

`CocoSource` reads a COCO JSON (https://cocodataset.org/#format-data): one file, or a folder with one for each
split. Images are in one of the usual layouts beside the annotations, or are fetched by their `coco_url`.
Boxes are taken as they are: x, y from the image's top left corner, width and height, in pixels.

`Coco2017Source` reads COCO 2017 (https://cocodataset.org/#download) from its zips:

    coco:2017               from COCO's own server
    coco:2017,base=URI      from a mirror: a folder with zips/ and annotations/

Images are fetched from the zips one by one, over many connections; the zips are never copied.
"""

import hashlib
import json
import os
import threading
import unicodedata
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePosixPath

import numpy as np
import pyarrow as pa

from trainer import storage
from trainer.base.errors import DataError
from trainer.data import problem_counts as reasons
from trainer.data.problem_counts import Problems
from trainer.data.sources.coco_json import CocoFile, CocoImages, is_fetched
from trainer.data.sources.coco_rows import CocoRows
from trainer.data.sources.files import Folder
from trainer.data.sources.source import AS_PUBLISHED, Category, Entry, Listing, Reading, Source, split_of
from trainer.data.sources.zip_members import Zip, open_member

_SPLIT_FOLDERS = {
    "train": ("train2017", "train2014", "train"),
    "val": ("val2017", "val2014", "val", "valid", "validation"),
    "test": ("test2017", "test2014", "test"),
}


class ImageLocator:
    """Tells where each image of an annotation file is: beside it, else by the `coco_url`."""

    def __init__(self, uri: str, split: str, probes: list[Entry]) -> None:
        """Find the folder that holds the images.

        Args:
            uri: of the annotation file.
            split: the split it is.
            probes: some of its images; `origin` is the `coco_url`.

        Raises:
            DataError: none of them is beside the file and none has a URL.
        """
        self._on_web = storage.scheme(uri) in storage.WEB
        self._base = storage.parent(uri)
        self._folders: dict[str, Folder] = {}
        places = [] if self._on_web else list(_places(uri, split))
        hits = {place: sum(self._look(place, probe) is not None for probe in probes) for place in places}
        best = max(places, key=lambda place: hits[place], default=None)
        self._best = best if best is not None and hits[best] else None
        if self._best is None and places and not any(probe.origin for probe in probes):
            raise DataError(
                f"the images of {uri} are not beside it; looked for {probes[0].file_name} in {self._base} "
                f"and {storage.parent(self._base)}, and in their folders {', '.join(_folders(uri, split))}",
                fix="put the images in one of these folders, or give them a coco_url",
            )

    def place(self, entry: Entry) -> str:
        """Set an entry's `origin` and `version`, or its `fault` if it is nowhere.

        Returns:
            Text that changes when its file does.
        """
        if entry.origin.startswith("/"):  # An absolute file_name.
            located = self._look("/", entry)
        else:
            located = self._look(self._best, entry) if self._best else None
        if located:
            entry.origin, entry.version = located
            return f"{entry.file_name} {entry.version}"
        if is_fetched(entry.origin):
            return f"{entry.file_name} {entry.origin}"
        if self._best is None and self._on_web:
            entry.origin = storage.join(self._base, entry.file_name)
            return ""
        entry.fault = entry.fault or (reasons.IMAGE_MISSING, f"not in {self._best}, and without a coco_url")
        return f"{entry.file_name} missing"

    def _look(self, place: str, entry: Entry) -> tuple[str, str] | None:
        """Return URI and version of an entry's file under a place, or None."""
        path = PurePosixPath(entry.file_name)
        holder = place if path.parent == PurePosixPath(".") else storage.join(place, str(path.parent))
        if holder not in self._folders:
            self._folders[holder] = Folder(holder, _fold)
        entry_in_folder = self._folders[holder].find(path.name)
        return entry_in_folder and (storage.join(holder, entry_in_folder[0]), entry_in_folder[1])


def _fold(name: str) -> str:
    """Leave out how a name is written in capitals, and how its accents are encoded."""
    return unicodedata.normalize("NFC", name).casefold()


def _folders(uri: str, split: str) -> list[str]:
    """Return the names of folders that may hold a split's images, the likeliest first."""
    named = PurePosixPath(uri).stem.rpartition("_")[2]  # val2017 of instances_val2017.json
    split_folders = _SPLIT_FOLDERS[split]
    others = [name for names in _SPLIT_FOLDERS.values() for name in names]
    return list(dict.fromkeys((named or split, *split_folders, "images", "JPEGImages", "data", *others)))


def _places(uri: str, split: str) -> Iterator[str]:
    """Yield the folders in which the images may lie, the likeliest first."""
    folder = storage.parent(uri)
    for base in dict.fromkeys((folder, storage.parent(folder))):
        for name in _folders(uri, split):
            yield storage.join(base, "images", name)
            yield storage.join(base, name)
        yield base


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
        """Read images and categories; the boxes are read when the rows are gone through.

        Raises:
            DataError: there is none, one is not COCO JSON, or two disagree about the categories.
        """
        digest = hashlib.sha256()
        files = {
            split: CocoFile.at(uri, confined=bool(self.confined)) for split, uri in self._files().items()
        }
        categories: list[Category] = []
        for split, file in files.items():
            with file.open() as data:
                digest.update(f"{split} {hashlib.file_digest(data, 'sha256').hexdigest()}\n".encode())
            merge_categories(categories, file)
        splits: dict[str, CocoRows] = {}
        problems, overlaps = Problems(), _Overlaps()
        for split, file in files.items():
            images = CocoImages(file, problems)
            locator = ImageLocator(file.uri, split, images.probes())
            for entries in images.entries():
                for entry in entries:
                    digest.update(locator.place(entry).encode("utf-8", "surrogatepass") + b"\n")
                overlaps.note(split, entries, problems)
            splits[split] = CocoRows(file, images, categories, problems, locator.place, self.reading)
        names = [f"{split} of {_within(file.uri, self.location)}" for split, file in files.items()]
        read_as = f"COCO JSON: {'; '.join(names)}"
        return Listing(
            categories, splits, digest.hexdigest(), problems,
            read_as=read_as, box_format=self.reading.box_format,
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
        splits: dict[str, str] = {}
        for uri in uris:
            split = split_of(PurePosixPath(uri).name) or split_of(storage.parent(uri).rpartition("/")[2])
            if len(uris) == 1:
                split = "train"
            if split is None:
                continue
            if split in splits:
                raise DataError(
                    f"{self.uri}: both {splits[split]} and {uri} are split {split!r}",
                    fix="name one JSON file, or leave one file a split in the folder",
                )
            splits[split] = uri
        if "train" not in splits:
            raise DataError(
                f"{self.uri}: no training split among {', '.join(uris)}",
                fix="give the file's name the word train, or name that file as the source",
            )
        return {split: splits[split] for split in ("train", "val", "test") if split in splits}


def _within(uri: str, folder: str) -> str:
    """Return a file's name relative to a folder; its last name if it is not in it."""
    return uri[len(folder) + 1 :] if uri.startswith(f"{folder}/") else PurePosixPath(uri).name


def annotation_files(folder: str) -> list[str]:
    """Return the URIs of the COCO JSON files in a folder; those of box annotations if there are any.

    They are looked for in annotations/, the folder itself, coco/, and in the folders of splits
    (train, valid, val, test), in this order; the first place that has any is taken. In the folders of
    splits a file may have any name, where it is the only one of its folder.
    """
    places: tuple[tuple[str, ...], ...] = (
        ("annotations",), ("Annotations",), (), ("coco",), ("train", "valid", "val", "test"),
    )  # fmt: skip
    for place in places:
        folders = [storage.join(folder, name) for name in place] if place else [folder]
        uris = [
            storage.join(holder, name)
            for holder in folders
            for name in sorted(storage.list_states(holder))
            if name.lower().endswith(".json")
        ]
        boxes = [
            uri for uri in uris
            if PurePosixPath(uri).name.startswith("instances_") or uri.endswith("_annotations.coco.json")
        ]  # fmt: skip
        one_each = len(place) > 1 and len(uris) == len({storage.parent(uri) for uri in uris})
        if boxes or one_each or any(split_of(PurePosixPath(uri).name) for uri in uris) or len(uris) == 1:
            return boxes or uris
    return []


def merge_categories(categories: list[Category], file: CocoFile) -> None:
    """Add a file's categories to those of the files before it.

    Raises:
        DataError: one lacks its id or name, or has others elsewhere.
    """
    by_id = {category.original_id: category.name for category in categories}
    by_name = {category.name: category.original_id for category in categories}
    for item in file.items("categories"):
        original_id, name = item.get("id"), item.get("name")
        is_number = isinstance(original_id, int) and abs(original_id) < 2**63
        if not isinstance(original_id, int) or not is_number or not isinstance(name, str) or not name.strip():
            shown = json.dumps(item)[:80]
            problem = (
                f"the id of category {shown} is {_kind(original_id)}"
                if isinstance(original_id, float | str)
                else f"category {shown} lacks an integer id of 64 bits or a name"
            )
            raise DataError(
                f"{file.uri}: {problem}",
                fix="give each category an id, an integer, and a name; category_id of annotations likewise",
            )
        if by_id.get(original_id, name) != name or by_name.get(name, original_id) != original_id:
            raise DataError(
                f"{file.uri}: category {original_id} {name!r} is {by_name.get(name, original_id)} "
                f"{by_id.get(original_id, name)!r} elsewhere",
                fix="give the categories the same ids and names in all files, each once",
            )
        if original_id not in by_id:
            categories.append(Category(name, original_id))
            by_id[original_id], by_name[name] = name, original_id
    categories.sort(key=lambda category: category.original_id)


def _kind(original_id: float | str) -> str:
    return "a text" if isinstance(original_id, str) else "a number with a decimal point"


class _Overlaps:
    """Finds images that are in more than one split: scores on them would flatter. Eight bytes an image."""

    def __init__(self) -> None:
        self._seen: dict[str, array[int]] = {}
        self._sorted: dict[str, np.ndarray] = {}

    def note(self, split: str, entries: list[Entry], problems: Problems) -> None:
        """Take images of a split; one split comes after the other."""
        if split not in self._seen:
            self._sorted = {
                name: np.unique(np.array(seen_hashes)) for name, seen_hashes in self._seen.items()
            }
            self._seen[split] = array("q")
        hashes = np.array([hash(entry.origin) if entry.origin else 0 for entry in entries], np.int64)
        for other, seen_hashes in self._sorted.items():
            at = np.minimum(np.searchsorted(seen_hashes, hashes), len(seen_hashes) - 1)
            for row in np.flatnonzero((seen_hashes[at] == hashes) & (hashes != 0)).tolist():
                problem = f"{entries[row].file_name} in {other} and {split}"
                problems.add(reasons.IMAGE_IN_TWO_SPLITS, problem)
        self._seen[split].extend(hashes.tolist())


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
        return "coco:2017" if self.base == BASE else f"coco:2017,base={self.base}"

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
