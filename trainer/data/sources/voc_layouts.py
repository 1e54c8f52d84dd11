"""Where the XML files and images of a VOC data set lie, and which split each is of.

VOC's own layout has Annotations, JPEGImages and ImageSets/Main. Any other is a tree of folders: XML files
beside their images, as LabelImg writes them, or in folders of their own, and folders train, valid, test.
"""

import re
from collections import Counter, defaultdict
from pathlib import PurePosixPath

from trainer import storage
from trainer.base.errors import DataError
from trainer.data.images import IMAGE_SUFFIXES
from trainer.data.sources.source import split_of

_ANNOTATIONS = "Annotations"
_IMAGE_FOLDERS = ("JPEGImages", "images", "Images", _ANNOTATIONS)
_SPLIT_FOLDER = re.compile(
    r"(train|training|val|valid|validation|test|testing)(?:[-_ ]?(?:set|data|images|imgs|labels|\d{4}))?",
    re.I,
)
_ORDER = ("train", "val", "test")


class VocLayout:
    """A VOC data set's files. A key stands for an image and its annotation.

    In VOC's own layout it is the stem of both files, in any other the path of the XML file without its
    extension.
    """

    def __init__(self, root: str) -> None:
        """Find the files of the set in a folder.

        Raises:
            DataError: it has no XML files or no images.
            StorageError: it cannot be read.
        """
        self._root = root
        self._xml: dict[str, str] = {}
        self._places: dict[str, list[tuple[str, str]]] = defaultdict(list)
        """Path and version of the images of each stem, in lower case."""
        for name, state in storage.scan(root):
            path = PurePosixPath(name)
            if any(part.startswith(".") or part == "__MACOSX" for part in path.parts):
                continue
            if name.lower().endswith(".xml"):
                self._xml[name[:-4]] = name
            elif name.lower().endswith(IMAGE_SUFFIXES):
                self._places[path.stem.lower()].append((name, f"{state.size} {state.version}"))
        self._check()
        self._home = self._take_published()
        """Folder of the images in VOC's own layout; empty in another."""
        for paths in self._places.values():
            paths.sort()
        self.splits, self._by_lists = self._split()
        self._used: set[str] = set()

    @property
    def read_as(self) -> str:
        """How it was understood, for people."""
        lists = ", splits of ImageSets/Main" if self._by_lists else ""
        if self._home:
            return f"VOC: {_ANNOTATIONS} and {self._home}{lists}"
        beside = sum(map(self._is_beside, self._xml))
        layout = "XML files beside the images" if 2 * beside > len(self._xml) else "XML files and images"
        folders = [f"{split} of {', '.join(self._folders(keys))}" for split, keys in self.splits.items()]
        named = f", {'; '.join(folders)}" if len(folders) > 1 else ""
        return f"VOC: {layout}{lists or named}"

    def annotation(self, key: str) -> str:
        """Return the URI of the XML file; "" if there is none."""
        return storage.join(self._root, self._xml[key]) if key in self._xml else ""

    def image(self, key: str, named: str) -> tuple[str, str, str] | None:
        """Return name, URI and version of the image, or None.

        Args:
            key: the image's.
            named: file name that the annotation tells, which decides between images of the same stem.
        """
        place = self._image_of(key, named)
        if place is None:
            return None
        self._used.add(place[0])
        name = place[0].removeprefix(f"{self._home}/") if self._home else place[0]
        return name, storage.join(self._root, place[0]), place[1]

    def looked(self, key: str) -> str:
        """Say where an image that is not there was looked for."""
        if self._home:
            return f"no file {key}.* in {storage.join(self._root, self._home)}"
        path = PurePosixPath(key)
        if len(self._places.get(path.name.lower(), ())) > 1:
            return f"several images {path.name}.*, and none beside {key}.xml"
        return f"no file {path.name}.* beside {key}.xml or in another folder of its split"

    def unannotated(self) -> list[str]:
        """Return the names of images that belong to no annotation, where that can be told."""
        if self._by_lists or self._home:
            return []  # The lists tell what belongs to the set; the folder may hold more.
        return sorted(name for paths in self._places.values() for name, _ in paths if name not in self._used)

    def _check(self) -> None:
        if not self._xml:
            raise DataError(
                f"voc:{self._root}: no XML files in it",
                fix="name the folder that holds Annotations, JPEGImages and ImageSets, or the images with "
                "their XML files beside them",
            )
        if not self._places:
            raise DataError(
                f"voc:{self._root}: no images in JPEGImages, nor beside the XML files",
                fix=f"put the images there, as {', '.join(IMAGE_SUFFIXES)}",
            )

    def _take_published(self) -> str:
        """Take only VOC's own folders if there are such, keys being stems; return that of the images."""
        xml = {
            key.rpartition("/")[2]: name for key, name in self._xml.items() if _folder(key) == _ANNOTATIONS
        }
        folders = {_folder(name) for paths in self._places.values() for name, _ in paths}
        home = next((folder for folder in _IMAGE_FOLDERS if xml and folder in folders), "")
        if home:
            self._xml = xml
            for stem, paths in self._places.items():
                self._places[stem] = [place for place in paths if _folder(place[0]) == home]
        return home

    def _split(self) -> tuple[dict[str, list[str]], bool]:
        """Return the keys of each split, by lists or by folders, and whether it was by lists."""
        keys_of: dict[str, list[str]] = defaultdict(list)
        for key in sorted(self._xml):
            keys_of[PurePosixPath(key).name].append(key)
        lists = _listed_splits(self._root, list(keys_of))
        if lists:
            keys = {stem: keys_of.get(stem, [stem]) for stems in lists.values() for stem in stems}
            return {
                split: [key for stem in stems for key in keys[stem]] for split, stems in lists.items()
            }, True
        by_folder: dict[str, list[str]] = defaultdict(list)
        for key in sorted(self._xml):
            place = None if _split_of_path(key) else self._image_of(key, "")
            split = _split_of_path(place[0] if place else key)
            by_folder[split or "train"].append(key)
        return {split: by_folder[split] for split in _ORDER if split in by_folder}, False

    def _image_of(self, key: str, named: str) -> tuple[str, str] | None:
        """Return path and version of an image: beside its XML file, else the nearest of its split."""
        path = PurePosixPath(key)
        places = self._places.get(path.name.lower(), [])
        split = _split_of_path(key)
        same_split = [place for place in places if split in (None, _split_of_path(place[0]))]
        distances = [_distance(path.parent, PurePosixPath(name).parent) for name, _ in same_split]
        nearest = [place for place, far in zip(same_split, distances, strict=True) if far == min(distances)]
        exact = [place for place in nearest if PurePosixPath(place[0]).name == PurePosixPath(named).name]
        nearest = exact or nearest
        folders = {str(PurePosixPath(name).parent) for name, _ in nearest}
        return nearest[0] if len(folders) == 1 else None

    def _is_beside(self, key: str) -> bool:
        place = self._image_of(key, "")
        return place is not None and PurePosixPath(place[0]).parent == PurePosixPath(key).parent

    def _folders(self, keys: list[str]) -> list[str]:
        counts = Counter(str(PurePosixPath(key).parent) for key in keys)
        return [folder for folder, _ in counts.most_common(3)]


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def _split_of_path(path: str) -> str | None:
    """Return the split that a folder in a path names, the outermost first; None if none does."""
    for part in PurePosixPath(path).parts[:-1]:
        if _SPLIT_FOLDER.fullmatch(part):
            return split_of(part)
    return None


def _distance(folder: PurePosixPath, other: PurePosixPath) -> int:
    """Return how many folders lie between two."""
    common = sum(1 for one, two in zip(folder.parts, other.parts, strict=False) if one == two)
    return len(folder.parts) + len(other.parts) - 2 * common


def _listed_splits(root: str, stems: list[str]) -> dict[str, list[str]]:
    """Return the image names of each split in ImageSets/Main; {} where it lists none."""
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
    return {split: names for split, names in lists.items() if names}


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
