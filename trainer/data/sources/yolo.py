"""Reads YOLO data sets: a description, images, and a text file of labels for each image.

The description is data.yaml (https://docs.ultralytics.com/datasets/detect), classes.txt as labeling tools
write it, or obj.names as Darknet has it. The labels of `images/train/a.jpg` are in `labels/train/a.txt` (the
last folder named images is replaced), or next to the image. An image whose file is missing or empty has no
objects. Boxes are fractions of the sides of the image as it is displayed, one line for each object:

    class x y width height            a box by its center
    class x1 y1 x2 y2 x3 y3 ...       an outline, or a rotated box by its corners: the box around it
    class x y width height keypoints  if data.yaml has kpt_shape

Hidden files are ignored; see `files.is_hidden`.
"""

import hashlib
import math
import os
import posixpath
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from trainer import storage
from trainer.base.errors import DataError, MissingError
from trainer.base.safe_text import parse_digits, parse_yaml
from trainer.data import problem_counts as reasons
from trainer.data.images import DISPLAYED_SHARES, IMAGE_SUFFIXES
from trainer.data.problem_counts import Problems
from trainer.data.sources.files import (
    FolderListings,
    file_version,
    is_hidden,
    read_entries,
    read_files,
    read_lines,
    skip_hidden,
    visible_files,
)
from trainer.data.sources.source import (
    Box,
    Category,
    Entry,
    Listing,
    Rows,
    Source,
    SplitOverlaps,
    parse_split,
)
from trainer.storage.web import check_allowed

_TOLERANCE = 0.01  # How far outside the image a coordinate may be; boxes are clipped later.
_ROUNDING = 1e-5  # Coordinates this far outside are moved to the edge: labels are rounded to six digits.

YAML = (".yaml", ".yml")
_NAMES = ("classes.txt", "obj.names")
_NAMES_FOLDERS = ("labels", "train", "images/train", "labels/train")
"""Folders in which labeling tools leave classes.txt next to the label files."""
_SPLIT_KEYS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}
_NULL_WORDS = ("", "~", "null", "None")
_MAX_BYTES = 512 * 1024
_MAX_CLASSES = 100_000
_KEY_POINTS = ": if these are key points, add kpt_shape: [POINTS, 2 or 3] to data.yaml"
FIX = "use a folder with a data.yaml that has names (the classes), train and val (folders of images)"


def _parse_box(words: list[str], positions: Mapping[int, int], keypoints: bool) -> Box:
    """Return the box of a line; raise ValueError with the reason if it has none."""
    label, *coordinates = map(_parse_number, words)
    if not label.is_integer() or int(label) not in positions:
        raise ValueError(f"is of class {words[0]}, which the description does not list")
    if keypoints:
        coordinates = coordinates[:4]
    count = len(coordinates)
    if count < 4 or count % 2:
        hint = ": is the last a confidence? remove it" if count == 5 else _KEY_POINTS if count > 5 else ""
        raise ValueError(f"has {count} numbers after the class, not four or pairs of x and y{hint}")
    outside = [value for value in coordinates if not -_TOLERANCE <= value <= 1 + _TOLERANCE]
    if outside:
        hint = ": divide pixels by the image's width or height" if max(outside) > 2 else ""
        if count > 4 and count % 3 == 1 and set(coordinates[6::3]) <= {0, 1, 2}:  # x, y and visibility
            hint = _KEY_POINTS
        raise ValueError(f"has {outside[0]:g}, which is outside 0 to 1{hint}")
    position = positions[int(label)]
    if count == 4:
        x, y, width, height = coordinates
        left, right, top, bottom = x - width / 2, x + width / 2, y - height / 2, y + height / 2
        if min(left, top) >= 0 and max(right, bottom) <= 1:
            return Box(position, (left, top, width, height), 0.0, 0)
    else:
        xs, ys = coordinates[::2], coordinates[1::2]
        left, right, top, bottom = min(xs), max(xs), min(ys), max(ys)
    left, right, top, bottom = (
        min(max(edge, 0.0), 1.0) if -_ROUNDING < edge < 1 + _ROUNDING else edge
        for edge in (left, right, top, bottom)
    )
    return Box(position, (left, top, right - left, bottom - top), 0.0, 0)


def _parse_number(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or "_" in word:
        raise ValueError(f"has {word!r}, which is not a number")
    return value


class _Image(NamedTuple):
    """An image of a split."""

    file_name: str  # Relative to the set's root.
    origin: str
    version: str  # "" if there is no such file.
    labels: str  # URI of its label file; "" if there is none.


class DatasetDescription(NamedTuple):
    """The classes of a set, and where its splits are."""

    root: str  # Folder that names of images are relative to.
    class_names: dict[int, str]  # By number.
    splits: dict[str, list[str]]  # URIs of each split's folders and lists of images.
    keypoints: bool = False  # Whether key points follow the box in each line.
    missing_splits: tuple[str, ...] = ()  # Entries of data.yaml for test whose images are not there.


@dataclass(frozen=True)
class YoloSource(Source):
    """A YOLO data set: its folder, or the file that describes it."""

    location: str
    confined: str = ""
    """The folder that paths may not leave; "" allows all paths of this machine."""

    @property
    def uri(self) -> str:
        return f"yolo:{self.location}"

    def listing(self) -> Listing:
        """List images and label files; the labels are read when the rows are iterated."""
        if storage.scheme(self.location) in storage.WEB:
            message = f"{self.uri}: a YOLO set on the web cannot be listed"
            raise DataError(message, fix="put it into a folder, a bucket or a single zip")
        uri, content, description = self.read_description()
        positions = {number: position for position, number in enumerate(description.class_names)}
        digest, problems, folders = hashlib.sha256(content), Problems(), FolderListings()
        overlaps = SplitOverlaps(problems)
        images: dict[str, list[_Image]] = {}
        labeled: dict[str, _Image] = {}
        for split, places in description.splits.items():
            images[split] = list(self._find_images(description.root, places, folders, problems))
            for image in images[split]:
                version = folders.version(image.labels) if image.labels else ""
                line = f"{split} {image.file_name} {image.version} {image.labels} {version}\n"
                digest.update(line.encode("utf-8", "replace"))
                first = labeled.setdefault(image.labels, image) if image.labels else image
                if first.origin != image.origin:
                    problems.add(reasons.LABELS_SHARED, f"{first.file_name}, {image.file_name}")
            overlaps.add(split, ((image.file_name, image.origin) for image in images[split]))
        for entry in description.missing_splits:
            problems.add(reasons.SPLIT_EMPTY, entry)
        for split, split_images in images.items():
            looked = ", ".join(description.splits[split])
            if not split_images and split == "test":
                problems.add(reasons.SPLIT_EMPTY, f"test: {looked}")
            elif not split_images:
                fix = f"put images there; the formats are {', '.join(IMAGE_SUFFIXES)}"
                raise DataError(f"{self.uri}: no images in {looked}", fix=fix)
        train = images["train"]
        if not any(image.labels for image in train):
            looked = " and ".join(_label_uris(train[0].origin))
            problem = f"none of {len(train)} images of train has a label file; looked for {looked}"
            fix = "put the label files into a folder `labels` next to the folder `images`"
            raise DataError(f"{self.uri}: {problem}", fix=fix)
        shown = [
            f"{split} of {', '.join(_relative_name(place, description.root) for place in places)}"
            for split, places in description.splits.items()
        ]
        return Listing(
            [Category(name, number) for number, name in description.class_names.items()],
            {
                split: Rows.of(partial(_entries, split_images, positions, description.keypoints), problems)
                for split, split_images in images.items()
                if split_images
            },
            digest.hexdigest(),
            problems,
            read_as=f"YOLO, by {uri.rpartition('/')[2]}: {'; '.join(shown)}",
        )

    def read_description(self) -> tuple[str, bytes, DatasetDescription]:
        """Read the set's description; return the file's URI and content too."""
        uri = self.location
        if not uri.lower().endswith((*YAML, *_NAMES)):
            uri = find_description(self.location)
        if not uri:
            raise DataError(f"{self.uri}: contains no data.yaml", fix=FIX)
        if storage.size(uri) > _MAX_BYTES:
            raise DataError(f"{uri} is too large for a data set description", fix=FIX)
        content = storage.read_bytes(uri)
        root = "" if uri == self.location else self.location
        description = (
            self._from_yaml(uri, content) if uri.lower().endswith(YAML) else _describe_from_lists(uri, root)
        )
        if not description.class_names:
            raise DataError(f"{uri} lists no classes", fix=FIX)
        for name, count in Counter(description.class_names.values()).items():
            if count > 1:
                raise DataError(
                    f"{uri}: {count} classes are {name!r}", fix="use a different name for each class"
                )
        return uri, content, description

    def _from_yaml(self, uri: str, content: bytes) -> DatasetDescription:
        try:
            # Every scalar stays the text that it is: a class may be named no, 1 or null.
            form = parse_yaml(content, _MAX_BYTES, plain_text=True)
        except ValueError as error:
            raise DataError(f"{uri} is not YAML: {error}", fix=FIX) from None
        if not isinstance(form, dict):
            raise DataError(f"{uri} is not a YOLO data set description", fix=FIX)
        names = _parse_class_names(uri, form)
        bases = [storage.parent(uri)]
        path = str(form.get("path", ""))
        if path.strip() not in (*_NULL_WORDS, ".", "./") and (base := self._resolve(path, bases)):
            bases = list(dict.fromkeys([base, *bases]))
        splits: dict[str, list[str]] = {}
        missing_splits = []
        for split, keys in _SPLIT_KEYS.items():
            key = next((key for key in keys if key in form), split)
            given = form.get(key, [])
            for text in given if isinstance(given, list) else [given]:
                if not isinstance(text, str):
                    raise DataError(f"{uri}: {key} is neither a path nor a list of paths", fix=FIX)
                if text.strip() in _NULL_WORDS:
                    continue
                if place := self._resolve(text, bases):
                    splits.setdefault(split, []).append(place)
                    continue
                near, folders = self._folders_near(text, bases)
                alike = [near] if near not in ("", *bases) else []
                alike += [storage.join(near, name) for name in folders]
                alike = [place for place in alike if parse_split(place.rpartition("/")[2]) == split]
                if split == "test" and not any(map(_has_images, alike)):
                    missing_splits.append(f"{key}: {text}")  # Roboflow lists a test that it did not export.
                    continue
                fetch = "; fetch the set first: kubedet ignores `download`" if form.get("download") else ""
                problem = f"{uri}: there are no images for {key}: {text}"
                problem += f"; looked at {', '.join(_candidates(text, bases))}"
                problem += f"; {near} has {', '.join(folders)}" if folders else ""
                fix = f"write path and {key} relative to the folder of the file{fetch}"
                fix += f"; or remove {key}: then images of train are held out" if split != "train" else ""
                raise DataError(problem, fix=fix)
        if "train" not in splits:
            raise DataError(f"{uri} has no key train", fix=FIX)
        return DatasetDescription(bases[0], names, splits, "kpt_shape" in form, tuple(missing_splits))

    def _resolve(self, text: str, bases: list[str]) -> str:
        """Return the URI of a path that is relative to one of `bases`, absolute, or a URI; "" if missing."""
        for uri in self._allowed_candidates(text, bases):
            check_allowed(uri)
            if storage.exists(uri) or _has_files(uri):
                return uri
        return ""

    def _allowed_candidates(self, text: str, bases: list[str]) -> list[str]:
        """Return the URIs that a path may mean, except those outside `confined`."""
        confined = f"{self.confined.rstrip('/')}/" if self.confined else ""
        return [uri for uri in _candidates(text, bases) if f"{uri}/".startswith(confined)]

    def _folders_near(self, text: str, bases: list[str]) -> tuple[str, list[str]]:
        """Return the lowest existing folder above a missing one, "" if unknown, and the folders in it."""
        for uri in self._allowed_candidates(text, bases):
            base = next((base for base in bases if uri.startswith(f"{base.rstrip('/')}/")), "")
            near = uri if base else ""
            while near != base:
                near = near.rpartition("/")[0]
                if near == base or _has_files(near):
                    return near, _list_folders(near)
        return "", []

    def _find_images(
        self, root: str, places: list[str], folders: FolderListings, problems: Problems
    ) -> Iterator[_Image]:
        """Yield the images of a split, each once."""
        seen: set[str] = set()
        for place in places:
            if place.lower().endswith(".txt"):
                listed = self._read_image_list(place, root, folders, problems)
            else:
                visible = visible_files(place, problems)
                files = sorted((item for item in visible if _is_image(item[0])), key=itemgetter(0))
                listed = ((storage.join(place, name), file_version(state)) for name, state in files)
            for origin, version in listed:
                name = _relative_name(origin, root)
                if origin in seen:
                    problems.add(reasons.IMAGE_LISTED_TWICE, name)
                    continue
                seen.add(origin)
                labels = next((uri for uri in _label_uris(origin) if folders.version(uri)), "")
                yield _Image(name, origin, version, labels)

    def _read_image_list(
        self, uri: str, root: str, folders: FolderListings, problems: Problems
    ) -> Iterator[tuple[str, str]]:
        """Yield URI and version of the images that a list names; the version is "" for missing ones."""
        bases = list(dict.fromkeys([storage.parent(uri), root]))
        found = {"": bases[0]}
        for line in (line.replace("\\", "/") for line in read_entries(uri)):
            folder, _, name = line.rpartition("/")
            if skip_hidden(name if folder.startswith("/") else line, problems):
                continue
            if folder not in found:
                found[folder] = self._resolve(folder, bases)
            holder = found[folder]
            version = folders.versions(holder).get(name, "") if holder else ""
            yield f"{holder}/{name}" if holder else f"{root}/{line.lstrip('./')}", version


def _entries(
    images: list[_Image], positions: Mapping[int, int], keypoints: bool, problems: Problems
) -> Iterator[Entry]:
    """Read the labels of the images of a split."""
    texts = read_files(image.labels for image in images if image.labels)
    pose_sizes: Counter[int] = Counter()  # Rows that may be box and key points, by length; 0 for others.
    first = ""
    for image in images:
        data = next(texts) if image.labels else b""
        entry = Entry(image.file_name, image.origin, *DISPLAYED_SHARES, [], version=image.version)
        if not image.version:
            entry.fault = (reasons.IMAGE_MISSING, f"no file {image.origin}")
        if isinstance(data, MissingError):
            entry.fault, data = (reasons.IMAGE_UNREADABLE, data.message), b""
        if data.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in data:
            problems.add(reasons.LABEL_LINE, f"{image.labels}:1: it is UTF-16 or not text: save it as UTF-8")
            data = b""
        boxes: dict[Box, None] = {}  # The same line twice is one object.
        for number, line in enumerate(data.decode("utf-8-sig", "replace").splitlines(), 1):
            if words := line.split():
                may_be_pose = 0 not in pose_sizes and _may_be_pose(words[1:])
                pose_sizes[len(words) - 1 if may_be_pose else 0] += 1
                first = first or image.labels
                try:
                    boxes[_parse_box(words, positions, keypoints)] = None
                except ValueError as error:
                    fault = f"{image.labels}:{number}: {line.strip()[:60]!r} {error}"
                    problems.add(reasons.LABEL_LINE, fault)
        entry.boxes = list(boxes)
        yield entry
    if len(pose_sizes) == 1 and 0 not in pose_sizes and not keypoints:
        ((numbers, rows),) = pose_sizes.items()
        problems.add(reasons.MAY_BE_KEY_POINTS, f"{first}: {numbers} numbers", rows)


def _may_be_pose(words: list[str]) -> bool:
    """Return whether a row may be a box with points in it; points at 0, 0 are not annotated."""
    try:
        x, y, width, height, *rest = map(float, words)
    except ValueError:
        return False
    sides = (x, width), (y, height)
    if not rest or len(words) % 2:
        return False
    if not all(size / 2 - _TOLERANCE <= at <= 1 + _TOLERANCE - size / 2 for at, size in sides):
        return False
    return any(
        len(rest) % step == 0
        and all(
            (left, top) == (0, 0) or (2 * abs(left - x) <= width and 2 * abs(top - y) <= height)
            for left, top in zip(rest[::step], rest[1::step], strict=True)
        )
        for step in (2, 3)
    )


def _label_uris(image: str) -> list[str]:
    """Return where an image's label file may be, the likeliest first."""
    adjacent = f"{image[: -len(PurePosixPath(image).suffix)]}.txt"
    before, separator, after = adjacent.rpartition("/images/")
    return [f"{before}/labels/{after}", adjacent] if separator else [adjacent]


def _relative_name(origin: str, root: str) -> str:
    """Return an image's name relative to the set, or its whole path if it is elsewhere."""
    inside = origin.startswith(f"{root.rstrip('/')}/")
    return origin[len(root.rstrip("/")) + 1 :] if inside else origin.partition("://")[2] or origin.lstrip("/")


def find_description(folder: str) -> str:
    """Return the URI of the file that describes the YOLO set in a folder; "" if there is none."""
    names = sorted(name for name, _ in visible_files(folder, recursive=False))
    for name in ("data.yaml", "data.yml", "dataset.yaml", "dataset.yml"):
        if name in names:
            return storage.join(folder, name)
    described = []
    for name in names:
        if name.lower().endswith(YAML):
            with suppress(ValueError):
                form = parse_yaml(storage.read_bytes(storage.join(folder, name)), _MAX_BYTES, plain_text=True)
                if isinstance(form, dict) and {"names", "nc"} & form.keys() and "train" in form:
                    described.append(name)
    if len(described) > 1:
        raise DataError(
            f"{folder} contains several YOLO sets: {', '.join(described)}", fix="use one of these files"
        )
    for name in (*described, *_NAMES):
        if name in names:
            return storage.join(folder, name)
    places = (storage.join(folder, path, _NAMES[0]) for path in _NAMES_FOLDERS)
    return next((uri for uri in places if storage.exists(uri)), "")


def _describe_from_lists(uri: str, root: str = "") -> DatasetDescription:
    """Describe the set of a classes.txt or obj.names; its splits are lists, or folders, or all images.

    `root` is the folder of the set; "" means the folder of the file, or the set that has it as label folder.
    """
    classes, root = read_lines(uri), root or storage.parent(uri)
    holder = next((path for path in reversed(_NAMES_FOLDERS) if root.endswith(f"/{path}")), "")
    if holder and not _has_images(root):
        root = root.removesuffix(f"/{holder}")
    names, images = storage.list_states(root), storage.join(root, "images")
    splits: dict[str, list[str]] = {}
    for split, keys in _SPLIT_KEYS.items():
        if name := next((f"{key}.txt" for key in keys if f"{key}.txt" in names), ""):
            splits[split] = [storage.join(root, name)]
    for parent in (images, root):
        if "train" not in splits:
            splits = {}
            for name in ("train", "val", "valid", "test", "train2017", "val2017"):
                folder = storage.join(parent, name)
                if _has_files(folder):
                    splits.setdefault(parse_split(name) or "", [folder])
    if "train" not in splits:
        splits = {"train": [images if _has_files(images) else root]}
    # If a folder lists other classes, numbers in its labels have another meaning.
    folders = [place for places in splits.values() for place in places if not place.endswith(".txt")]
    for other in (storage.join(folder, _NAMES[0]) for folder in folders):
        if storage.exists(other) and read_lines(other) != classes:
            raise DataError(f"{uri} and {other} name different classes", fix="make both files equal")
    return DatasetDescription(root, dict(enumerate(classes)), splits)


def _parse_class_names(uri: str, form: Mapping[str, Any]) -> dict[int, str]:
    """Return the classes by their numbers."""
    names = form.get("names")
    text = str(form.get("nc", "")).strip()
    count = parse_digits(text)
    if text.isdecimal() and (count is None or count > _MAX_CLASSES):
        raise DataError(f"{uri}: nc is {text[:20]}, more than {_MAX_CLASSES}", fix="correct nc")
    if names in (None, "") and count is not None:
        return {number: f"class_{number}" for number in range(count)}
    if isinstance(names, dict) and all(parse_digits(str(key)) is not None for key in names):
        numbered = {int(key): name for key, name in names.items()}
    elif isinstance(names, list):
        numbered = dict(enumerate(names))
    else:
        raise DataError(f"{uri} has no list of names", fix="write names as a list, or as lines `0: name`")
    if not all(isinstance(name, str) and name.strip() for name in numbered.values()):
        raise DataError(
            f"{uri}: names has an item that is not a string", fix="write names as a list of strings"
        )
    if count not in (None, len(numbered)):
        raise DataError(f"{uri}: nc is {text}, but names has {len(numbered)}", fix="correct nc or names")
    return {number: name.strip() for number, name in sorted(numbered.items())}


def _candidates(text: str, bases: list[str]) -> list[str]:
    """Return the URIs that a path may mean, the likeliest first."""
    text = text.strip().replace("\\", "/")
    if storage.scheme(text) in storage.OBJECT_STORES:
        return [storage.absolute(text)]
    if text.startswith("/"):
        return [text] if storage.is_local(bases[0]) else []
    # Roboflow writes ../train/images for train/images, Darknet data/train.txt for train.txt.
    shorter = text.removeprefix("./")
    while shorter.startswith("../"):
        shorter = shorter[3:]
    first, _, rest = shorter.partition("/")
    found = []
    for base in bases:
        within = rest if first in ("data", base.rpartition("/")[2]) else ""
        for path in filter(None, (shorter, text, within)):
            if storage.is_local(base):
                found.append(os.path.normpath(os.path.join(storage.absolute(base), path)))
            else:
                bucket, _, folder = base.partition("://")[2].partition("/")
                key = posixpath.normpath(posixpath.join("/", folder, path))
                found.append(f"{storage.scheme(base)}://{bucket}{key}")
    return list(dict.fromkeys(found))


def _is_image(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES)


def _has_files(uri: str) -> bool:
    return next(visible_files(uri), None) is not None


def _has_images(uri: str) -> bool:
    return any(_is_image(name) for name, _ in visible_files(uri))


def _list_folders(uri: str) -> list[str]:
    """Return the names of the visible folders in a folder."""
    if not storage.is_local(uri):
        return sorted({name.partition("/")[0] for name, _ in visible_files(uri) if "/" in name})
    with suppress(OSError), os.scandir(uri) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not is_hidden(entry.name))
    return []
