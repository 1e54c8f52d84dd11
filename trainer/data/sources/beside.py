"""Where the images of a COCO JSON lie: the usual layouts, tried one after the other."""

import unicodedata
from collections.abc import Iterator
from pathlib import PurePosixPath

from trainer import storage
from trainer.data import problems as reasons
from trainer.data.sources.base import Entry
from trainer.errors import DataError

_FETCHED = (*storage.WEB, *storage.OBJECT_STORES)
_PROBES = 20
_SPLIT_FOLDERS = {
    "train": ("train2017", "train2014", "train"),
    "val": ("val2017", "val2014", "val", "valid", "validation"),
    "test": ("test2017", "test2014", "test"),
}


def locate(entries: list[Entry], uri: str, split: str) -> str:
    """Set each entry's `origin`, or its `fault` if it is nowhere.

    A file beside the annotations comes first, then the `coco_url` that stands in `origin`.

    Args:
        entries: of one annotation file.
        uri: of that file.
        split: the split it is.

    Returns:
        Text that changes when one of the files does.

    Raises:
        DataError: none of the images is beside the file and none has a URL.
    """
    listings: dict[str, _Folder] = {}
    places = [] if storage.scheme(uri) in storage.WEB else list(_places(uri, split))
    probes = entries[:: max(1, len(entries) // _PROBES)][:_PROBES]
    hits = {place: sum(_look(place, probe, listings) is not None for probe in probes) for place in places}
    best = max(places, key=lambda place: hits[place], default=None)
    if best is not None and hits[best] == 0:
        best = None
    if best is None and places and not any(_is_url(entry.origin) for entry in probes):
        folder = storage.parent(uri)
        raise DataError(
            f"the images of {uri} are not beside it; looked for {probes[0].file_name} in {folder} and "
            f"{storage.parent(folder)}, and in their folders {', '.join(_folders(uri, split))}",
            fix="put the images in one of these folders, or give them a coco_url",
        )
    states = []
    for entry in entries:
        found = _look(best, entry, listings) if best else None
        if found:
            entry.origin, state = found
            entry.version = f"{state.size} {state.version}"
            states.append(f"{entry.file_name} {state}")
        elif _is_url(entry.origin):
            states.append(f"{entry.file_name} {entry.origin}")
        elif best is None and storage.scheme(uri) in storage.WEB:
            entry.origin = storage.join(storage.parent(uri), entry.file_name)
        else:
            entry.fault = entry.fault or (reasons.IMAGE_MISSING, f"not in {best}, and without a coco_url")
            states.append(f"{entry.file_name} missing")
    return "\n".join(states)


class _Folder:
    """The files of a folder by name; also without regard to case and to how accents are encoded."""

    def __init__(self, uri: str) -> None:
        self.states = storage.list_states(uri)
        self._folded: dict[str, str] = {}
        self._uri = uri
        for name in sorted(self.states, reverse=True):
            self._folded[_fold(name)] = name

    def find(self, name: str) -> tuple[str, storage.FileState] | None:
        actual = name if name in self.states else self._folded.get(_fold(name))
        return None if actual is None else (storage.join(self._uri, actual), self.states[actual])


def _fold(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


def _look(place: str, entry: Entry, listings: dict[str, _Folder]) -> tuple[str, storage.FileState] | None:
    """Return URI and state of an entry's file under a place, or None."""
    path = PurePosixPath(entry.file_name)
    holder = place if path.parent == PurePosixPath(".") else storage.join(place, str(path.parent))
    if holder not in listings:
        listings[holder] = _Folder(holder)
    return listings[holder].find(path.name)


def _folders(uri: str, split: str) -> list[str]:
    """Return the names of folders that may hold a split's images, the likeliest first."""
    named = PurePosixPath(uri).stem.rpartition("_")[2]  # val2017 of instances_val2017.json
    own = _SPLIT_FOLDERS[split]
    others = [name for names in _SPLIT_FOLDERS.values() for name in names]
    return list(dict.fromkeys((named or split, *own, "images", "JPEGImages", "data", *others)))


def _places(uri: str, split: str) -> Iterator[str]:
    """Yield the folders in which the images may lie, the likeliest first."""
    folder = storage.parent(uri)
    for base in dict.fromkeys((folder, storage.parent(folder))):
        for name in _folders(uri, split):
            yield storage.join(base, "images", name)
            yield storage.join(base, name)
        yield base


def _is_url(text: str) -> bool:
    """Tell whether an image can be fetched by this; other schemes and paths are not followed."""
    return storage.scheme(text) in _FETCHED
