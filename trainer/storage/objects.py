"""Files on servers: read, written, listed and deleted.

Large files are read in pieces, several at a time and all of one version. The content is compared with the
sha256 that the caller knows, or with the attribute `sha256` of our objects. If it differs it is read again.
"""

import hashlib
import io
import mimetypes
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import IO, Any
from xml.etree.ElementTree import ParseError

import obstore
from minio.error import MinioException
from obstore.exceptions import AlreadyExistsError, GenericError
from urllib3.exceptions import HTTPError

from trainer.base import traffic
from trainer.base.daemon_threads import DaemonThreadPool, in_background, result_of
from trainer.base.errors import Interrupted, MissingError, StorageError
from trainer.storage import environment, failures, web
from trainer.storage.location import Location, locate, translated
from trainer.storage.uris import CLOUDS, WEB, FileState, scheme

PIECE = 4 * 1024 * 1024
"""Bytes of one read request: large enough to hide 20 ms of latency, small enough to repeat."""

THREADS = 16  # pieces of one file that are read at the same time
AHEAD = 8  # pieces that a file that is read step by step fetches ahead
PART = 8 * 1024 * 1024  # bytes of one write request; more if an object would have too many parts
_MOST_PARTS = 10_000
_SENDERS = 6
_TRIES = 4
_ABORT_SECONDS = 5.0  # how long an interrupted upload may take to remove its parts, which no listing shows
_BLOCK = 1024 * 1024


class _File:
    """A file whose first piece has been asked for, which also gives its size."""

    def __init__(self, uri: str) -> None:
        self.uri, self._get = uri, web.part if scheme(uri) in WEB else _part
        self.has_parts, self.size, self.sha256, self._etag, self._via = True, -1, "", "", ""
        self._unread: web.Part | None = None
        try:
            start = self._get(uri, 0, PIECE)
        except (failures.NoRanges, failures.PastEnd):  # An empty file has no ranges.
            self.has_parts = False
        else:
            self.size, self.sha256, self._etag, self._via = start.size, start.sha256, start.etag, start.uri
            self._unread = start

    def piece(self, start: int, stop: int) -> Any:
        """Return the bytes from `start` to `stop`, of the same version."""
        data: Any = b""
        while len(data) < stop - start:  # A proxy may truncate an answer.
            begin, part = start + len(data), None
            if begin == 0:
                part, self._unread = self._unread, None
            try:
                part = part or self._get(self.uri, begin, stop, self._etag, self._via)
            except (MissingError, failures.NoRanges):
                raise failures.changed(self.uri) from None
            received = part.body()
            if (part.size, part.etag) != (self.size, self._etag) or not len(received):
                raise failures.changed(self.uri)
            data = bytes(data) + bytes(received) if data else received
        return data

    def pieces(self, start: int, stop: int, at_first: int = THREADS, ahead: int = THREADS) -> Iterator[Any]:
        """Yield bytes in pieces; `ahead` of them are fetched ahead, `at_first` while the first is read."""
        fetched: deque[Future[Any]] = deque()
        begin, most = start, at_first
        with DaemonThreadPool(min(ahead, 1 + (stop - start) // PIECE), "read") as threads:
            while fetched or begin < stop:
                while begin < stop and len(fetched) <= most:
                    fetched.append(threads.submit(self.piece, begin, min(begin + PIECE, stop)))
                    begin += PIECE
                yield result_of(fetched.popleft())
                most = ahead

    def blocks(self, sha256: str = "", ahead: int = THREADS) -> Iterator[Any]:
        """Yield the content in buffers, in order, and check its hash before the last one."""
        known, blocks = self.sha256, self.pieces(0, self.size, ahead, ahead)
        if not self.has_parts:
            known, blocks = _stream(self.uri)
        expected, digest, received = sha256 or known, hashlib.sha256(), 0
        for block in blocks:
            if expected:
                digest.update(block)
                received += len(block)
                if received == self.size:
                    _compare(self.uri, digest.hexdigest(), expected)
            yield block
        if expected and not 0 < received == self.size:  # It was a stream, or has no blocks.
            _compare(self.uri, digest.hexdigest(), expected)


def _part(uri: str, start: int, stop: int, etag: str = "", via: str = "") -> web.Part:
    """Ask for a part of an object; see `web.part`."""
    location, key = locate(uri)
    if not location.gives_ranges:
        raise failures.NoRanges(uri)
    options: dict[str, Any] = {"range": (start, stop)}
    if etag and not etag.startswith("W/"):  # A weak ETag cannot be used with ranges.
        options["if_match"] = etag
    with translated(location, uri, "read"):
        answer = obstore.get(location.reader, key, options=options)  # type: ignore[arg-type]

    def body() -> Any:
        with translated(location, uri, "read"):
            data = answer.bytes()
        traffic.read(len(data))
        return data

    meta = answer.meta
    return web.Part(uri, meta["size"], meta["e_tag"] or "", str(answer.attributes.get("sha256", "")), body)


def _stream(uri: str) -> tuple[str, Iterator[Any]]:
    """Return the hash that an object carries, and all bytes of a file as they arrive."""
    if scheme(uri) in WEB:
        return "", web.stream(uri)
    location, key = locate(uri)
    with translated(location, uri, "read"):
        answer = obstore.get(location.writer, key)

    def blocks() -> Iterator[Any]:
        with translated(location, uri, "read"):
            for block in answer.stream(min_chunk_size=_BLOCK):
                traffic.read(len(block))
                yield block

    return str(answer.attributes.get("sha256", "")), blocks()


def _compare(uri: str, digest: str, expected: str) -> None:
    """Raise `Corrupt` if a hash differs."""
    if digest != expected:
        fix = "it was read again and still differs: run the command that writes it again"
        raise failures.Corrupt(f"{uri} is damaged: its sha256 is {digest}, not {expected}", fix=fix)


@web.retried
def read_buffer(uri: str, sha256: str = "") -> Any:
    """Return a file's content as a buffer; its hash must be `sha256` unless that is ""."""
    file = _File(uri)
    if not file.has_parts or file.size > PIECE:
        return b"".join(file.blocks(sha256))
    data = file.piece(0, file.size)
    if expected := sha256 or file.sha256:
        _compare(uri, hashlib.sha256(data).hexdigest(), expected)
    return data


@web.retried
def read_range(uri: str, start: int, length: int) -> bytes:
    """Return `length` bytes from `start` on, or as many as there are."""
    if length <= PIECE:
        try:
            get = web.part if scheme(uri) in WEB else _part
            return bytes(get(uri, start, start + length).body())
        except failures.PastEnd:
            return b""
        except failures.NoRanges:
            pass
    file = _File(uri)
    if not file.has_parts:
        return b"".join(file.blocks())[start : start + length]
    return b"".join(file.pieces(start, min(start + length, file.size)))


@web.retried
def copy(uri: str, path: Path, sha256: str = "") -> None:
    """Write a file's content to a local path; its hash must be `sha256` unless that is ""."""
    with path.open("wb") as file:
        file.writelines(_File(uri).blocks(sha256))


def open_reader(uri: str) -> IO[bytes]:
    """Return a seekable binary file; if a server gives files only whole, it is copied to disk."""
    file = in_background(partial(_File, uri))
    if file.has_parts and file.size <= PIECE:
        return io.BytesIO(read_buffer(uri))
    if file.has_parts:
        return io.BufferedReader(_Reader(file), 128 * 1024)
    with tempfile.NamedTemporaryFile(prefix="kubedet-") as copied:
        copy(uri, Path(copied.name))
        return open(copied.name, "rb")


class _Reader(io.RawIOBase):
    """A file for one thread. If it is read in order, its hash is checked before its last bytes."""

    def __init__(self, file: _File) -> None:
        super().__init__()
        self._file = file
        self._blocks: Any = file.blocks(ahead=AHEAD)
        self._block: Any = b""
        self._begin = -PIECE  # of the current block
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        if base + offset < 0:
            raise ValueError(f"negative position {base + offset}")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        if self._position >= self._file.size:
            return 0
        start = self._position % PIECE
        begin = self._position - start
        if begin != self._begin:
            if begin != self._begin + PIECE:  # Fetch more only when reading goes on from here.
                self._blocks = self._file.pieces(begin, self._file.size, 0, AHEAD)
                if begin == 0:
                    self._blocks = self._file.blocks(ahead=AHEAD)
            self._block, self._begin = b"", -2 * PIECE  # If the next line fails, the block is fetched again.
            self._block, self._begin = next(self._blocks), begin
        view = memoryview(buffer).cast("B")
        data = memoryview(self._block)[start : start + len(view)]
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        self._blocks.close()
        super().close()


@web.retried
def state(uri: str) -> FileState | None:
    """Return a file's size, time and ETag as the server reports them, or None if it is missing."""
    if scheme(uri) in WEB:
        return web.state(uri)
    location, key = locate(uri)
    with suppress(MissingError), translated(location, uri, "read"):
        try:
            return _file_state(obstore.head(location.reader, key))
        except Exception as error:
            if failures.status_of(error) in (301, 307, 400, 403):
                obstore.get(location.reader, key)  # The answer to a HEAD has no reason.
            raise
    return None


def scan(uri: str, recursive: bool) -> Iterator[tuple[str, FileState]]:
    """Yield the objects under a prefix by relative name, page by page."""
    location, prefix = locate(uri, folder=True)
    skip, empty = len(prefix) + 1 if prefix else 0, True
    for meta in _list(location, prefix, uri, recursive):
        empty = False
        name = meta["path"][skip:]
        if name:  # Otherwise it is a console's marker of the folder itself.
            yield name, _file_state(meta)
    if not empty or scheme(uri) in CLOUDS:
        return
    try:  # obstore takes an answer from something that is no store, such as a web page, for an empty listing.
        client = environment.settings(scheme(uri)).client
        next(iter(client.list_objects(uri.split("/")[2], prefix=prefix)), None)
    except (MinioException, ParseError, ValueError) as error:
        fix = "check that the endpoint is one of S3, not a console or a proxy's page"
        raise StorageError(f"cannot list {uri}: this is no answer of an object store", fix=fix) from error
    except HTTPError:
        pass  # obstore had an answer.


def _list(location: Location, prefix: str, uri: str, recursive: bool) -> Iterator[Any]:
    with translated(location, uri, "list"):
        if not recursive:
            listing = in_background(lambda: obstore.list_with_delimiter(location.reader, prefix or None))
            yield from listing["objects"]
            return
        last, tries = None, 1
        while tries:
            pages = obstore.list(location.reader, prefix or None, offset=last, chunk_size=1000)
            try:
                while metas := in_background(partial(next, pages, None)):
                    yield from metas
                    last, tries = metas[-1]["path"], 1
                tries = 0
            except GenericError:  # obstore does not retry a page that is cut off.
                tries += 1
                if tries > _TRIES:
                    raise


def _file_state(meta: "obstore.ObjectMeta") -> FileState:
    modified = meta["last_modified"]
    assert isinstance(modified, datetime)
    # obstore returns the beginning of 1970 if a server does not report a time.
    return FileState(meta["size"], modified.timestamp() or None, (meta["e_tag"] or "").strip('"'))


@web.retried
def delete(uri: str) -> None:
    """Delete an object, if it exists."""
    location, key = locate(uri)
    with suppress(MissingError), translated(location, uri, "delete"):
        obstore.delete(location.reader, key)


def write(
    uri: str, source: IO[bytes], *, sha256: str = "", confirm: bool = False, create: bool = False
) -> bool:
    """Write an object with its sha256 as an attribute; the store checks each request's hash.

    `confirm` reads it back, and writes it again if it differs. `create` writes it only if there is none.
    Returns whether it was written.
    """
    location, key = locate(uri)
    if create and state(uri) is not None:
        return False
    sha256 = sha256 or hashlib.file_digest(source, "sha256").hexdigest()  # type: ignore[arg-type]
    size = source.seek(0, io.SEEK_END)
    kind = mimetypes.guess_type(key)[0] or "application/octet-stream"  # For browsers.
    interrupted, ended = threading.Event(), threading.Event()

    def is_there() -> bool:
        with suppress(FileNotFoundError):
            answer = obstore.get(location.writer, key)
            return (answer.meta["size"], str(answer.attributes.get("sha256", ""))) == (size, sha256)
        return False

    def parts(length: int) -> Iterator[bytes]:
        while block := source.read(length):
            if interrupted.is_set():
                raise Interrupted(f"{uri} is not written any more")
            traffic.written(len(block))
            yield block

    def send() -> bool:
        put = partial(obstore.put, location.writer, key, attributes={"Content-Type": kind, "sha256": sha256})
        source.seek(0)
        try:
            if size <= 2 * PART:
                traffic.written(size)
                put(source.read(), mode="create" if create else "overwrite", use_multipart=False)
            else:
                length = max(PART, -(-size // _MOST_PARTS))
                put(parts(length), chunk_size=length, max_concurrency=_SENDERS)
        except Exception as error:
            if create and isinstance(error, AlreadyExistsError):
                return is_there()  # Another process was first, or the answer to our first try was lost.
            # The answer to the last request of an upload may have been lost.
            if "NoSuchUpload" not in str(error) or not is_there():
                raise
        return True

    @web.retried
    def attempt() -> bool:
        ended.clear()
        try:
            with translated(location, uri, "write"):
                written = send()
        finally:
            ended.set()
        if confirm:  # Stores have lost or altered what they acknowledged.
            try:
                for _ in _File(uri).blocks(sha256):
                    pass
            except (MissingError, failures.Corrupt) as error:
                raise failures.Transient(
                    f"{uri} was written, and the store acknowledged it, but it is lost or altered",
                    fix="look at the store's log and disks, and run again: it is written again",
                ) from error
        return written

    try:
        return attempt()
    except BaseException:
        # The upload may go on in another thread: it removes its parts when its source fails.
        interrupted.set()
        ended.wait(_ABORT_SECONDS)
        raise
