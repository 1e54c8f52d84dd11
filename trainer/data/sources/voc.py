"""Reads PASCAL VOC data sets, which have an XML file for each image.

VOC's own layout has Annotations, JPEGImages and ImageSets/Main. Others have XML files next to the images, as
LabelImg writes them, or in parallel folders; folders named train, valid and test are splits.

VOC corners are pixels counted from 1, the last one included (VOC2012 development kit, annotations):

    x = xmin - 1, y = ymin - 1, width = xmax - xmin + 1, height = ymax - ymin + 1

A box whose corners coincide has no area: an annotation error.
"""

import hashlib
import re
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import PurePosixPath
from xml.parsers import expat

from trainer import storage
from trainer.base.errors import DataError, MissingError
from trainer.data import problem_counts as reasons
from trainer.data.images import IMAGE_SUFFIXES
from trainer.data.problem_counts import Problems
from trainer.data.sources.files import file_version, read_entries, read_files, visible_files
from trainer.data.sources.source import (
    UNKNOWN,
    Box,
    Category,
    Entry,
    Listing,
    Rows,
    Source,
    SplitOverlaps,
    parse_side,
    parse_split,
)

_INVALID_TOKEN = expat.errors.codes[expat.errors.XML_ERROR_INVALID_TOKEN]


@dataclass(slots=True)
class VocAnnotation:
    """The content of one XML file."""

    width: int = 0
    height: int = 0
    file_name: str = ""
    objects: list[tuple[str, tuple[float, ...], int]] = field(default_factory=list)
    """(class name, bbox, iscrowd)"""
    fault: str = ""  # Why the file cannot be used.
    bad_objects: list[tuple[str, str]] = field(default_factory=list)  # (reason, description)


def parse_xml(data: bytes) -> VocAnnotation:
    """Parse one annotation file; an unreadable one has a fault."""

    def refuse_doctype(*_: object) -> None:
        raise ValueError("it has a DOCTYPE, which is not allowed")

    parser = expat.ParserCreate()
    parser.StartDoctypeDeclHandler = refuse_doctype  # Its entities can read files and fill the memory.
    try:
        parser.Parse(data, True)
        root = ET.fromstring(data)  # noqa: S314 (no DOCTYPE, so no entities)
    except (ET.ParseError, expat.ExpatError, ValueError, LookupError) as error:
        return VocAnnotation(fault=f"its annotation is not usable XML: {_xml_problem(error, data)}")
    if root.tag != "annotation":
        return VocAnnotation(fault=f"its annotation is not VOC XML: the root is <{root.tag}>")
    width, height = (parse_side(_parse_number(root.findtext(f"size/{side}"))) for side in ("width", "height"))
    # On Windows a backslash separates folders.
    name = (root.findtext("filename") or "").strip().replace("\\", "/")
    annotation = VocAnnotation(width, height, name)
    for number, item in enumerate(root.iterfind("object"), 1):
        label = (item.findtext("name") or "").strip()
        texts = [item.findtext(f"bndbox/{name}") for name in ("xmin", "ymin", "xmax", "ymax")]
        sides = [value for value in map(_parse_number, texts) if value is not None]
        if len(sides) < 4:
            reason = reasons.BOX_NOT_FINITE if any(texts) else reasons.BOX_ABSENT
            annotation.bad_objects.append((reason, f"object {number} ({label})"))
            continue
        xmin, ymin, xmax, ymax = sides
        box_width = xmax - xmin + 1 if xmax > xmin else 0.0
        box_height = ymax - ymin + 1 if ymax > ymin else 0.0
        difficult = (item.findtext("difficult") or "").strip() == "1"
        annotation.objects.append((label, (xmin - 1, ymin - 1, box_width, box_height), int(difficult)))
    return annotation


def _xml_problem(error: Exception, data: bytes) -> str:
    """Return the message of an XML parser's error, or the remedy if the encoding is the problem."""
    if isinstance(error, LookupError) or "encoding" in str(error):
        named = re.search(rb"encoding=.([\w.:-]+)", data)
        encoding = named[1].decode() if named else "an encoding that is not supported"
        return f"it is in {encoding}: save it as UTF-8"
    if getattr(error, "code", 0) == _INVALID_TOKEN:
        try:
            data.decode()
        except UnicodeDecodeError:
            return "it is not UTF-8: save it as UTF-8"
    return str(error)


def _parse_number(text: str | None) -> float | None:
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
        """Read all annotation files."""
        digest, problems, names = hashlib.sha256(), Problems(), set[str]()
        annotations: dict[str, VocAnnotation] = {}
        layout = _Layout(self.folder, problems)
        keys = sorted({key for keys in layout.splits.values() for key in keys if key in layout.xml})
        uris = [storage.join(layout.root, layout.xml[key]) for key in keys]
        for key, uri, data in zip(keys, uris, read_files(uris), strict=True):
            text = b"" if isinstance(data, MissingError) else data
            digest.update(f"{key} {len(text)}\n".encode() + text)
            annotation = parse_xml(text)
            if isinstance(data, MissingError):
                annotation.fault = data.message
            annotations[key] = annotation
            names.update(label for label, _, _ in annotation.objects)
            for reason, item in annotation.bad_objects:
                problems.add(reason, f"{item} in {uri}")
        # Sorted, so that labels do not depend on the order of the images.
        categories = [Category(name, number) for number, name in enumerate(sorted(names - {""}), 1)]
        rows, overlaps, used = {}, SplitOverlaps(problems), set()
        for split, listed in layout.splits.items():
            read = partial(_entries, listed, annotations, layout, categories)
            for entry in read(problems):
                digest.update(f"{split} {entry.file_name} {entry.version}\n".encode("utf-8", "replace"))
                used.add(entry.file_name)
            rows[split] = Rows.of(read)
            overlaps.add(split, ((key, key) for key in listed))
        if not layout.is_standard:  # In VOC's own layout, images without annotations are normal.
            all_names = {image.name for images in layout.images.values() for image in images}
            for name in sorted(all_names - used):
                problems.add(reasons.IMAGE_WITHOUT_ANNOTATION, name)
        return Listing(
            categories, rows, digest.hexdigest(), problems, box_format="corners", read_as=layout.read_as
        )


def _entries(
    keys: list[str],
    annotations: dict[str, VocAnnotation],
    layout: "_Layout",
    categories: list[Category],
    _: Problems,
) -> Iterator[Entry]:
    """Yield the images of a split."""
    positions = {category.name: position for position, category in enumerate(categories)}
    for key in keys:
        annotation = annotations.get(key) or VocAnnotation(fault=f"no Annotations/{key}.xml")
        image = layout.find_image(key, annotation.file_name)
        if isinstance(image, str):
            yield Entry(key, "", 0, 0, [], fault=(reasons.IMAGE_MISSING, image))
            continue
        boxes = [
            Box(positions.get(label, UNKNOWN), bbox, 0.0, crowd) for label, bbox, crowd in annotation.objects
        ]
        yield Entry(
            image.name,
            storage.join(layout.root, image.path),
            annotation.width,
            annotation.height,
            boxes,
            fault=(reasons.IMAGE_UNREADABLE, annotation.fault) if annotation.fault else None,
            version=image.version,
        )


_IMAGE_FOLDERS = (("JPEGImages",), ("images",), ("Images",))
_SPLIT_FOLDER = re.compile(
    r"(train|training|val|valid|validation|test|testing)(?:[-_ ]?(?:set|data|images|imgs|labels|\d{4}))?",
    re.I,
)
_ORDER = ("train", "val", "test")


@dataclass(frozen=True, slots=True)
class _Image:
    """An image file."""

    path: str  # Relative to the folder of the data set.
    version: str

    @property
    def name(self) -> str:
        """The path without the folder JPEGImages of VOC's layout."""
        return self.path.removeprefix("JPEGImages/")

    @property
    def folder(self) -> str:
        return self.path.rpartition("/")[0]


class _Layout:
    """The files of a VOC data set.

    A key stands for an image and its annotation: the path of the XML file without its extension, in VOC's own
    layout without its folder.
    """

    def __init__(self, root: str, problems: Problems) -> None:
        """List the files; add hidden images and empty lists to `problems`."""
        self.root, self._problems = root, problems
        self.xml: dict[str, str] = {}  # Path of the XML file of each key.
        self.images: dict[str, list[_Image]] = defaultdict(list)  # Images by their stem in lower case.
        files = sorted(visible_files(root, problems), key=itemgetter(0))
        homes = {name.partition("/Annotations/")[0] for name, _ in files if name.lower().endswith(".xml")}
        if len(homes) == 1 and any(name.startswith(f"{min(homes)}/ImageSets/Main/") for name, _ in files):
            top = f"{homes.pop()}/"  # VOC's layout begins in a folder below `root`.
            self.root = storage.join(root, top.rstrip("/"))
            files = [(name.removeprefix(top), state) for name, state in files if name.startswith(top)]
        for name, state in files:
            path = PurePosixPath(name)
            if name.lower().endswith(".xml"):
                self.xml[name[:-4]] = name
            elif name.lower().endswith(IMAGE_SUFFIXES):
                self.images[path.stem.lower()].append(_Image(name, file_version(state)))
        if not self.xml:
            fix = (
                "use the folder that contains Annotations and JPEGImages, or one of images with XML "
                "files next to them"
            )
            raise DataError(f"voc:{root}: contains no XML files", fix=fix)
        if not self.images:
            fix = f"put images there; the formats are {', '.join(IMAGE_SUFFIXES)}"
            raise DataError(f"voc:{root}: no images in JPEGImages, or next to the XML files", fix=fix)
        home = [key for key in self.xml if key.startswith("Annotations/") and key.count("/") == 1]
        if home:  # Other folders of VOC's own layout hold other XML files.
            self.xml = {key.removeprefix("Annotations/"): self.xml[key] for key in home}
        self.splits = self._read_splits()
        self.is_standard = bool(home or self.splits)
        self.read_as = "VOC: splits of ImageSets/Main"
        if not self.splits:
            by_folder: dict[str, list[str]] = defaultdict(list)
            for key, xml in self.xml.items():
                split = _split_of_path(xml)
                if not split and isinstance(image := self.find_image(key), _Image):
                    split = _split_of_path(image.path)
                by_folder[split or "train"].append(key)
            self.splits = {split: by_folder[split] for split in _ORDER if split in by_folder}
            shown = []
            for split, keys in self.splits.items():
                folders = sorted({str(PurePosixPath(self.xml[key]).parent) for key in keys})
                shown.append(f"{split} of {', '.join(folders[:3])}")
            self.read_as = f"VOC: {'; '.join(shown)}"

    def find_image(self, key: str, file_name: str = "") -> _Image | str:
        """Return a key's image, or the reason why there is none.

        The image is next to the XML file, or else the nearest one of its split. If several have the stem,
        the annotation's `file_name` decides.
        """
        path = PurePosixPath(self.xml.get(key, key))
        split, stem = _split_of_path(str(path)), PurePosixPath(key).name
        images = self.images.get(stem.lower(), [])
        if split:
            images = [image for image in images if _split_of_path(image.path) == split]
        if not images:
            return f"no file {stem}.* next to {key}.xml or in another folder of its split"

        def rank(image: _Image) -> tuple[int, bool]:
            """Count the folders between the two files; the usual names of folders come first."""
            here, there = path.parent.parts, PurePosixPath(image.folder).parts
            common = sum(1 for one, two in zip(here, there, strict=False) if one == two)
            return len(here) + len(there) - 2 * common, there[-1:] not in _IMAGE_FOLDERS

        nearest = [image for image in images if rank(image) == min(map(rank, images))]
        wanted = PurePosixPath(file_name).name
        nearest = [image for image in nearest if PurePosixPath(image.path).name == wanted] or nearest
        if len({image.folder for image in nearest}) > 1:
            return f"several images {stem}.*, and none next to {key}.xml"
        return nearest[0]

    def _read_splits(self) -> dict[str, list[str]]:
        """Return the keys of each split by the lists in ImageSets/Main; {} if there are none."""
        keys_of: dict[str, list[str]] = defaultdict(list)
        for key in self.xml:
            keys_of[PurePosixPath(key).name].append(key)
        folder = storage.join(self.root, "ImageSets", "Main")
        files = storage.list_states(folder)
        lists = {
            split: [_find_stem(line, keys_of) for line in read_entries(storage.join(folder, f"{split}.txt"))]
            for split in (*_ORDER, "trainval")
            if f"{split}.txt" in files
        }
        for split in (split for split, stems in lists.items() if not stems):
            self._problems.add(reasons.SPLIT_EMPTY, f"{split}: ImageSets/Main/{split}.txt")
        trainval = lists.pop("trainval", [])
        if not lists.get("train"):
            held_out = {stem for stems in lists.values() for stem in stems}
            lists["train"] = [stem for stem in trainval if stem not in held_out]
        return {
            split: [key for stem in dict.fromkeys(stems) for key in keys_of.get(stem, [stem])]
            for split, stems in lists.items()
            if stems
        }


def _split_of_path(path: str) -> str | None:
    """Return the split of the outermost folder in a path that is named like one; None if none is."""
    folders = (part for part in path.split("/")[:-1] if _SPLIT_FOLDER.fullmatch(part))
    return next(map(parse_split, folders), None)


def _find_stem(line: str, stems: dict[str, list[str]]) -> str:
    """Return the stem of the image in a line of a list, without further columns, extension and folders."""
    name = line if line in stems else re.sub(r"\s+-?[01]$", "", line)
    if name in stems:
        return name
    name = name.rpartition("/")[2]
    return name[: name.rindex(".")] if name.lower().endswith(IMAGE_SUFFIXES) else name
