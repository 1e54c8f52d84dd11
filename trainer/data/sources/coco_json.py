"""Reads COCO JSON as a stream: a file may exceed the memory, and most of it is segmentations.

Its images are kept on disk, as there may be millions; memory holds twenty bytes of each.
"""

import json
import os
import re
from array import array
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import PurePosixPath
from tempfile import TemporaryFile
from typing import Any

import ijson
import numpy as np

from trainer import storage
from trainer.base.errors import DataError, first_line
from trainer.data import problem_counts as reasons
from trainer.data.images import IMAGE_SUFFIXES
from trainer.data.problem_counts import Problems
from trainer.data.sources.source import ROWS, Entry

_LISTS = ("images", "annotations", "categories")
FIX = "name a file with the lists images, annotations and categories"
_OTHERS = {
    "shapes": "; it is labelme's file of one image: convert them with labelme2coco",
    "a list": "; it is a list, as Label Studio's own JSON and CreateML's: export as COCO instead",
    "_via_img_metadata": "; it is VIA's project: export annotations as COCO there",
    "features": "; it is GeoJSON",
}
"""What a JSON is that has such a key, and is not COCO's."""

_BLOCK = 1024 * 1024
_NO_NUMBER = re.compile(rb"(?:(?<=[:,\[\s])|\A)-?(?:NaN|Infinity)(?=\s*[,\]}])")
_DEEPEST = 5000
"""Depth of nesting that is refused: the parser's memory grows with its square."""

_STEPS = bytes(1 if byte in b"[{" else 255 for byte in range(256))
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")


@dataclass(frozen=True)
class CocoFile:
    """A COCO JSON that can be opened again and again."""

    uri: str
    """For messages."""
    open: Callable[[], AbstractContextManager[BufferedIOBase]]
    confined: bool = True
    """Whether absolute names of images are refused: not where the file is this machine's."""

    @classmethod
    def at(cls, uri: str, *, confined: bool = False) -> "CocoFile":
        """Name the file at a URI; one that is not local is copied to the local cache.

        Args:
            uri: the file.
            confined: whether it is not trusted although it is local.

        Raises:
            StorageError: it is missing or cannot be reached.
        """
        path = storage.local_copy(uri)
        return cls(uri, lambda: path.open("rb"), confined or not storage.is_local(uri))

    def items(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield the objects of one of the lists images, annotations and categories.

        Raises:
            DataError: the file is no COCO JSON.
        """
        any_item = False
        try:
            with self.open() as file:
                for item in ijson.items(_Lenient(file), f"{name}.item", use_float=True):
                    if not isinstance(item, dict):
                        raise DataError(
                            f"{self.uri} is not COCO JSON: {name} holds what is no object", fix=FIX
                        )
                    any_item = True
                    yield item
            if not any_item:
                self._check_lists()
        except _OtherEncoding as error:
            raise DataError(
                f"{self.uri} is {error}, which JSON is not",
                fix="save it as UTF-8 (PowerShell: -Encoding utf8)",
            ) from None
        except (ijson.JSONError, ValueError, RecursionError) as error:  # of a number without end, or brackets
            # The parser's message goes on with an excerpt of the text over several lines.
            raise DataError(f"{self.uri} is not JSON: {first_line(error)}", fix=FIX) from None

    def _check_lists(self) -> None:
        """Raise DataError if one of the lists is missing, or there are no images."""
        lists, keys = set(), {"a list"}
        with self.open() as file:
            for path, event, value in ijson.parse(_Lenient(file)):
                if event == "start_array" and path in _LISTS:
                    lists.add(path)
                elif not path and event == "map_key":
                    keys = (keys - {"a list"}) | {value}
        form = next((form for key, form in _OTHERS.items() if key in keys), "")
        for name in _LISTS:
            if name not in lists:
                raise DataError(f"{self.uri} is not COCO JSON: it has no list {name!r}{form}", fix=FIX)


class _OtherEncoding(Exception):
    """The file is in another encoding than UTF-8; the message says in which."""


def _other_encoding(data: bytes) -> str:
    """Name the encoding that a file begins in, if it is not UTF-8."""
    if data.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff")):
        return "UTF-32"
    return "UTF-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in data[:2] else ""


class _Lenient:
    """A reader that replaces NaN and Infinity, which Python writes but JSON does not know, by null.

    Raises ijson.JSONError where it is nested far too deep. Brackets in texts count as well, which
    does not matter as long as nearly all come in pairs.
    """

    def __init__(self, file: BufferedIOBase) -> None:
        self._file = file
        self._rest = b""
        self._begun = False
        self._depth = 0

    def read(self, size: int) -> bytes:
        """Return the next bytes, possibly more than `size`; the parser tests their type by `read(0)`."""
        while size:
            block = self._file.read(_BLOCK)
            if not self._begun:
                encoding = _other_encoding(block)
                if encoding:
                    raise _OtherEncoding(encoding)
                block, self._begun = block.removeprefix(b"\xef\xbb\xbf"), True
            data = self._rest + block
            # Cut where no token is split.
            end = max(map(data.rfind, (b",", b"]", b"}"))) + 1 if block else len(data)
            data, self._rest = data[:end], data[end:]
            if data or not block:
                self._check_depth(data)
                return _NO_NUMBER.sub(b"null", data) if b"NaN" in data or b"Infinity" in data else data
        return b""

    def _check_depth(self, data: bytes) -> None:
        steps = np.frombuffer(data.translate(_STEPS, _NO_BRACKETS), np.int8)
        depths = np.cumsum(steps, dtype=np.int64)
        if len(depths):
            if self._depth + int(depths.max()) > _DEEPEST:
                raise ijson.JSONError("it is nested too deep")
            self._depth += int(depths[-1])


_PROBES = 20


class CocoImages:
    """The images of one file, each once, and which of them an id means."""

    def __init__(self, file: CocoFile, problems: Problems) -> None:
        """Read them; an image that is listed twice is taken once.

        Args:
            file: the COCO JSON.
            problems: grows.

        Raises:
            DataError: the file is no COCO JSON, lists no images, or one has no name that can be used.
        """
        self._lines = TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 (lives as long as this does)
        ids, names = array("q"), array("q")
        for image in file.items("images"):
            fields = _fields(image, file)
            ids.append(number(fields[-1]))
            names.append(hash(fields[0]))
            self._lines.write(json.dumps(fields) + "\n")
        if not ids:
            raise DataError(
                f"{file.uri} lists no images",
                fix="add them; or, if it is not the training split, remove it: where there is no val a part "
                "of train is held out",
            )
        _, first, name_index = np.unique(np.array(names, np.int64), return_index=True, return_inverse=True)
        owner = first[name_index]
        """The first image of the same name, for each listed one."""
        self._is_first = owner == np.arange(len(owner))
        self.count = int(self._is_first.sum())
        """Images, each counted once."""
        place = np.cumsum(self._is_first) - 1
        order = np.argsort(np.array(ids, np.int64), kind="stable")
        self._ids = np.array(ids, np.int64)[order]
        self._places = place[owner[order]].astype(np.int32)
        # With two images of the same id it is unknown which one its boxes belong to.
        pair = np.flatnonzero((self._ids[1:] == self._ids[:-1]) & (self._places[1:] != self._places[:-1]))
        self._clashing = np.zeros(self.count, bool)
        self._clashing[self._places[np.concatenate([pair, pair + 1])]] = True
        for name in self._names(~self._is_first):
            problems.add(reasons.IMAGE_LISTED_TWICE, name)

    def places(self, ids: list[Any]) -> np.ndarray:
        """Return which image each id means, counted from 0 in the file's order; -1 for none."""
        numbers = np.array([number(one) if isinstance(one, int | str) else 0 for one in ids], np.int64)
        at = np.minimum(np.searchsorted(self._ids, numbers), len(self._ids) - 1)
        is_listed = (self._ids[at] == numbers) & np.array([isinstance(one, int | str) for one in ids], bool)
        return np.where(is_listed, self._places[at], -1)

    def id_of_other_type(self, original_id: Any) -> int | str | None:
        """Return the id of an image that is the same but for its type, 7 for "7" and 7.0; None if none is."""
        number_of_it = original_id if isinstance(original_id, int) else integer_like(original_id)
        for other in (number_of_it, None if number_of_it is None else str(number_of_it)):
            if other is not None and self.places([other])[0] >= 0:
                return other
        return None

    def entries(self) -> Iterator[list[Entry]]:
        """Yield the images in the file's order, ROWS at a time; `origin` is the `coco_url`."""
        batch: list[Entry] = []
        for place, line in enumerate(self._chosen(self._is_first)):
            name, url, width, height, original_id = json.loads(line)
            entry = Entry(name, url, width, height, [], original_id)
            if self._clashing[place]:
                entry.fault = (reasons.IMAGE_ID_TWICE, f"id {original_id}")
            batch.append(entry)
            if len(batch) == ROWS:
                yield batch
                batch = []
        if batch:
            yield batch

    def probes(self) -> list[Entry]:
        """Return a few images from all over the file."""
        step = max(1, self.count // _PROBES)
        probes = []
        for number_of_batch, batch in enumerate(self.entries()):
            begin = -(number_of_batch * ROWS) % step
            probes += batch[begin::step]
        return probes[:_PROBES]

    def _names(self, mask: np.ndarray) -> Iterator[str]:
        yield from (json.loads(line)[0] for line in self._chosen(mask))

    def _chosen(self, mask: np.ndarray) -> Iterator[str]:
        """Yield the lines of some of the listed images."""
        if mask.any():
            self._lines.seek(0)
            yield from (line for chosen, line in zip(mask.tolist(), self._lines, strict=True) if chosen)


def number(original_id: int | str) -> int:
    """Return a number of 64 bits that stands for an id, which is an integer or a text."""
    is_number = isinstance(original_id, int) and -(2**63) <= original_id < 2**63
    return int(original_id) if is_number else hash(str(original_id))


def integer_like(value: Any) -> int | None:
    """Return the integer that a text ("7") or a number with a decimal point (7.0) stands for, or None."""
    if isinstance(value, str):
        return int(value) if re.fullmatch(r"-?[0-9]{1,18}", value.strip()) else None
    return int(value) if isinstance(value, float) and value.is_integer() else None


def positive(value: Any) -> float:
    """Return a positive finite number as it is, and 0 for anything else."""
    usable = isinstance(value, int | float) and 0 < value < 1e12
    return float(value) if usable else 0.0


def _side(value: Any) -> int:
    """Return a side in pixels; 0, as where none is told, for what no image can have."""
    side = int(positive(value))
    return side if side < 2**31 else 0


def _fields(image: dict[str, Any], file: CocoFile) -> tuple[str, str, int, int, int | str]:
    """Return name, URL, width, height and id of an image."""
    uri = file.uri
    original_id, url = image.get("id"), str(image.get("coco_url") or "")
    name = image.get("file_name") or PurePosixPath(url.partition("?")[0]).name
    if isinstance(original_id, float):
        raise DataError(
            f"{uri}: the id of image {str(name)[:80]!r} is {original_id}, with a decimal point",
            fix="write the ids of images, and image_id and category_id of annotations, as integers",
        )
    if not isinstance(original_id, int | str) or not isinstance(name, str) or not name:
        raise DataError(
            f"{uri}: image {json.dumps(image)[:80]} lacks an id or a file_name", fix="give it both"
        )
    size = _side(image.get("width")), _side(image.get("height"))
    url = url if is_fetched(url) else ""
    if is_fetched(name):  # As Label Studio has it where it reads from a bucket.
        return _relative(name.partition("://")[2].partition("?")[0], uri), name, *size, original_id
    absolute = "" if file.confined else _absolute(name, uri)
    return _relative(absolute or name, uri), f"/{absolute}" if absolute else url, *size, original_id


def is_fetched(text: str) -> bool:
    """Tell whether an image can be fetched by this; other schemes and paths are not followed."""
    return storage.scheme(text) in (*storage.WEB, *storage.OBJECT_STORES)


def _absolute(name: str, uri: str) -> str:
    """Return an absolute file_name without its first slash, if it is that of an image on this machine.

    So is one that leads out of the folder of the annotation file.
    """
    if not name.startswith("/") and ".." not in name.split("/"):
        return ""
    path = os.path.normpath(os.path.join(storage.parent(uri), name))
    usable = path.startswith("/") and path.lower().endswith(IMAGE_SUFFIXES)
    return path.lstrip("/") if usable and os.path.isfile(path) else ""


def _relative(name: str, uri: str) -> str:
    """Return a file_name with forward slashes; refuse one that leads out of the folder."""
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or not path.name or "\0" in name or ":" in path.parts[0]:
        raise DataError(
            f"{uri}: refused file_name {name!r}, which leads out of the images' folder"
            + (" and is no image on this machine" if path.is_absolute() else ""),
            fix="make file_name relative to the folder of the images",
        )
    return str(path)
