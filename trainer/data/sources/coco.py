"""Reads COCO data sets: JSON files (https://cocodataset.org/#format-data), and images near them or at their
`coco_url`.

JSON files of any size are parsed as streams, and their entries are sorted by image in a database on disk.

COCO 2017 (https://cocodataset.org/#download) is read from its zips, or from a mirror with zips/ and
annotations/. Its images are fetched one by one over many connections; the zips are not copied.
"""

import hashlib
import json
import os
import re
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from io import BufferedIOBase
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path, PurePosixPath
from typing import Any

import ijson
import numpy as np

from trainer import storage
from trainer.base.errors import DataError, StorageError, first_line
from trainer.data import problem_counts as reasons
from trainer.data.images import DISPLAYED_SHARES, IMAGE_SUFFIXES
from trainer.data.problem_counts import Problems
from trainer.data.source_names import Coco2017
from trainer.data.sources.files import FolderListings, ZipReader, open_member, skip_hidden, visible_files
from trainer.data.sources.source import (
    DEFAULT_OPTIONS,
    UNKNOWN,
    Box,
    BoxOptions,
    Category,
    Entry,
    Listing,
    Rows,
    Source,
    SplitOverlaps,
    parse_side,
    parse_split,
)

FIX = "use a file with the lists images, annotations and categories, as labeling tools export COCO"
_BLOCK = 1024 * 1024
_NAN_PATTERN = re.compile(rb"(?:(?<=[:,\[\s])|\A)-?(?:NaN|Infinity)(?=\s*[,\]}])")
_MAX_DEPTH = 5000  # The parser's memory grows with the square of the nesting depth.
_STEPS = bytes(1 if byte in b"[{" else 255 for byte in range(256))
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")


@dataclass(frozen=True)
class CocoFile:
    """A COCO JSON file that can be opened repeatedly."""

    uri: str  # For messages.
    path: str  # A local path, or the URI of the zip that contains `member`.
    member: str = ""
    confined: bool = True  # Whether absolute names of images are refused; false for a file of this machine.

    def open(self) -> AbstractContextManager[BufferedIOBase]:
        return open_member(self.path, self.member) if self.member else Path(self.path).open("rb")

    def items(self, name: str) -> Iterator[Mapping[str, Any]]:
        """Yield the objects of one of the lists images, annotations and categories."""
        count = 0
        try:
            for item in self._objects(name):
                if not isinstance(item, dict):
                    message = f"{self.uri} is not COCO JSON: {name} has an item that is not an object"
                    raise DataError(message, fix=FIX)
                count += 1
                yield item
            if not count:
                with self.open() as file:
                    events = ijson.parse(_LenientReader(file, self.uri))
                    lists = {path for path, event, _ in events if event == "start_array"}
                for required in ("images", "annotations", "categories"):
                    if required not in lists:
                        raise DataError(f"{self.uri} is not COCO JSON: it has no list {required!r}", fix=FIX)
        except (ijson.JSONError, ValueError, ArithmeticError, RecursionError) as error:
            # The parser's message continues with an excerpt of the text over several lines.
            raise DataError(f"{self.uri} is not JSON: {first_line(error)}", fix=FIX) from None

    def _objects(self, name: str) -> Iterator[Any]:
        """Yield the items of a list; after a number beyond 64 bits, a slower parser reads the rest."""
        count, prefix = 0, f"{name}.item"
        try:
            with self.open() as file:
                for item in ijson.items(_LenientReader(file, self.uri), prefix, use_float=True):
                    yield item
                    count += 1
        except ijson.JSONError as error:
            if "overflow" not in first_line(error):
                raise
            with self.open() as file:
                items = ijson.items(_LenientReader(file, self.uri), prefix)
                yield from map(_decimals_to_floats, islice(items, count, None))


def _decimals_to_floats(value: Any) -> Any:
    """Return a parsed value with floats in place of decimals."""
    if isinstance(value, dict):
        return {key: _decimals_to_floats(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_decimals_to_floats(part) for part in value]
    return float(value) if isinstance(value, Decimal) else value


class _LenientReader:
    """Replaces NaN and Infinity, which Python writes but JSON does not allow, by null.

    Raises ijson.JSONError if brackets, including those in strings, are nested too deeply.
    """

    def __init__(self, file: BufferedIOBase, uri: str) -> None:
        self._file, self._uri = file, uri
        self._rest = b""
        self._begun = False
        self._depth = 0

    def read(self, size: int) -> bytes:
        """Return the next bytes, possibly more than `size`; the parser calls `read(0)` to test their type."""
        while size:
            block = self._file.read(_BLOCK)
            if not self._begun:
                if block.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in block[:2]:
                    fix = "save it as UTF-8 (PowerShell: -Encoding utf8)"
                    raise DataError(f"{self._uri} is UTF-16 or UTF-32; JSON must be UTF-8", fix=fix)
                block, self._begun = block.removeprefix(b"\xef\xbb\xbf"), True
            data = self._rest + block
            # Cut where no token is split.
            end = max(map(data.rfind, (b",", b"]", b"}"))) + 1 if block else len(data)
            data, self._rest = data[:end], data[end:]
            if data or not block:
                steps = np.frombuffer(data.translate(_STEPS, _NO_BRACKETS), np.int8)
                depths = self._depth + np.cumsum(steps, dtype=np.int64)
                if len(depths):
                    if depths.max() > _MAX_DEPTH:
                        raise ijson.JSONError("it is nested too deeply")
                    self._depth = int(depths[-1])
                return _NAN_PATTERN.sub(b"null", data) if b"NaN" in data or b"Infinity" in data else data
        return b""


_FEDERATED = ("neg_category_ids", "not_exhaustive_category_ids")
"""Fields of images in LVIS: classes that are absent, and classes of which some objects have no box."""
_TABLES = """
    CREATE TABLE images (place INTEGER PRIMARY KEY, name TEXT UNIQUE, fields TEXT, clashes INT DEFAULT 0);
    CREATE TABLE ids (id PRIMARY KEY, place INTEGER) WITHOUT ROWID;
    CREATE TABLE boxes (id, annotation, category INT, x REAL, y REAL, w REAL, h REAL, area REAL, crowd INT);
"""
"""The images in order, each once; the image of each id; boxes, with the id of their image and their own."""


@contextmanager
def _translate_database_errors() -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:  # The disk is full or cannot be written.
        fix = "free space there, or set TMPDIR to another folder, and run again"
        problem = f"cannot use {tempfile.gettempdir()} for temporary files: {error}"
        raise StorageError(problem, fix=fix) from error


class CocoImages:
    """The images and boxes of one file."""

    def __init__(self, file: CocoFile, problems: Problems) -> None:
        """Read the images, repeated ones once, and add what is wrong with them to `problems`."""
        self._file = file
        self.federated = False
        """Whether each image names the classes that annotators looked for, as in LVIS."""
        with _translate_database_errors():
            self._database = sqlite3.connect("", check_same_thread=False)  # "" is a temporary file.
            self._database.executescript(_TABLES)
            execute = self._database.execute
            for image in file.items("images"):
                fields = _parse_image(image, file)
                if not fields[1] and skip_hidden(fields[0], problems):
                    continue
                # JSON, since names may not be UTF-8.
                name, image_id = json.dumps(fields[0]), _id_key(fields[-1])
                federated = [image.get(key) for key in _FEDERATED]
                self.federated |= all(isinstance(ids, list) for ids in federated)
                row = (name, json.dumps([*fields, federated]))
                if not execute("INSERT OR IGNORE INTO images (name, fields) VALUES (?, ?)", row).rowcount:
                    problems.add(reasons.IMAGE_LISTED_TWICE, fields[0])
                (place,) = execute("SELECT place FROM images WHERE name = ?", (name,)).fetchone()
                if not execute("INSERT OR IGNORE INTO ids VALUES (?, ?)", (image_id, place)).rowcount:
                    # If two images have the same id, it is unknown which of them the boxes belong to.
                    (other,) = execute("SELECT place FROM ids WHERE id = ?", (image_id,)).fetchone()
                    if other != place:
                        execute("UPDATE images SET clashes = 1 WHERE place IN (?, ?)", (place, other))
            (self.count,) = execute("SELECT count(*) FROM images").fetchone()
        if not self.count:
            fix = "add images to the list, or remove the file if it is not the training split"
            raise DataError(f"{file.uri} lists no images", fix=fix)

    def entries(self, step: int = 1, names: Mapping[int | str, str] | None = None) -> Iterator[Entry]:
        """Yield every `step`-th image in the file's order, without boxes; `origin` is the `coco_url`.

        If `names` gives the name of each category id, `extra` has the classes that annotators looked for.
        """
        query = "SELECT fields, clashes FROM images WHERE place % ? = 0 ORDER BY place"
        for fields, clashes in self._database.execute(query, (step,)):
            name, url, width, height, original_id, federated = json.loads(fields)
            entry = Entry(name, url, width, height, [], original_id)
            if names and self.federated:
                absent, partly = ([names[one] for one in ids or () if one in names] for ids in federated)
                entry.extra = json.dumps({"verified": dict.fromkeys(absent, 0), "not_exhaustive": partly})
            if clashes:
                entry.fault = (reasons.IMAGE_ID_TWICE, f"id {original_id}")
            yield entry

    def annotated_entries(
        self,
        categories: list[Category],
        options: BoxOptions,
        locate: Callable[[Entry], object],
        problems: Problems,
    ) -> Iterator[Entry]:
        """Call `locate` for each image, and yield it with its boxes; add unusable boxes to `problems`."""
        execute = self._database.execute
        with _translate_database_errors():
            execute("DELETE FROM boxes")
            rows = self._box_rows(categories, options, problems)
            self._database.executemany("INSERT INTO boxes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
            unknown = "SELECT id, count(*) FROM boxes WHERE id NOT IN (SELECT id FROM ids) GROUP BY id"
            for key, count in execute(unknown).fetchall():
                example = f"image_id {str(key)[:40]} in {self._file.uri}"
                problems.add(reasons.BOX_UNKNOWN_IMAGE, example, count)
            repeated = "SELECT annotation, count(*) - 1 FROM boxes WHERE annotation IS NOT NULL "
            for key, count in execute(f"{repeated} GROUP BY annotation HAVING count(*) > 1"):
                problems.add(reasons.ANNOTATION_ID_TWICE, f"id {str(key)[:40]} in {self._file.uri}", count)
            boxes = execute(
                "SELECT place, category, x, y, w, h, area, crowd FROM boxes JOIN ids USING (id) "
                "ORDER BY place, boxes.rowid"
            )
            groups = groupby(boxes, itemgetter(0))
            group = next(groups, None)
            names = {category.original_id: category.name for category in categories}
            for place, entry in enumerate(self.entries(names=names), 1):
                if group and group[0] == place:
                    entry.boxes = [Box(row[1], row[2:6], row[6], row[7]) for row in group[1]]
                    group = next(groups, None)
                if options.box_format == "normalised":
                    entry.width, entry.height = DISPLAYED_SHARES
                locate(entry)
                yield entry

    def _box_rows(
        self, categories: list[Category], options: BoxOptions, problems: Problems
    ) -> Iterator[tuple[Any, ...]]:
        """Yield rows of the table of boxes."""
        positions = {category.original_id: position for position, category in enumerate(categories)}
        for item in self._file.items("annotations"):
            box = parse_box(item, options)
            if isinstance(box, str):
                named = {name: item[name] for name in ("id", "image_id", "bbox") if name in item}
                excerpt = json.dumps(named, ensure_ascii=False)[:120]
                problems.add(box, f"{excerpt} in {self._file.uri}")
                continue
            category = _normalize_id(item.get("category_id"))
            position = positions.get(category, UNKNOWN) if isinstance(category, int) else UNKNOWN
            crowd = item.get("iscrowd") in (1, True)
            own = _normalize_id(item.get("id"))
            ids = _id_key(_normalize_id(item.get("image_id"))), None if own is None else _id_key(own)
            yield *ids, position, *box, _positive_or_zero(item.get("area")), crowd


def _normalize_id(value: Any) -> Any:
    """Return an id; a float such as 7.0, which table libraries write, becomes 7."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def _id_key(value: Any) -> int | str:
    """Return the key of an id in the database, where 7 and "7" differ."""
    is_number = isinstance(value, int) and -(2**63) <= value < 2**63
    return int(value) if is_number else json.dumps(value)


def _positive_or_zero(value: Any) -> float:
    """Return a positive finite number as it is, and 0 for anything else."""
    usable = isinstance(value, int | float) and 0 < value < 1e12
    return float(value) if usable else 0.0


def _parse_image(image: Mapping[str, Any], file: CocoFile) -> tuple[str, str, int, int, int | str]:
    """Return name, URL, width, height and id of an image; the URL may be an absolute path."""
    original_id, url = _normalize_id(image.get("id")), str(image.get("coco_url") or "")
    name = image.get("file_name") or PurePosixPath(url.partition("?")[0]).name
    if not isinstance(original_id, int | str) or not isinstance(name, str) or not name:
        problem = f"image {json.dumps(image)[:80]} lacks a file_name, or an id that is an integer or a string"
        fix = "add both, and use the same id in the annotations"
        raise DataError(f"{file.uri}: {problem}", fix=fix)
    width, height = (parse_side(image.get(side)) for side in ("width", "height"))
    url = url if is_fetchable(url) else ""
    if is_fetchable(name):  # As Label Studio writes it for images in a bucket.
        url, name = name, name.partition("://")[2].partition("?")[0]
    elif not file.confined and (name.startswith("/") or ".." in name.split("/")):
        outside = os.path.normpath(os.path.join(storage.parent(file.uri), name))
        if outside.startswith("/") and outside.lower().endswith(IMAGE_SUFFIXES) and os.path.isfile(outside):
            name = outside.lstrip("/")
            url = f"/{name}"
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or not path.name or "\0" in name or ":" in path.parts[0]:
        problem = f"{file.uri}: file_name {name!r} leads outside the image folder"
        problem += " and is not an image on this machine" if path.is_absolute() else ""
        raise DataError(problem, fix="make file_name relative to the folder of the images")
    return str(path), url, width, height, original_id


def is_fetchable(text: str) -> bool:
    """Return whether a text is a URL from which images are fetched."""
    return storage.scheme(text) in (*storage.WEB, *storage.OBJECT_STORES)


def parse_box(
    annotation: Mapping[str, Any], options: BoxOptions = DEFAULT_OPTIONS
) -> tuple[float, ...] | str:
    """Return an annotation's box [x, y, width, height], or the reason why it has none."""
    segmentation = annotation.get("segmentation")
    # A run-length encoded mask, which is a dict, comes with a bbox.
    is_outline = bool(segmentation) and not isinstance(segmentation, dict)
    if options.boxes_from == "segmentation" and is_outline:
        return _box_of_polygons(segmentation) or reasons.SEGMENTATION_UNUSABLE
    bbox = annotation.get("bbox")
    if bbox is None or bbox == []:
        return reasons.BOX_ONLY_SEGMENTATION if is_outline else reasons.BOX_ABSENT
    if not isinstance(bbox, list) or len(bbox) != 4 or not _are_finite(bbox):
        return reasons.BOX_NOT_FINITE
    x, y, width, height = map(float, bbox)
    return (x, y, width - x, height - y) if options.box_format == "xyxy" else (x, y, width, height)


def _box_of_polygons(polygons: Any) -> tuple[float, ...] | None:
    """Return the extent of polygons [[x1, y1, x2, y2, ...], ...]."""
    if not isinstance(polygons, list):
        return None
    if all(isinstance(part, int | float) for part in polygons):
        polygons = [polygons]
    for polygon in polygons:
        if not isinstance(polygon, list) or len(polygon) < 4 or len(polygon) % 2 or not _are_finite(polygon):
            return None
    xs = [x for polygon in polygons for x in polygon[::2]]
    ys = [y for polygon in polygons for y in polygon[1::2]]
    return float(min(xs)), float(min(ys)), float(max(xs) - min(xs)), float(max(ys) - min(ys))


def _are_finite(values: list[Any]) -> bool:
    return all(type(value) in (int, float) and abs(value) < 1e9 for value in values)


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
        """Choose the folder that contains the most of 20 `images` sampled from the whole file."""
        self._on_web = storage.scheme(uri) in storage.WEB
        self._base = storage.parent(uri)
        self._folders = FolderListings()
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
        hits = {place: sum(self._find_file(place, probe) is not None for probe in probes) for place in places}
        best = max(places, key=lambda place: hits[place])
        if hits[best]:
            self._best = best
        elif not any(probe.origin for probe in probes):
            looked = f"looked for {probes[0].file_name} in {self._base} and {storage.parent(self._base)}"
            looked += f", and in their folders {', '.join(dict.fromkeys(names))}"
            fix = "put the images in one of these folders, or add a coco_url"
            raise DataError(f"the images of {uri} were not found; {looked}", fix=fix)

    def locate(self, entry: Entry) -> str:
        """Set an entry's `origin` and `version`, or its `fault`; return text that changes with its file."""
        folder = "/" if entry.origin.startswith("/") else self._best  # "/": an absolute file_name.
        located = self._find_file(folder, entry) if folder else None
        if located:
            entry.origin, entry.version = located
            return f"{entry.file_name} {entry.version}"
        if is_fetchable(entry.origin):
            return f"{entry.file_name} {entry.origin}"
        if self._on_web:
            entry.origin = storage.join(self._base, entry.file_name)
            return ""
        entry.fault = entry.fault or (reasons.IMAGE_MISSING, f"it is not in {self._best} and has no coco_url")
        return f"{entry.file_name} missing"

    def locate_all(self, images: CocoImages, update: Callable[[bytes], None]) -> Iterator[tuple[str, str]]:
        """Yield names and origins of images; pass bytes that change with their files to `update`."""
        for entry in images.entries():
            update(self.locate(entry).encode("utf-8", "surrogatepass") + b"\n")
            yield entry.file_name, entry.origin

    def _find_file(self, place: str, entry: Entry) -> tuple[str, str] | None:
        """Return URI and version of an entry's file under a place, or None."""
        parent, _, name = entry.file_name.rpartition("/")
        return self._folders.find(storage.join(place, parent) if parent else place, name)


@dataclass(frozen=True)
class CocoSource(Source):
    """A COCO JSON or a folder with such files."""

    location: str
    options: BoxOptions = DEFAULT_OPTIONS
    confined: str = ""  # The folder that contains all images; "" allows absolute file names.

    @property
    def uri(self) -> str:
        return f"coco:{self.location}"

    def listing(self) -> Listing:
        """Read images and categories; the boxes are read when the rows are iterated."""
        digest, problems = hashlib.sha256(), Problems()
        files = {}
        for split, uri in self._files().items():
            confined = bool(self.confined) or not storage.is_local(uri)
            file = CocoFile(uri, str(storage.local_copy(uri)), confined=confined)
            with file.open() as data:
                digest.update(f"{split} {hashlib.file_digest(data, 'sha256').hexdigest()}\n".encode())
            files[split] = file
        categories = merge_categories(files.values())
        splits, overlaps = {}, SplitOverlaps(problems)
        for split, file in files.items():
            images = CocoImages(file, problems)
            locator = ImageLocator(file.uri, split, images)
            overlaps.add(split, locator.locate_all(images, digest.update))
            read = partial(images.annotated_entries, categories, self.options, locator.locate)
            splits[split] = Rows.of(read, problems)
        names = [f"{split} of {file.uri.removeprefix(f'{self.location}/')}" for split, file in files.items()]
        return Listing(
            categories,
            splits,
            digest.hexdigest(),
            problems,
            read_as=f"COCO JSON: {'; '.join(names)}",
            box_format=self.options.box_format,
        )

    def _files(self) -> dict[str, str]:
        """Return the annotation file of each split; a lone file is train whatever its name."""
        is_file = self.location.lower().endswith(".json")
        uris = [self.location] if is_file else annotation_files(self.location)
        if not uris:
            raise DataError(f"{self.uri}: contains no COCO JSON", fix="use a COCO JSON, or the folder of one")
        splits: dict[str, str] = {}
        for uri in uris:
            name, folder = PurePosixPath(uri).name, storage.parent(uri).rpartition("/")[2]
            split = parse_split(name) or parse_split(folder)
            split = split if len(uris) > 1 else "train"
            if split in splits:
                message = f"{self.uri}: both {splits[split]} and {uri} are split {split!r}"
                raise DataError(message, fix="use one JSON file, or keep only one per split in the folder")
            if split:
                splits[split] = uri
        if "train" not in splits:
            fix = "put the word train into the file's name, or use that file as the source"
            raise DataError(f"{self.uri}: no training split among {', '.join(uris)}", fix=fix)
        return {split: splits[split] for split in ("train", "val", "test") if split in splits}


def annotation_files(folder: str) -> list[str]:
    """Return the URIs of the COCO JSON files in a folder; only those of box annotations if there are any.

    Files are searched in annotations/, the folder itself, coco/, and the folders train, valid, val and test;
    the first place that has any is used. In the folder of a split, a lone file may have any name.
    """
    for place in _ANNOTATION_FOLDERS:
        uris = [
            storage.join(holder, name)
            for holder in (storage.join(folder, name) if name else folder for name in place)
            for name in sorted(name for name, _ in visible_files(holder, recursive=False))
            if name.lower().endswith(".json")
        ]
        names = [PurePosixPath(uri).name for uri in uris]
        boxes = [
            uri
            for uri, name in zip(uris, names, strict=True)
            if name.startswith("instances_") or name.endswith("_annotations.coco.json")
        ]
        one_each = len(place) > 1 and len(uris) == len({storage.parent(uri) for uri in uris})
        if boxes or one_each or any(map(parse_split, names)) or len(uris) == 1:
            return boxes or uris
    return []


def merge_categories(files: Iterable[CocoFile]) -> list[Category]:
    """Return the categories of files, by their ids; raise DataError if they contradict each other."""
    by_id: dict[int, Any] = {}
    by_name: dict[Any, int] = {}
    frequencies: dict[int, str] = {}
    for file in files:
        for item in file.items("categories"):
            number, name = _normalize_id(item.get("id")), item.get("name")
            named = isinstance(name, str) and name.strip()
            if not isinstance(number, int) or not named:
                problem = f"category {json.dumps(item)[:80]} lacks an integer id or a name"
                fix = "add an integer id and a name to each category, and use the id in the annotations"
                raise DataError(f"{file.uri}: {problem}", fix=fix)
            if by_id.setdefault(number, name) != name or by_name.setdefault(name, number) != number:
                elsewhere = f"{by_name.get(name, number)} {by_id[number]!r} elsewhere"
                fix = "use the same category ids and names in all files, each once"
                raise DataError(f"{file.uri}: category {number} {name!r} is {elsewhere}", fix=fix)
            if item.get("frequency") in ("r", "c", "f"):
                frequencies[number] = item["frequency"]
    return [Category(by_id[number], number, frequencies.get(number, "")) for number in sorted(by_id)]


ANNOTATIONS = "annotations/annotations_trainval2017.zip"
_SPLITS = {"train": "train2017", "val": "val2017"}
_zip_readers: dict[str, ZipReader] = {}
_zip_lock = threading.Lock()


@dataclass(frozen=True)
class Coco2017Source(Coco2017, Source):
    """COCO 2017's training and validation images."""

    options: BoxOptions = DEFAULT_OPTIONS

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
            files[split] = CocoFile(f"{annotations}#{member}", annotations, member)
        # Both files list the same categories; the file of val is a twentieth as large.
        categories, problems = merge_categories([files["val"]]), Problems()
        splits = {
            split: Rows.of(partial(self._entries, files[split], zips[split], name, categories), problems)
            for split, name in _SPLITS.items()
        }
        digest = hashlib.sha256(json.dumps(states).encode()).hexdigest()
        return Listing(categories, splits, digest, problems, box_format=self.options.box_format)

    def _entries(
        self, file: CocoFile, zip_uri: str, folder: str, categories: list[Category], problems: Problems
    ) -> Iterator[Entry]:
        directory = _open_zip(zip_uri, fresh=True)

        def locate(entry: Entry) -> None:
            name = f"{folder}/{entry.file_name}"
            entry.origin, entry.version = f"{zip_uri}#{name}", directory.version(name)
            if not entry.version:
                entry.fault = entry.fault or (reasons.IMAGE_MISSING, f"no {name} in {zip_uri}")

        return CocoImages(file, problems).annotated_entries(categories, self.options, locate, problems)

    def read(self, origin: str) -> bytes:
        uri, _, name = origin.rpartition("#")
        return _open_zip(uri).read(name)


def _open_zip(uri: str, *, fresh: bool = False) -> ZipReader:
    """Return the reader of a zip; its directory is read once per process, or again if `fresh`."""
    with _zip_lock:
        if fresh or uri not in _zip_readers:
            _zip_readers[uri] = ZipReader(uri)
        return _zip_readers[uri]
