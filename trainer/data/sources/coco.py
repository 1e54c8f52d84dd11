"""COCO JSON (https://cocodataset.org/#format-data): one file, or a folder with one a split.

Images lie beside the annotations in one of the usual layouts, or are fetched by their `coco_url`.
Boxes are taken as they are: x, y from the image's top left corner, width and height, in pixels.
"""

import hashlib
import json
from array import array
from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np

from trainer import storage
from trainer.base.errors import DataError
from trainer.data import problem_counts as reasons
from trainer.data.problem_counts import Problems
from trainer.data.sources.coco_images import CocoImages
from trainer.data.sources.coco_json import CocoFile
from trainer.data.sources.coco_rows import CocoRows
from trainer.data.sources.image_locator import ImageLocator
from trainer.data.sources.source import AS_PUBLISHED, Category, Entry, Listing, Reading, split_of


@dataclass(frozen=True)
class CocoSource:
    """A COCO JSON or a folder with such files."""

    location: str
    reading: Reading = AS_PUBLISHED
    confined: str = ""
    """Folder that no file_name may lead out of; "" where absolute ones are taken."""
    cpu_bound = False
    origins_are_uris = True

    @property
    def uri(self) -> str:
        """Name the file or folder."""
        return f"coco:{self.location}"

    @property
    def images_uri(self) -> str:
        """Name where the bytes come from."""
        return self.uri

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

    def read(self, origin: str) -> bytes:
        """Return an image's bytes."""
        return storage.read_bytes(origin)

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
