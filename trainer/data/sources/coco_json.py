"""Reads COCO JSON as a stream: a file may exceed the memory, and most of it is segmentations."""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from io import BufferedIOBase
from typing import Any

import ijson
import numpy as np

from trainer import storage
from trainer.base.errors import DataError, first_line

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
