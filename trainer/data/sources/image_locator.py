"""Locates the images of a COCO JSON: tries the usual layouts one after the other."""

import unicodedata
from collections.abc import Iterator
from pathlib import PurePosixPath

from trainer import storage
from trainer.base.errors import DataError
from trainer.data import problem_counts as reasons
from trainer.data.sources.coco_images import is_fetched
from trainer.data.sources.folder_listing import Folder
from trainer.data.sources.source import Entry

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
