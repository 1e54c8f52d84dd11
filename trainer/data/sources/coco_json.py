"""COCO JSON read as a stream: a file may be larger than the memory, and most of it is segmentations."""

import json
import math
import re
from array import array
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import ijson
import numpy as np
import pyarrow as pa

from trainer import storage
from trainer.data import problems as reasons
from trainer.data.problems import Problems
from trainer.data.sources.base import UNKNOWN, Category, Entry
from trainer.data.sources.rows import BOX, Entries
from trainer.errors import DataError

_LISTS = ("images", "annotations", "categories")
_FIX = "name a file with the lists images, annotations and categories"
_BLOCK = 1024 * 1024
_NO_NUMBER = re.compile(rb"(?:(?<=[:,\[\s])|\A)-?(?:NaN|Infinity)(?=\s*[,\]}])")
_NAN = (math.nan,) * 4
_DEEPEST = 5000
"""Depth of nesting that is refused: the parser's memory grows with its square."""

_STEPS = np.zeros(256, np.int8)
_STEPS[[*b"[{"]], _STEPS[[*b"]}"]] = 1, -1


@dataclass(frozen=True)
class CocoFile:
    """A COCO JSON that can be opened again and again."""

    uri: str
    """For messages."""
    open: Callable[[], AbstractContextManager[BufferedIOBase]]

    @classmethod
    def at(cls, uri: str) -> "CocoFile":
        """Name the file at a URI; one that is not local is copied to the local cache.

        Raises:
            StorageError: it is missing or cannot be reached.
        """
        path = storage.local_copy(uri)
        return cls(uri, lambda: path.open("rb"))

    def items(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield the objects of one of the lists images, annotations and categories.

        Raises:
            DataError: the file is no COCO JSON.
        """
        found = False
        try:
            with self.open() as file:
                for item in ijson.items(_Lenient(file), f"{name}.item", use_float=True):
                    if not isinstance(item, dict):
                        raise DataError(
                            f"{self.uri} is not COCO JSON: {name} holds what is no object", fix=_FIX
                        )
                    found = True
                    yield item
            if not found:
                self._check_lists()
        except (ijson.JSONError, UnicodeDecodeError) as error:
            # The parser's own text goes on with a picture of the place over several lines.
            raise DataError(f"{self.uri} is not JSON: {str(error).splitlines()[0]}", fix=_FIX) from None

    def _check_lists(self) -> None:
        """Raise DataError if one of the lists is missing, or there are no images."""
        with self.open() as file:
            lists = {
                path for path, event, _ in ijson.parse(_Lenient(file))
                if event == "start_array" and path in _LISTS
            }  # fmt: skip
        for name in _LISTS:
            if name not in lists:
                raise DataError(f"{self.uri} is not COCO JSON: it has no list {name!r}", fix=_FIX)


class _Lenient:
    """Gives JSON with null for NaN and Infinity, which Python writes and JSON does not know.

    Raises ijson.JSONError where it is nested far too deep. Brackets in texts count as well, which
    does not matter as long as nearly all come in pairs.
    """

    def __init__(self, file: BufferedIOBase) -> None:
        self._file = file
        self._rest = b""
        self._begun = False
        self._depth = 0

    def read(self, size: int) -> bytes:
        """Return the next bytes, more than asked for; `read(0)` is asked to learn their type."""
        while size:
            block = self._file.read(_BLOCK)
            if not self._begun:
                block, self._begun = block.removeprefix(b"\xef\xbb\xbf"), True
            data = self._rest + block
            # Cut where no word can be cut in two.
            end = max(map(data.rfind, (b",", b"]", b"}"))) + 1 if block else len(data)
            data, self._rest = data[:end], data[end:]
            if data or not block:
                self._check_depth(data)
                return _NO_NUMBER.sub(b"null", data) if b"NaN" in data or b"Infinity" in data else data
        return b""

    def _check_depth(self, data: bytes) -> None:
        depths = np.cumsum(_STEPS[np.frombuffer(data, np.uint8)], dtype=np.int64)
        if len(depths):
            if self._depth + int(depths.max()) > _DEEPEST:
                raise ijson.JSONError("it is nested too deep")
            self._depth += int(depths[-1])


def read_entries(file: CocoFile, categories: list[Category], problems: Problems) -> Entries:
    """Return a file's images with their boxes; an image that is listed twice is taken once.

    Args:
        file: the COCO JSON.
        categories: those of all files; a box of another one is of an unknown category.
        problems: grows.

    Raises:
        DataError: the file is no COCO JSON, or an image has no name that can be used.
    """
    by_id = _images(file, problems)
    entries = Entries({id(entry): entry for entry in by_id.values()}.values())
    place = {id(entry): index for index, entry in enumerate(entries)}
    places = {original_id: place[id(entry)] for original_id, entry in by_id.items()}
    position = {category.original_id: index for index, category in enumerate(categories)}
    boxes = _Boxes()
    for item in file.items("annotations"):
        image_id, category_id = item.get("image_id"), item.get("category_id")
        image = places.get(image_id) if isinstance(image_id, int | str) else None
        if image is None:
            problems.add(reasons.BOX_UNKNOWN_IMAGE, f"image_id {image_id} in {file.uri}")
            continue
        category = position.get(category_id, UNKNOWN) if isinstance(category_id, int) else UNKNOWN
        crowd = int(item.get("iscrowd") in (1, True))
        boxes.add(image, category, _bbox(item.get("bbox")), _positive(item.get("area")), crowd)
    entries.boxes = boxes.of_images(len(entries))
    return entries


class _Boxes:
    """Boxes as columns: fifty bytes each, where objects take four hundred."""

    def __init__(self) -> None:
        self._image, self._category, self._crowd = array("i"), array("i"), array("b")
        self._values = array("d")

    def add(self, image: int, category: int, bbox: tuple[float, ...], area: float, crowd: int) -> None:
        """Append a box of the n-th image."""
        self._image.append(image)
        self._category.append(category)
        self._values.extend((*bbox, area))
        self._crowd.append(crowd)

    def of_images(self, count: int) -> pa.ListArray:
        """Return the boxes of each image, in the order they were added."""
        image = np.array(self._image, np.int32)
        order = np.argsort(image, kind="stable")
        offsets = np.searchsorted(image[order], np.arange(count + 1)).astype(np.int32)
        values = np.array(self._values).reshape(-1, 5)[order]
        fields = [
            np.array(self._category, np.int32)[order], *values.T, np.array(self._crowd, np.int8)[order]
        ]  # fmt: skip
        columns = [pa.array(np.ascontiguousarray(field)) for field in fields]
        return pa.ListArray.from_arrays(
            pa.array(offsets), pa.StructArray.from_arrays(columns, fields=list(BOX))
        )


def _images(file: CocoFile, problems: Problems) -> dict[int | str, Entry]:
    """Return a file's images by id."""
    by_id: dict[int | str, Entry] = {}
    by_name: dict[str, Entry] = {}
    for image in file.items("images"):
        original_id, url = image.get("id"), str(image.get("coco_url") or "")
        name = image.get("file_name") or PurePosixPath(urlsplit(url).path).name
        if not isinstance(original_id, int | str) or not isinstance(name, str) or not name:
            raise DataError(
                f"{file.uri}: image {json.dumps(image)[:80]} lacks an id or a file_name", fix="give it both"
            )
        name = _relative(name, file.uri)
        if name in by_name:
            problems.add(reasons.IMAGE_LISTED_TWICE, name)
        width, height = int(_positive(image.get("width"))), int(_positive(image.get("height")))
        entry = by_name.setdefault(name, Entry(name, url, width, height, [], original_id))
        if by_id.setdefault(original_id, entry) is not entry:
            # Nobody knows which of the two the boxes belong to.
            for clash in (by_id[original_id], entry):
                clash.fault = (reasons.IMAGE_ID_TWICE, f"id {original_id}")
            by_id[f"{original_id} {name}"] = entry
    if not by_id:
        raise DataError(f"{file.uri} lists no images", fix=_FIX)
    return by_id


def _relative(name: str, uri: str) -> str:
    """Return a file_name with forward slashes; refuse one that leads out of the folder."""
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or not path.name or "\0" in name or ":" in path.parts[0]:
        raise DataError(
            f"{uri}: refused file_name {name!r}, which leads out of the images' folder",
            fix="make file_name relative to the folder of the images",
        )
    return str(path)


def _positive(value: Any) -> float:
    """Return a positive finite number as it is, and 0 for anything else."""
    usable = isinstance(value, int | float) and math.isfinite(value) and 0 < value < 1e12
    return float(value) if usable else 0.0


def _bbox(value: Any) -> tuple[float, ...]:
    """Return a box as four finite numbers, or four NaNs if it is something else."""
    if not isinstance(value, list) or len(value) != 4:
        return _NAN
    if not all(isinstance(part, int | float) and math.isfinite(part) and abs(part) < 1e9 for part in value):
        return _NAN
    return tuple(float(part) for part in value)
