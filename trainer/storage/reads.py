"""The bytes of files on servers: whole, in part, to a local file, or as a file that is read anywhere.

They are compared with their hash, where one is known: ours, which goes with each object as its attribute
`sha256`, or an ETag of S3 that is an MD5. Large files are read in pieces side by side, all of one version;
where a server gives a file only whole, from start to end.
"""

import hashlib
import io
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple

import obstore
from urllib3.exceptions import HTTPError

from trainer.storage import attempts, environment, failures, web
from trainer.storage.parallel import Workers
from trainer.storage.store import Place, locate, split
from trainer.storage.uris import CLOUDS, WEB, scheme

PIECE = 4 * 1024 * 1024
"""Bytes of one request: large enough that 20 ms of waiting do not matter, small enough to repeat."""

THREADS = 16
"""Pieces of one file under way at a time."""

_BLOCK = 1024 * 1024
_SHA256, _MD5 = re.compile(r"[0-9a-f]{64}"), re.compile(r'"?([0-9a-f]{32})"?')
_GOOGLE = re.compile(r"md5=[A-Za-z0-9+/]{22}==")
_KEYS = ("x-amz-server-side-encryption-customer-algorithm", "x-amz-server-side-encryption-aws-kms-key-id")


class Content(NamedTuple):
    """What an answer tells of a file's content."""

    size: int
    """Bytes."""
    etag: str
    sha256: str
    """"" where the store does not know it."""


def read_bytes(uri: str, sha256: str = "") -> bytes:
    """Return a file's content, whose hash must be `sha256` where it is not ""."""
    place = locate(uri)

    def read() -> bytes:
        try:
            content, first = begin(place)
            if content.size > PIECE:
                blocks = pieces(place, content, 0, content.size, first)
                return b"".join(checked(place, content, sha256, blocks))
        except failures.Whole:
            file = io.BytesIO()
            copy_whole(uri, file, sha256)
            return file.getvalue()
        check, data = Check(place.uri, content, sha256), first()
        check.update(data)
        check.compare()
        return bytes(data)

    return attempts.repeated(read)


def read_range(uri: str, start: int, length: int) -> bytes:
    """Return `length` bytes from `start` on, or as many as there are."""
    place = locate(uri)

    def read() -> bytes:
        try:
            if length > PIECE:
                return b"".join(pieces(place, begin(place)[0], start, start + length))
            return bytes(piece(place, None, start, start + length))
        except failures.Whole:
            return read_bytes(uri)[start : start + length]

    return attempts.repeated(read)


def copy(uri: str, path: Path, sha256: str = "") -> None:
    """Write a file's content to a local path; its hash must be `sha256` where it is not ""."""
    place = locate(uri)

    def read() -> None:
        with path.open("wb", buffering=0) as file:
            try:
                content, first = begin(place)
                large = content.size > PIECE
                blocks = pieces(place, content, 0, content.size, first) if large else iter([first()])
                for block in checked(place, content, sha256, blocks):
                    _write(file, block)
            except failures.Whole:
                copy_whole(uri, file, sha256)

    attempts.repeated(read)


def pieces(
    place: Place, content: Content, start: int, stop: int, first: Callable[[], Any] | None = None
) -> Iterator[Any]:
    """Yield a part of a file as buffers in order, while the next ones are fetched.

    Args:
        place: where the file is.
        content: the version that was begun with.
        start: the first byte.
        stop: the one after the last.
        first: reads the first piece, where its answer has begun already.

    Raises:
        Changed: it is another version now.
        Whole: the server gives no parts.
        StorageError: anything else.
    """
    stop = min(stop, content.size)
    workers, under_way = Workers(THREADS, "read"), deque[Any]()
    begins = iter(range(start, stop, PIECE))
    try:
        if first and next(begins, None) is not None:
            under_way.append(workers.submit(first))
        while True:
            while len(under_way) <= THREADS and (begin := next(begins, None)) is not None:
                under_way.append(workers.submit(piece, place, content, begin, min(begin + PIECE, stop)))
            if not under_way:
                return
            yield workers.result(under_way.popleft())
    finally:
        workers.close()


def begin(place: Place) -> tuple[Content, Callable[[], Any]]:
    """Ask for a file; returns what is known of it, and what reads the first of its bytes, at most a piece.

    Those of a small file are here already; of a large one they are on their way, so that the other pieces
    can be asked for meanwhile. A store is asked for a piece: of all, most of a large object would be sent to
    be thrown away. In the web, where servers that give no parts are common, all is asked for.
    """

    def ask() -> tuple[Content, Callable[[], Any]]:
        parted = scheme(place.uri) not in WEB and place.server not in _unparted
        answer = _first_piece(place) if parted else place.get()
        content = _content(answer)
        if content.size <= PIECE:
            data = answer.bytes()
            return content, lambda: data
        if parted:
            return content, partial(_first_bytes, place, content, answer)
        if place.server in _unparted:
            raise failures.whole(place.uri)
        return content, partial(piece, place, content, 0, PIECE)

    if place.server in _unsized:
        raise failures.whole(place.uri)
    try:
        return place.call("read", ask)
    except failures.Whole:
        if scheme(place.uri) in WEB:
            _unsized.add(place.server)
        elif place.server not in _unparted:
            _unparted.add(place.server)
            return begin(place)
        raise


def _first_piece(place: Place) -> "obstore.GetResult":
    try:
        return place.get(range=(0, PIECE))
    except Exception as error:
        if failures.status(error) != 416:
            raise
    return place.get()  # of an empty file there is no part


def _first_bytes(place: Place, content: Content, answer: "obstore.GetResult") -> Any:
    """Return the first piece of a large file from an answer that has begun, or else from a new one."""
    try:
        data = answer.bytes()
    except Exception:  # It is asked for again, and that tells what is wrong.
        return piece(place, content, 0, PIECE)
    if len(data) < PIECE:  # of a proxy that cuts answers off
        return bytes(data) + bytes(piece(place, content, len(data), PIECE))
    return data


def _content(answer: "obstore.GetResult") -> Content:
    meta = answer.meta
    return Content(meta["size"], meta["e_tag"] or "", known_hash(answer.attributes.get("sha256", "")))


def known_hash(attribute: str) -> str:
    """Return the hash that goes with an object as its attribute; "" for none, and for what is no hash."""
    return attribute if _SHA256.fullmatch(attribute) else ""


def piece(place: Place, content: Content | None, start: int, stop: int) -> Any:
    """Return a part of a file as a buffer, of one version if that is known."""
    options: dict[str, Any] = {"range": (start, stop)}
    if content and content.etag and not content.etag.startswith("W/"):  # a weak mark holds for no range
        options["if_match"] = content.etag

    def read() -> tuple[Content, Any]:
        try:
            answer = place.get(**options)
        except Exception as error:
            if failures.status(error) == 416:
                return Content(-1, "", ""), b""
            raise
        return _content(answer), answer.bytes()

    try:
        now, data = place.call("read", read)
    except failures.Absent:
        if content is None:
            raise
        raise failures.changed(place.uri) from None
    if content and ((now.size, now.etag) != content[:2] or not len(data)):
        raise failures.changed(place.uri)
    if content and len(data) < stop - start:  # of a proxy that cuts answers off
        return bytes(data) + bytes(piece(place, content, start + len(data), stop))
    return data


def copy_whole(uri: str, file: BinaryIO | IO[bytes], sha256: str) -> None:
    """Write what a server gives only whole to a file that is empty."""
    place = locate(uri, "stream")

    def read() -> Check:
        file.seek(0)
        file.truncate()
        try:
            if place.server in _unsized:
                raise failures.whole(uri)
            answer = place.get()
            content = _content(answer)
            blocks: Iterator[Any] = iter(answer.stream(min_chunk_size=_BLOCK))
        except Exception as error:
            # Of what is not in the web, and of other errors, the caller knows more.
            if scheme(uri) not in WEB or not failures.is_whole(error):
                raise
            content, blocks = Content(-1, "", ""), web.blocks(uri)
        check = Check(place.uri, content, sha256)
        for block in blocks:
            check.update(block)
            _write(file, block)
        return check

    check = place.call("read", read)
    check.compare()


def checked(place: Place, content: Content, sha256: str, blocks: Iterable[Any]) -> Iterator[Any]:
    """Pass the blocks of a whole file on; raise `Damaged` before the last one if they are not its content."""
    check, last = Check(place.uri, content, sha256), b""
    for block in blocks:
        check.update(block)
        if last:
            yield last
        last = block
    check.compare()
    yield last


def _write(file: BinaryIO | IO[bytes], block: Any) -> None:
    left = memoryview(block)
    while left:
        left = left[file.write(left) :]


_unsized: set[str] = set()
"""Servers that do not tell how long their answers are."""

_unparted: set[str] = set()
"""Stores that answer with all where a part was asked for."""

_unhashed: set[str] = set()
"""Servers' folders whose ETags look like an MD5 and are none: those of a store that encrypts with keys."""


class Check:
    """The hash of a file, while its bytes arrive in order."""

    def __init__(self, uri: str, content: Content, sha256: str = "") -> None:
        self._uri = uri
        self._name, self._expected = "sha256", sha256 or content.sha256
        self._folder = uri.rpartition("/")[0]
        etag = _MD5.fullmatch(content.etag)
        if not self._expected and etag and self._folder not in _unhashed:
            self._name, self._expected = "md5", etag[1]
        self._hash = hashlib.new(self._name, usedforsecurity=False) if self._expected else None

    def update(self, data: Any) -> None:
        """Count bytes in."""
        if self._hash is not None:
            self._hash.update(data)

    def is_same(self) -> bool:
        """Tell whether the content has the hash that is known, if one is."""
        return self._hash is None or self._hash.hexdigest() == self._expected

    def compare(self) -> None:
        """Raise `Damaged` if the content is another one."""
        if self._hash is None or self.is_same():
            return
        if self._name == "md5" and not _is_hash(self._uri):
            _unhashed.add(self._folder)
            return
        raise failures.Damaged(
            f"{self._uri} is damaged: its {self._name} is {self._hash.hexdigest()}, not {self._expected}",
            fix="it was read again and differs still: delete it and have it written again",
        )


def _is_hash(uri: str) -> bool:
    """Tell whether a file's ETag, which looks like an MD5, is one: of a store of S3 that encrypts nothing.

    (https://docs.aws.amazon.com/AmazonS3/latest/API/API_Object.html; Google's stores tell it besides.)
    """
    if scheme(uri) in CLOUDS:
        return False  # Google's is none where a key of one's own encrypts, and obstore hands no headers on
    try:
        if scheme(uri) in WEB:
            headers = web.head(uri)
        else:
            bucket, key = split(uri)
            headers = environment.client(scheme(uri)).stat_object(bucket, key).metadata or {}
    except (HTTPError, ValueError):
        return True
    encrypted = headers.get("x-amz-server-side-encryption", "AES256") != "AES256" or any(
        headers.get(name) for name in _KEYS
    )
    google = bool(_GOOGLE.search(headers.get("x-goog-hash", ""))) and not headers.get("content-encoding")
    return google or (bool(headers.get("x-amz-request-id")) and not encrypted)
