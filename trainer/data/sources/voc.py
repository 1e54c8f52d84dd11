"""PASCAL VOC data sets: an XML file for each image.

VOC's own layout has Annotations, JPEGImages and ImageSets/Main. Any other is a tree of folders: XML files
beside their images, as LabelImg writes them, or in folders of their own, and folders train, valid, test.

VOC corners are pixels counted from 1, the last one included (VOC2012 development kit, section
on annotations), while the internal form measures from the image's top left corner. So

    x = xmin - 1, y = ymin - 1, width = xmax - xmin + 1, height = ymax - ymin + 1

and a box from 1 to the image's width covers all of it. COCO JSON that was made from VOC by plain
subtraction (x = xmin, width = xmax - xmin) is one pixel off that. Corners that coincide are a slip
of the annotator, not a box of one pixel: such a box has no area here, as it has none there.
"""

import hashlib
import json
import re
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePosixPath
from tempfile import TemporaryFile
from xml.parsers import expat

from trainer import storage
from trainer.base.errors import DataError, MissingError
from trainer.data import problem_counts as reasons
from trainer.data.images import IMAGE_SUFFIXES
from trainer.data.problem_counts import Problems
from trainer.data.sources.files import read_all, read_lines, version_of
from trainer.data.sources.source import (
    UNKNOWN,
    Box,
    Category,
    Entry,
    Listing,
    Rows,
    Source,
    SplitOverlaps,
    split_of,
)

_CORNERS = ("xmin", "ymin", "xmax", "ymax")
_COMMA = re.compile(r"-?\d+,\d+")


@dataclass
class VocAnnotation:
    """The content of one XML file."""

    width: int
    height: int
    file_name: str
    objects: list[tuple[str, tuple[float, ...], int]]
    """(class name, bbox, iscrowd)"""
    fault: str = ""
    """Why nothing of it can be used."""
    bad_objects: list[tuple[str, str]] = field(default_factory=list)
    """(reason, description) of objects without a usable box."""


def parse_xml(data: bytes) -> VocAnnotation:
    """Parse one annotation file; an unreadable one comes back with its fault."""
    try:
        _refuse_doctype(data)
        root = ET.fromstring(data)  # noqa: S314 (no DOCTYPE, so no entities)
    except (ET.ParseError, expat.ExpatError, ValueError, LookupError) as error:
        return VocAnnotation(0, 0, "", [], fault=f"its annotation is no XML that can be used: {error}")
    if root.tag != "annotation":
        of_cvat = "; it is CVAT's own: export as COCO or VOC there" if root.tag == "annotations" else ""
        fault = f"its annotation is no VOC XML: the root is <{root.tag}>{of_cvat}"
        return VocAnnotation(0, 0, "", [], fault=fault)
    width, height = (_number(root.findtext(f"size/{side}")) or 0 for side in ("width", "height"))
    # On Windows a backslash separates folders.
    name = (root.findtext("filename") or "").strip().replace("\\", "/")
    annotation = VocAnnotation(int(width), int(height), name, [])
    for number, item in enumerate(root.iterfind("object"), 1):
        label = (item.findtext("name") or "").strip()
        box = _box(item.find("bndbox"))
        if isinstance(box, str):
            annotation.bad_objects.append((box, f"object {number} ({label})"))
        else:
            difficult = (item.findtext("difficult") or "").strip() == "1"
            annotation.objects.append((label, box, int(difficult)))
    return annotation


def _refuse_doctype(data: bytes) -> None:
    """Raise ValueError at a DOCTYPE: its entities can read files and fill the memory."""

    def refuse(*_: object) -> None:
        raise ValueError("it has a DOCTYPE, which is refused")

    parser = expat.ParserCreate()
    parser.StartDoctypeDeclHandler = refuse
    parser.Parse(data, True)


def _box(corners: ET.Element | None) -> tuple[float, ...] | str:
    """Return [x, y, width, height], or the reason why there is none."""
    texts = [] if corners is None else [(corners.findtext(name) or "").strip() for name in _CORNERS]
    if not any(texts):
        return reasons.BOX_ABSENT
    xmin, ymin, xmax, ymax = map(_number, texts)
    if xmin is None or ymin is None or xmax is None or ymax is None:
        commas = any(_COMMA.fullmatch(text) for text in texts)
        return reasons.BOX_DECIMAL_COMMA if commas else reasons.BOX_NOT_FINITE
    wide = xmax - xmin + 1 if xmax > xmin else 0.0
    high = ymax - ymin + 1 if ymax > ymin else 0.0
    return xmin - 1, ymin - 1, wide, high


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if abs(value) < 1e9 else None


@dataclass(frozen=True)
class VocSource(Source):
    """A folder with VOC's XML files and images."""

    folder: str

    @property
    def uri(self) -> str:
        return f"voc:{self.folder}"

    def listing(self) -> Listing:
        """Read all annotation files.

        Raises:
            DataError: the folder has no annotations or no images.
        """
        layout = VocLayout(self.folder)
        digest, problems, annotations = hashlib.sha256(), Problems(), _Annotations()
        keys = sorted({key for keys in layout.splits.values() for key in keys if layout.annotation(key)})
        texts = read_all(map(layout.annotation, keys))
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
        categories = [
            Category(name, number) for number, name in enumerate(sorted(annotations.classes - {""}), 1)
        ]
        rows, overlaps = {}, SplitOverlaps(problems)
        for split, of_split in layout.splits.items():
            read = partial(_entries, of_split, annotations, layout, categories)
            for entry in read(problems):
                digest.update(f"{split} {entry.file_name} {entry.version}\n".encode("utf-8", "replace"))
            rows[split] = Rows.of(read)
            overlaps.add(split, [(key, key) for key in of_split])
        for name in layout.unannotated():
            problems.add(reasons.IMAGE_WITHOUT_ANNOTATION, name)
        return Listing(categories, rows, digest.hexdigest(), problems, read_as=layout.read_as)


class _Annotations:
    """The content of XML files on the disk; memory holds their places and the classes."""

    def __init__(self) -> None:
        self._lines = TemporaryFile()  # noqa: SIM115 (lives as long as this does)
        self._places: dict[str, int] = {}
        self.classes: set[str] = set()

    def add(self, key: str, annotation: VocAnnotation) -> None:
        self._places[key] = self._lines.tell()
        self.classes.update(label for label, _, _ in annotation.objects)
        self._lines.write(json.dumps(vars(annotation)).encode() + b"\n")

    def get(self, key: str) -> VocAnnotation | None:
        if key not in self._places:
            return None
        self._lines.seek(self._places[key])
        return VocAnnotation(**json.loads(self._lines.readline()))


def _entries(
    keys: list[str],
    annotations: _Annotations,
    layout: "VocLayout",
    categories: list[Category],
    _: Problems,
) -> Iterator[Entry]:
    """Yield the images of a split."""
    positions = {category.name: position for position, category in enumerate(categories)}
    for key in keys:
        annotation = annotations.get(key)
        file = layout.image(key, annotation.file_name if annotation else "")
        if file is None:
            yield Entry(key, "", 0, 0, [], fault=(reasons.IMAGE_MISSING, layout.searched(key)))
            continue
        name, origin, version = file
        fault = annotation.fault if annotation else f"no Annotations/{key}.xml"
        annotation = annotation or VocAnnotation(0, 0, "", [])
        boxes = [
            Box(positions.get(label, UNKNOWN), tuple(bbox), 0.0, crowd)
            for label, bbox, crowd in annotation.objects
        ]
        yield Entry(
            name, origin, annotation.width, annotation.height, boxes, version=version,
            fault=(reasons.IMAGE_UNREADABLE, fault) if fault else None,
        )  # fmt: skip


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
        self._images: dict[str, list[tuple[str, str]]] = defaultdict(list)
        """Path and version of the images of each stem, in lower case."""
        for name, state in storage.scan(root):
            path = PurePosixPath(name)
            if any(part.startswith(".") or part == "__MACOSX" for part in path.parts):
                continue
            if name.lower().endswith(".xml"):
                self._xml[name[:-4]] = name
            elif name.lower().endswith(IMAGE_SUFFIXES):
                self._images[path.stem.lower()].append((name, version_of(state)))
        for images in self._images.values():
            images.sort()
        self._check()
        self._home = self._published_home()
        """Folder of the images in VOC's own layout; empty in another."""
        if self._home:
            self._keep_published()
        self._by_lists = True
        self.splits = self._listed_splits()
        if not self.splits:
            self._by_lists = False
            self.splits = self._folder_splits()
        self._used: set[str] = set()

    @property
    def read_as(self) -> str:
        """How it was understood, for people."""
        lists = ", splits of ImageSets/Main" if self._by_lists else ""
        if self._home:
            return f"VOC: {_ANNOTATIONS} and {self._home}{lists}"
        beside = sum((image := self._image(key)) is not None and _folder(image[0]) == _folder(key)
                     for key in self._xml)  # fmt: skip
        layout = "XML files beside the images" if 2 * beside > len(self._xml) else "XML files and images"
        folders = []
        for split, keys in self.splits.items():
            common = Counter(str(PurePosixPath(key).parent) for key in keys).most_common(3)
            folders.append(f"{split} of {', '.join(folder for folder, _ in common)}")
        named = f", {'; '.join(folders)}" if len(folders) > 1 else ""
        return f"VOC: {layout}{lists or named}"

    def annotation(self, key: str) -> str:
        """Return the URI of the XML file; "" if there is none."""
        return storage.join(self._root, self._xml[key]) if key in self._xml else ""

    def image(self, key: str, named: str) -> tuple[str, str, str] | None:
        """Return name, URI and version of the image, or None.

        Args:
            key: the image's.
            named: file name in the annotation, which decides between images of the same stem.
        """
        image = self._image(key, named)
        if image is None:
            return None
        self._used.add(image[0])
        name = image[0].removeprefix(f"{self._home}/") if self._home else image[0]
        return name, storage.join(self._root, image[0]), image[1]

    def searched(self, key: str) -> str:
        """Say where an image that is missing was looked for."""
        if self._home:
            return f"no file {key}.* in {storage.join(self._root, self._home)}"
        stem = PurePosixPath(key).name
        if len(self._images.get(stem.lower(), ())) > 1:
            return f"several images {stem}.*, and none beside {key}.xml"
        return f"no file {stem}.* beside {key}.xml or in another folder of its split"

    def unannotated(self) -> list[str]:
        """Return the names of images that no annotation is of.

        None in VOC's own layout and with lists, which name the images of the set: the folder may hold more.
        """
        if self._by_lists or self._home:
            return []
        return sorted(
            name for images in self._images.values() for name, _ in images if name not in self._used
        )

    def _check(self) -> None:
        if not self._xml:
            raise DataError(
                f"voc:{self._root}: no XML files in it",
                fix="name the folder that holds Annotations, JPEGImages and ImageSets, or the images with "
                "their XML files beside them",
            )
        if not self._images:
            raise DataError(
                f"voc:{self._root}: no images in JPEGImages, nor beside the XML files",
                fix=f"put the images there, as {', '.join(IMAGE_SUFFIXES)}",
            )

    def _published_home(self) -> str:
        folders = {_folder(name) for images in self._images.values() for name, _ in images}
        has_annotations = any(_folder(key) == _ANNOTATIONS for key in self._xml)
        return next((folder for folder in _IMAGE_FOLDERS if has_annotations and folder in folders), "")

    def _keep_published(self) -> None:
        """Take only VOC's own folders; keys are stems."""
        self._xml = {
            PurePosixPath(key).name: name for key, name in self._xml.items() if _folder(key) == _ANNOTATIONS
        }
        for stem, images in self._images.items():
            self._images[stem] = [image for image in images if _folder(image[0]) == self._home]

    def _listed_splits(self) -> dict[str, list[str]]:
        """Return the keys of each split by the lists in ImageSets/Main; {} if there are none."""
        keys_of: dict[str, list[str]] = defaultdict(list)
        for key in sorted(self._xml):
            keys_of[PurePosixPath(key).name].append(key)
        folder = storage.join(self._root, "ImageSets", "Main")
        files = storage.list_states(folder)
        lists = {
            split: [_stem(line, keys_of.keys()) for line in read_lines(storage.join(folder, f"{split}.txt"))]
            for split in (*_ORDER, "trainval")
            if f"{split}.txt" in files
        }
        both = lists.pop("trainval", [])
        if not lists.get("train"):
            held_out = {stem for stems in lists.values() for stem in stems}
            lists["train"] = [stem for stem in both if stem not in held_out]
        return {
            split: [key for stem in dict.fromkeys(stems) for key in keys_of.get(stem, [stem])]
            for split, stems in lists.items()
            if stems
        }

    def _folder_splits(self) -> dict[str, list[str]]:
        """Return the keys of each split by the folders of the XML files, or else of their images."""
        by_folder: dict[str, list[str]] = defaultdict(list)
        for key in sorted(self._xml):
            split = _split_of_path(key)
            image = None if split else self._image(key)
            by_folder[split or (image and _split_of_path(image[0])) or "train"].append(key)
        return {split: by_folder[split] for split in _ORDER if split in by_folder}

    def _image(self, key: str, named: str = "") -> tuple[str, str] | None:
        """Return path and version of an image: beside its XML file, else the nearest of its split."""
        path, split = PurePosixPath(key), _split_of_path(key)
        images = self._images.get(path.name.lower(), [])
        if split:
            images = [image for image in images if _split_of_path(image[0]) == split]
        distances = [_distance(path.parent, PurePosixPath(name).parent) for name, _ in images]
        nearest = [image for image, far in zip(images, distances, strict=True) if far == min(distances)]
        exact = [image for image in nearest if PurePosixPath(image[0]).name == PurePosixPath(named).name]
        nearest = exact or nearest
        return nearest[0] if len({_folder(name) for name, _ in nearest}) == 1 else None


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def _split_of_path(path: str) -> str | None:
    """Return the split that a folder in a path names, the outermost first; None if none does."""
    folders = (part for part in path.split("/")[:-1] if _SPLIT_FOLDER.fullmatch(part))
    return next(map(split_of, folders), None)


def _distance(folder: PurePosixPath, other: PurePosixPath) -> int:
    """Return how many folders lie between two."""
    common = sum(1 for one, two in zip(folder.parts, other.parts, strict=False) if one == two)
    return len(folder.parts) + len(other.parts) - 2 * common


def _stem(line: str, stems: Collection[str]) -> str:
    """Return the image that a line of a list names, without the columns, extensions and folders of some."""
    name = line if line in stems else re.sub(r"\s+-?[01]$", "", line)
    if name in stems:
        return name
    name = name.rpartition("/")[2]
    return name[: name.rindex(".")] if name.lower().endswith(IMAGE_SUFFIXES) else name
