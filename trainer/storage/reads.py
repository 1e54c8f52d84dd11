"""The bytes of files on servers: whole, in part, to a local file, or as a file that is read anywhere.

They are compared with their hash, where one is known (`content_hash`). Large files are read in pieces side by
side, all of one version; where a server gives a file only whole, from start to end.
"""

import io
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO

import obstore

from trainer.storage import attempts, failures, traffic, web
from trainer.storage.content_hash import Check, Content, known_hash
from trainer.storage.parallel import Workers
from trainer.storage.store import Place, locate
from trainer.storage.uris import WEB, scheme

PIECE = 4 * 1024 * 1024
"""Bytes of one request: large enough that 20 ms of waiting do not matter, small enough to repeat."""

THREADS = 16
"""Pieces of one file under way at a time."""

_BLOCK = 1024 * 1024


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


def confirm(uri: str, sha256: str) -> None:
    """Read a file for its hash alone, and compare that.

    Raises:
        Absent, Damaged: it is not there, or another one.
        StorageError: it cannot be read.
    """
    place = locate(uri)
    try:
        content, first = begin(place)
        large = content.size > PIECE
        blocks = pieces(place, content, 0, content.size, first) if large else iter([first()])
        for _ in checked(place, content, sha256, blocks):
            pass
    except failures.Whole:
        with tempfile.TemporaryFile(prefix="kubedet-", buffering=0) as file:
            copy_whole(uri, file, sha256)


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
            data = _received(answer)
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
        data = _received(answer)
    except Exception:  # It is asked for again, and that tells what is wrong.
        return piece(place, content, 0, PIECE)
    if len(data) < PIECE:  # of a proxy that cuts answers off
        return bytes(data) + bytes(piece(place, content, len(data), PIECE))
    return data


def _received(answer: "obstore.GetResult") -> Any:
    data = answer.bytes()
    traffic.read(len(data))
    return data


def _content(answer: "obstore.GetResult") -> Content:
    meta = answer.meta
    return Content(meta["size"], meta["e_tag"] or "", known_hash(answer.attributes.get("sha256", "")))


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
        return _content(answer), _received(answer)

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
            traffic.read(len(block))
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
