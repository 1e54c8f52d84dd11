"""The bytes of files on servers: whole, in part, to a local file, or as a file that is read anywhere.

They are compared with their hash, where one is known: ours, which goes with each object as its attribute
`sha256`, or an ETag of S3 that is an MD5. Large files are read in pieces side by side, all of one version;
where a server gives a file only whole, from start to end.
"""

import hashlib
import io
import re
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple

import obstore
from urllib3.exceptions import HTTPError

from trainer.storage import attempts, environment, failures, web
from trainer.storage.parallel import Workers
from trainer.storage.store import Place, locate, split
from trainer.storage.uris import WEB, scheme

PIECE = 4 * 1024 * 1024
"""Bytes of one request: large enough that 20 ms of waiting do not matter, small enough to repeat."""

THREADS = 16
"""Pieces of one file under way at a time."""

_BLOCK = 1024 * 1024
_BUFFER = 128 * 1024
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
            content, data = _begin(place)
            if data is None:
                return b"".join(_checked(place, content, sha256, pieces(place, content, 0, content.size)))
        except failures.Whole:
            file = io.BytesIO()
            _copy_whole(uri, file, sha256)
            return file.getvalue()
        return next(_checked(place, content, sha256, [data]))

    return attempts.repeated(read)


def read_range(uri: str, start: int, length: int) -> bytes:
    """Return `length` bytes from `start` on, or as many as there are."""
    place = locate(uri)

    def read() -> bytes:
        try:
            if length > PIECE:
                return b"".join(pieces(place, _begin(place)[0], start, start + length))
            return bytes(_piece(place, None, start, start + length))
        except failures.Whole:
            return read_bytes(uri)[start : start + length]

    return attempts.repeated(read)


def copy(uri: str, path: Path, sha256: str = "") -> None:
    """Write a file's content to a local path; its hash must be `sha256` where it is not ""."""
    place = locate(uri)

    def read() -> None:
        with path.open("wb", buffering=0) as file:
            try:
                content, data = _begin(place)
                blocks = pieces(place, content, 0, content.size) if data is None else [data]
                for block in _checked(place, content, sha256, blocks):
                    _write(file, block)
            except failures.Whole:
                _copy_whole(uri, file, sha256)

    attempts.repeated(read)


def open_reader(uri: str, ahead: int) -> IO[bytes]:
    """Return a seekable binary file that holds at most `ahead` + 2 pieces in memory.

    Where a server gives files only whole it is copied to disk.

    Raises:
        StorageError: it is missing or cannot be read; later too, from any of its methods.
    """
    place = locate(uri)
    try:
        content, data = _begin(place)
        if data is not None:
            next(_checked(place, content, "", [data]))
            return io.BytesIO(data)
        return io.BufferedReader(_Reader(place, content, ahead), _BUFFER)
    except failures.Whole:
        pass
    file = tempfile.TemporaryFile(prefix="kubedet-", buffering=0)  # noqa: SIM115 (the caller closes it)
    try:
        _copy_whole(uri, file, "")
    except BaseException:
        file.close()
        raise
    file.seek(0)
    return io.BufferedReader(file, _BUFFER)


def pieces(place: Place, content: Content, start: int, stop: int) -> Iterator[Any]:
    """Yield a part of a file as buffers in order, while the next ones are fetched.

    Raises:
        Changed: it is another version now.
        Whole: the server gives no parts.
        StorageError: anything else.
    """
    stop = min(stop, content.size)
    workers, under_way = Workers(THREADS, "read"), deque[Any]()
    begins = iter(range(start, stop, PIECE))
    try:
        while True:
            while len(under_way) <= THREADS and (begin := next(begins, None)) is not None:
                under_way.append(workers.submit(_piece, place, content, begin, min(begin + PIECE, stop)))
            if not under_way:
                return
            yield workers.result(under_way.popleft())
    finally:
        workers.close()


def _begin(place: Place) -> tuple[Content, bytes | None]:
    """Ask for a file; returns what is known of it, and its bytes where they are no more than a piece."""

    def ask() -> tuple[Content, bytes | None]:
        answer = place.get()
        content = _content(answer)
        return content, bytes(answer.bytes()) if content.size <= PIECE else None

    if place.server in _unsized:
        raise failures.whole(place.uri)
    try:
        return place.call("read", ask)
    except failures.Whole:
        _unsized.add(place.server)
        raise


def _content(answer: "obstore.GetResult") -> Content:
    sha256 = answer.attributes.get("sha256", "")
    meta = answer.meta
    return Content(meta["size"], meta["e_tag"] or "", sha256 if _SHA256.fullmatch(sha256) else "")


def _piece(place: Place, content: Content | None, start: int, stop: int) -> Any:
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
        return bytes(data) + bytes(_piece(place, content, start + len(data), stop))
    return data


def _copy_whole(uri: str, file: BinaryIO | IO[bytes], sha256: str) -> None:
    """Write what a server gives only whole to a file that is empty."""
    place = locate(uri, "stream")

    def read() -> _Check:
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
        check = _Check(place, content, sha256)
        for block in blocks:
            check.update(block)
            _write(file, block)
        return check

    check = place.call("read", read)
    check.compare()


def _checked(place: Place, content: Content, sha256: str, blocks: Iterable[Any]) -> Iterator[Any]:
    """Pass the blocks of a whole file on; raise `Damaged` before the last one if they are not its content."""
    check, last = _Check(place, content, sha256), b""
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

_unhashed: set[str] = set()
"""Servers' folders whose ETags look like an MD5 and are none: those of a store that encrypts with keys."""


class _Check:
    """The hash of a file, while its bytes arrive in order."""

    def __init__(self, place: Place, content: Content, sha256: str) -> None:
        self._place = place
        self._name, self._expected = "sha256", sha256 or content.sha256
        self._folder = place.uri.rpartition("/")[0]
        etag = _MD5.fullmatch(content.etag)
        if not self._expected and etag and self._folder not in _unhashed:
            self._name, self._expected = "md5", etag[1]
        self._hash = hashlib.new(self._name, usedforsecurity=False) if self._expected else None

    def update(self, data: Any) -> None:
        """Count bytes in."""
        if self._hash is not None:
            self._hash.update(data)

    def compare(self) -> None:
        """Raise `Damaged` if the content is another one."""
        if self._hash is None or self._hash.hexdigest() == self._expected:
            return
        if self._name == "md5" and not _is_hash(self._place):
            _unhashed.add(self._folder)
            return
        raise failures.Damaged(
            f"{self._place.uri} is damaged: its {self._name} is {self._hash.hexdigest()}, "
            f"not {self._expected}",
            fix="it was read again and differs still: delete it and have it written again",
        )


def _is_hash(place: Place) -> bool:
    """Tell whether a file's ETag, which looks like an MD5, is one: of a store of S3 that encrypts nothing.

    (https://docs.aws.amazon.com/AmazonS3/latest/API/API_Object.html; Google's stores tell it besides.)
    """
    try:
        if scheme(place.uri) in WEB:
            headers = web.head(place.uri)
        else:
            bucket, key = split(place.uri)
            headers = environment.client(scheme(place.uri)).stat_object(bucket, key).metadata or {}
    except (HTTPError, ValueError):
        return True
    encrypted = headers.get("x-amz-server-side-encryption", "AES256") != "AES256" or any(
        headers.get(name) for name in _KEYS
    )
    google = bool(_GOOGLE.search(headers.get("x-goog-hash", ""))) and not headers.get("content-encoding")
    return google or (bool(headers.get("x-amz-request-id")) and not encrypted)


class _Reader(io.RawIOBase):
    """What `open_reader` returns, without a buffer. One thread at a time.

    Read from the start to the end in order, the hash is checked, where one is known, before the last bytes
    are given.
    """

    def __init__(self, place: Place, content: Content, ahead: int) -> None:
        super().__init__()
        self._content, self._ahead = content, max(1, ahead)
        self._workers = Workers(self._ahead, "read")
        self._piece = partial(_piece, place, content)
        self._pieces: dict[int, Any] = {}
        self._check = _Check(place, content, "")
        self._place = self._hashed = 0
        self._last = -1
        # Whether there are parts to be had shows with the first.
        self._pieces[0] = self._workers.submit(self._piece, 0, min(PIECE, content.size))
        self._workers.result(self._pieces[0])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._content.size}[whence]
        if base + offset < 0:
            raise ValueError(f"negative place {base + offset}")
        self._place = base + offset
        return self._place

    def readinto(self, buffer: Any) -> int:
        if self._place >= self._content.size:
            return 0
        number, start = divmod(self._place, PIECE)
        view = memoryview(buffer).cast("B")
        data = memoryview(self._get(number))[start : start + len(view)]
        view[: len(data)] = data
        self._place += len(data)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._workers.close()
            self._pieces.clear()
        super().close()

    def _get(self, number: int) -> Any:
        """Return a piece; when the pieces are read one after the other, let the next ones come."""
        if number != self._last:
            ahead = self._ahead if number == self._last + 1 else 0
            most = (self._content.size - 1) // PIECE
            for one in range(number, min(number + ahead, most) + 1):
                if one not in self._pieces:
                    end = min((one + 1) * PIECE, self._content.size)
                    self._pieces[one] = self._workers.submit(self._piece, one * PIECE, end)
            self._last = number
            self._forget()
        data = self._workers.result(self._pieces[number])
        if number == self._hashed:
            self._check.update(data)
            self._hashed += 1
            if self._hashed * PIECE >= self._content.size:
                self._check.compare()
        return data

    def _forget(self) -> None:
        """Drop what is least likely to be read: what lies behind, then what lies far ahead."""

        def distance(number: int) -> int:
            return number - self._last if number >= self._last else self._last - number + self._ahead

        for number in sorted(self._pieces, key=distance)[self._ahead + 2 :]:
            self._pieces.pop(number).cancel()
