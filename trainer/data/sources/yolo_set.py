"""What a YOLO data set says of itself: the classes and where its splits are.

It is told by data.yaml (https://docs.ultralytics.com/datasets/detect), by classes.txt as labelling tools
write it, or by obj.names as Darknet has it; paths are looked for as each of these means them.
"""

import os
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trainer import storage
from trainer.base.bounded_text import whole_number, yaml_value
from trainer.base.errors import DataError, first_line
from trainer.data.sources.source import split_of
from trainer.storage.url_policy import UrlPolicy

YAML = (".yaml", ".yml")
_NAMES = ("classes.txt", "obj.names")
_BESIDE = (("labels",), ("train",), ("images", "train"), ("labels", "train"))
"""Folders in which labelling tools leave classes.txt beside the label files."""
_SPLIT_KEYS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}
_NOTHING = ("", "~", "null", "None")
_LARGEST = 512 * 1024
_MOST_CLASSES = 100_000
FIX = "name a folder with data.yaml, in which are names (the classes), train and val (folders of images)"


class Bounds(NamedTuple):
    """Where the paths of a set may lead."""

    folder: str = ""
    """That nothing may lead out of; "" where paths may."""
    allowed: tuple[str, ...] = ()
    """Buckets besides the set's own; see `trainer.storage.url_policy.UrlPolicy`."""

    def holds(self, uri: str) -> bool:
        """Tell whether a URI is in the folder, if there is one."""
        return not self.folder or f"{uri}/".startswith(f"{self.folder.rstrip('/')}/")


ANYWHERE = Bounds()
"""Wherever a path leads on this machine, and into the bucket of the set."""


@dataclass(frozen=True)
class YoloSet:
    """The classes of a set, and where its splits are."""

    uri: str
    """Of the file that says it."""
    content: bytes
    """Of that file."""
    root: str
    """Folder that names of images are relative to."""
    names: dict[int, str]
    splits: dict[str, list[str]]
    """URIs of each split's folders and lists of images."""
    keypoints: bool = False
    """Whether key points follow the box in each line."""
    bounds: Bounds = field(default=ANYWHERE, kw_only=True)
    """Where its paths may lead."""


def file_of(folder: str) -> str:
    """Return the URI of the file that describes the YOLO set in a folder; "" if there is none.

    Raises:
        DataError: there are several.
        StorageError: the folder cannot be read.
    """
    names = sorted(storage.list_states(folder))
    for name in ("data.yaml", "data.yml", "dataset.yaml", "dataset.yml"):
        if name in names:
            return storage.join(folder, name)
    described = [name for name in names if name.lower().endswith(YAML) and _describes(folder, name)]
    if len(described) > 1:
        raise DataError(
            f"{folder} holds several YOLO sets: {', '.join(described)}", fix="name one of these files"
        )
    lists = [*described, *(name for name in _NAMES if name in names)]
    if lists:
        return storage.join(folder, lists[0])
    places = (storage.join(folder, *path, _NAMES[0]) for path in _BESIDE)
    return next((uri for uri in places if storage.exists(uri)), "")


def read_set(location: str, bounds: Bounds = ANYWHERE) -> YoloSet:
    """Read the file that describes a YOLO set, or find it in a folder.

    Args:
        location: URI of the folder, or of the file.
        bounds: where its paths may lead.

    Raises:
        DataError: there is no such file, or it is not of its form.
        StorageError: it cannot be reached.
    """
    uri = location if location.lower().endswith((*YAML, *_NAMES)) else file_of(location)
    if not uri:
        raise DataError(f"yolo:{location}: no data.yaml in it", fix=FIX)
    if storage.size(uri) > _LARGEST:
        raise DataError(f"{uri} is too large to describe a data set", fix=FIX)
    content = storage.read_bytes(uri)
    if uri.lower().endswith(YAML):
        return _of_yaml(uri, content, bounds)
    root = storage.parent(uri)
    for path in sorted(_BESIDE, key=len, reverse=True):
        if root.endswith("/" + "/".join(path)):
            root = root.removesuffix("/" + "/".join(path))
            break
    splits = _unnamed_splits(root)
    for places in splits.values():
        _check_same_classes(uri, content, places)
    return YoloSet(uri, content, root, _numbered(uri, _lines(content)), splits, bounds=bounds)


def _check_same_classes(uri: str, content: bytes, places: list[str]) -> None:
    """Refuse other classes beside the images of a split: the numbers would mean something else there."""
    for other in (storage.join(place, _NAMES[0]) for place in places if not place.endswith(".txt")):
        if storage.exists(other) and _lines(storage.read_bytes(other)) != _lines(content):
            raise DataError(
                f"{uri} and {other} name different classes",
                fix="let both have the same lines, in the same order",
            )


def resolve(text: str, bases: list[str], bounds: Bounds, *, is_file: bool = False) -> str:
    """Return the URI that a path of the set means; "" if there is nothing at any place that it could be.

    Args:
        text: the path; relative to one of the bases, absolute, or a URI.
        bases: folders, the likeliest first.
        bounds: where it may lead.
        is_file: whether only a file may be meant.
    """
    plain = text.strip().replace("\\", "/")
    for uri in _candidates(plain, bases):
        if not bounds.holds(uri):
            continue
        if storage.scheme(uri) in storage.OBJECT_STORES:
            UrlPolicy(tuple(bases), bounds.allowed).check(uri)
        if storage.exists(uri) or (not is_file and _has_files(uri)):
            return uri
    return ""


def _describes(folder: str, name: str) -> bool:
    """Tell whether a YAML file tells of a data set, and not of something else."""
    try:
        form = yaml_value(storage.read_bytes(storage.join(folder, name)), _LARGEST, plain_text=True)
    except ValueError:
        return False
    return isinstance(form, dict) and bool({"names", "nc"} & form.keys()) and "train" in form


def _of_yaml(uri: str, content: bytes, bounds: Bounds) -> YoloSet:
    try:
        # Every scalar stays the text that it is: a class may be named no, 1 or null.
        form = yaml_value(content, _LARGEST, plain_text=True)
    except ValueError as error:
        raise DataError(f"{uri} is not YAML: {first_line(error)}", fix=FIX) from None
    if not isinstance(form, dict):
        raise DataError(f"{uri} is no description of a YOLO set", fix=FIX)
    names = _names(uri, form)
    folder = storage.parent(uri)
    bases = _bases(str(form.get("path", "")), folder, bounds)
    splits = {}
    for split, keys in _SPLIT_KEYS.items():
        key = next((key for key in keys if key in form), "")
        if key:
            splits[split] = _places(uri, key, form[key], bases, bounds, str(form.get("download", "")))
    splits = {split: places for split, places in splits.items() if places}
    if "train" not in splits:
        raise DataError(f"{uri} names no train", fix=FIX)
    keypoints = "kpt_shape" in form
    return YoloSet(uri, content, bases[0], names, splits, keypoints, bounds=bounds)


def _names(uri: str, form: dict[str, Any]) -> dict[int, str]:
    """Return the classes by their numbers."""
    names = form.get("names")
    count = str(form.get("nc", "")).strip()
    listed_count = whole_number(count)
    if count.isdecimal() and (listed_count is None or listed_count > _MOST_CLASSES):
        raise DataError(f"{uri}: nc is {count[:20]}, more than {_MOST_CLASSES}", fix="let nc be their number")
    if names in (None, "") and listed_count is not None:
        return {number: f"class_{number}" for number in range(listed_count)}
    if isinstance(names, dict):
        wrong = [key for key in names if whole_number(str(key)) is None]
        if wrong:
            raise DataError(
                f"{uri}: names has {str(wrong[0])!r} where a number should be",
                fix="write names as a list, or as `0: name` and so on",
            )
        numbered = {int(key): name for key, name in names.items()}
    elif isinstance(names, list):
        numbered = dict(enumerate(names))
    else:
        raise DataError(f"{uri} has no names, the list of the classes", fix=FIX)
    if not all(isinstance(name, str) and name.strip() for name in numbered.values()):
        raise DataError(f"{uri}: names holds what is no name", fix="write names as a list of texts")
    listed = _numbered(uri, [], numbered)
    if listed_count not in (None, len(listed)):
        raise DataError(
            f"{uri}: nc is {count}, but names has {len(listed)} classes", fix="let nc be their number"
        )
    return listed


def _numbered(uri: str, names: list[str], numbered: dict[int, str] | None = None) -> dict[int, str]:
    """Return stripped names by number; refuse two classes of one name, and a set without any."""
    listed = {number: name.strip() for number, name in sorted((numbered or dict(enumerate(names))).items())}
    by_name: dict[str, int] = {}
    for number, name in listed.items():
        if name in by_name:
            raise DataError(
                f"{uri}: classes {by_name[name]} and {number} are both {name!r}",
                fix="give each class a name of its own",
            )
        by_name[name] = number
    if not listed:
        raise DataError(f"{uri} names no classes", fix=FIX)
    return listed


def _bases(path: str, folder: str, bounds: Bounds) -> list[str]:
    """Return the folders that paths may be relative to: what `path` says, if it is there, and the file's."""
    existing = [] if path.strip() in (*_NOTHING, ".", "./") else [resolve(path, [folder], bounds)]
    return list(dict.fromkeys([*filter(None, existing), folder]))


def _places(uri: str, key: str, value: Any, bases: list[str], bounds: Bounds, download: str) -> list[str]:
    """Return the URIs of the folders and lists of a split."""
    texts = value if isinstance(value, list) else [value]
    places = []
    for text in texts:
        if not isinstance(text, str):
            raise DataError(f"{uri}: {key} is no path and no list of paths", fix=FIX)
        if text.strip() in _NOTHING:
            continue
        place = resolve(text, bases, bounds)
        if not place and key == "train":
            fetch = "; fetch it first: its `download` is not followed" if download else ""
            looked = ", ".join(dict.fromkeys(_candidates(text.strip(), bases)))
            raise DataError(
                f"{uri}: there are no images for {key}: {text}; looked at {looked}",
                fix=f"write path and {key} relative to the folder of the file{fetch}",
            )
        places += [place] if place else []
    return places


def _candidates(text: str, bases: list[str]) -> Iterator[str]:
    """Yield the URIs that a path may mean, the likeliest first."""
    if storage.scheme(text) in storage.OBJECT_STORES:
        yield storage.absolute(text)
    elif text.startswith("/"):
        yield from [text] if storage.is_local(bases[0]) else []
    else:
        # Roboflow writes ../train/images for train/images, Darknet data/train.txt for train.txt.
        shorter = text.removeprefix("./")
        while shorter.startswith("../"):
            shorter = shorter[3:]
        for base in bases:
            first, _, rest = shorter.partition("/")
            within = rest if first in ("data", base.rpartition("/")[2]) else ""
            for path in dict.fromkeys(filter(None, (shorter, text, within))):
                yield _joined(base, path)


def _joined(base: str, path: str) -> str:
    """Append a path, in which `..` goes up, to a folder's URI."""
    if storage.is_local(base):
        return os.path.normpath(os.path.join(storage.absolute(base), path))
    head, _, rest = base.partition("://")
    bucket, _, folder = rest.partition("/")
    return f"{head}://{bucket}{posixpath.normpath(f'/{folder}/{path}')}"


def _has_files(uri: str) -> bool:
    return next(iter(storage.scan(uri)), None) is not None


def _unnamed_splits(root: str) -> dict[str, list[str]]:
    """Return the splits of a set that names none: lists train.txt and so on, folders, or all of it."""
    names = storage.list_states(root)
    lists = {
        split: [storage.join(root, f"{key}.txt") for key in keys if f"{key}.txt" in names][:1]
        for split, keys in _SPLIT_KEYS.items()
    }
    if lists["train"]:
        return {split: places for split, places in lists.items() if places}
    for holder in (storage.join(root, "images"), root):
        folders: dict[str, str] = {}
        for name in ("train", "val", "valid", "test", "train2017", "val2017"):
            folder = storage.join(holder, name)
            if _has_files(folder):
                folders.setdefault(split_of(name) or "", folder)
        if "train" in folders:
            return {split: [folder] for split, folder in folders.items()}
    images = storage.join(root, "images")
    return {"train": [images if _has_files(images) else root]}


def _lines(content: bytes) -> list[str]:
    return [line for line in content.decode("utf-8-sig", "replace").splitlines() if line.strip()]
