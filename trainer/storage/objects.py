"""Files on servers: read, written, listed and deleted.

Large files are read in pieces, several at a time and all of one version. The content is compared with the
sha256 that the caller knows, or with the attribute `sha256` of our objects. If it differs it is read again.
"""

import hashlib
import io
import mimetypes
import random
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, TypeVar
from xml.etree.ElementTree import ParseError

import obstore
from minio.error import MinioException
from obstore.exceptions import AlreadyExistsError, GenericError
from urllib3.exceptions import HTTPError

from trainer.base import traffic
from trainer.base.daemon_threads import DaemonThreadPool, in_background, result_of
from trainer.base.errors import Interrupted, StorageError
from trainer.storage import environment, failures, web
from trainer.storage.location import Location, locate, raise_translated, translated
from trainer.storage.uris import CLOUDS, WEB, FileState, climbs, scheme

Result = TypeVar("Result")

PIECE = 4 * 1024 * 1024
"""Bytes of one read request: large enough to hide 20 ms of latency, small enough to repeat."""

THREADS = 16
"""Pieces of one file that are read at the same time."""

PART = 8 * 1024 * 1024
"""Bytes of one write request; more if an object would have too many parts."""

_MOST_PARTS = 10_000
_SENDERS = 6
_TRIES = 4
_ABORT_SECONDS = 5.0
"""How long an interrupted upload may take to remove its parts, which no listing shows."""

_BLOCK = 1024 * 1024
_NO_RANGES = ("non-partial response", "Range request not supported")
"""obstore's errors for a store that answers with the whole object if a part was asked for."""


class _File:
    """A file whose first piece has been asked for, which also gives its size."""

    def __init__(self, uri: str) -> None:
        self.uri, self._get = uri, web.part if scheme(uri) in WEB else _part
        self.has_parts, self.size, self.sha256, self._etag, self._via = True, 0, "", "", ""
        self._unread: web.Part | None = None
        try:
            start = self._get(uri, 0, PIECE)
        except (web.NoRanges, failures.PastEnd):  # An empty file has no ranges.
            self.has_parts = False
        else:
            self.size, self.sha256, self._etag, self._via = start.size, start.sha256, start.etag, start.uri
            self._unread = start

    def piece(self, start: int) -> Any:
        """Return PIECE bytes from `start` on, or up to the end, of the same version.

        Raises:
            Changed: there is another version now.
            StorageError: it cannot be read.
        """
        stop, data = min(start + PIECE, self.size), b""
        while len(data) < stop - start:  # A proxy may truncate an answer.
            begin, part = start + len(data), None
            if begin == 0:
                part, self._unread = self._unread, None
            try:
                part = part or self._get(self.uri, begin, stop, self._etag, self._via)
            except (failures.Absent, web.NoRanges):
                raise failures.changed(self.uri) from None
            received = part.body()
            if (part.size, part.etag) != (self.size, self._etag) or not len(received):
                raise failures.changed(self.uri)
            data = bytes(data) + bytes(received) if data else received
        return data

    def blocks(self, sha256: str = "") -> Iterator[Any]:
        """Yield the content in buffers, in order, and check its hash at the end."""
        known, blocks = self.sha256, self.pieces(0, self.size)
        if not self.has_parts:
            known, blocks = ("", web.stream(self.uri)) if scheme(self.uri) in WEB else _stream(self.uri)
        expected, digest = sha256 or known, hashlib.sha256()
        for block in blocks:
            if expected:
                digest.update(block)
            yield block
        if expected:
            _compare(self.uri, digest.hexdigest(), expected)

    def pieces(self, start: int, stop: int) -> Iterator[Any]:
        """Yield the pieces from `start` to `stop`, several at a time; `start` is the start of a piece."""
        fetched: deque[Future[Any]] = deque()
        with DaemonThreadPool(min(THREADS, 1 + (stop - start) // PIECE), "read") as threads:
            for begin in range(start, stop, PIECE):
                fetched.append(threads.submit(self.piece, begin))
                if len(fetched) > THREADS:
                    yield result_of(fetched.popleft())
            while fetched:
                yield result_of(fetched.popleft())


def _part(uri: str, start: int, stop: int, etag: str = "", via: str = "") -> web.Part:
    """Ask for a part of an object; see `web.part`."""
    location, key = locate(uri)
    if not location.gives_ranges:
        raise web.NoRanges
    options: dict[str, Any] = {"range": (start, stop)}
    if etag and not etag.startswith("W/"):  # A weak ETag cannot be used with ranges.
        options["if_match"] = etag
    try:
        answer = obstore.get(location.reader, key, options=options)  # type: ignore[arg-type]
    except BaseException as error:
        if any(text in str(error) for text in _NO_RANGES):
            location.gives_ranges = False
            raise web.NoRanges from error
        raise_translated(error, location, uri, "read")

    def body() -> Any:
        try:
            data = answer.bytes()
        except BaseException as error:
            raise_translated(error, location, uri, "read")
        traffic.read(len(data))
        return data

    meta = answer.meta
    return web.Part(uri, meta["size"], meta["e_tag"] or "", _attribute(answer), body)


def _stream(uri: str) -> tuple[str, Iterator[Any]]:
    """Return the hash that an object carries, and all its bytes as they arrive."""
    location, key = locate(uri)
    with translated(location, uri, "read"):
        answer = obstore.get(location.writer, key)

    def blocks() -> Iterator[Any]:
        with translated(location, uri, "read"):
            for block in answer.stream(min_chunk_size=_BLOCK):
                traffic.read(len(block))
                yield block

    return _attribute(answer), blocks()


def _attribute(answer: "obstore.GetResult") -> str:
    """Return the attribute `sha256` of an object; "" if it has none."""
    return str(answer.attributes.get("sha256", ""))


def _compare(uri: str, digest: str, expected: str) -> None:
    """Raise `Corrupt` if a hash differs."""
    if digest != expected:
        fix = "it was read again and still differs: run the command that writes it again"
        raise failures.Corrupt(f"{uri} is damaged: its sha256 is {digest}, not {expected}", fix=fix)


def retry_on_corruption(action: Callable[[], Result]) -> Result:
    """Repeat a read or write whose bytes were cut off, altered or changed; signals are handled meanwhile."""

    def tries() -> Result:
        for number in range(1, _TRIES):
            try:
                return action()
            except failures.Transient:
                time.sleep(random.uniform(0, min(environment.RETRIES.wait, 0.2 * 2**number)))
        return action()

    return in_background(tries)


def read_buffer(uri: str, sha256: str = "") -> Any:
    """Return a file's content as a buffer; its hash must be `sha256` unless that is ""."""
    return retry_on_corruption(partial(_read, uri, sha256))


def _read(uri: str, sha256: str) -> Any:
    file = _File(uri)
    if not file.has_parts or file.size > PIECE:
        return b"".join(file.blocks(sha256))
    data = file.piece(0)
    if expected := sha256 or file.sha256:
        _compare(uri, hashlib.sha256(data).hexdigest(), expected)
    return data


def read_range(uri: str, start: int, length: int) -> bytes:
    """Return `length` bytes from `start` on, or as many as there are."""

    def read() -> bytes:
        if length <= PIECE:
            try:
                get = web.part if scheme(uri) in WEB else _part
                return bytes(get(uri, start, start + length).body())
            except failures.PastEnd:
                return b""
            except web.NoRanges:
                pass
        file = _File(uri)
        if not file.has_parts:
            return b"".join(file.blocks())[start : start + length]
        first = start - start % PIECE
        stop = min(start + length, file.size)
        return b"".join(file.pieces(first, stop))[start - first : stop - first]

    return retry_on_corruption(read)


def copy(uri: str, path: Path, sha256: str = "") -> None:
    """Write a file's content to a local path; its hash must be `sha256` unless that is ""."""

    def read() -> None:
        with path.open("wb") as file:
            file.writelines(_File(uri).blocks(sha256))

    retry_on_corruption(read)


def open_reader(uri: str, ahead: int) -> IO[bytes]:
    """Return a seekable binary file; if a server gives files only whole, it is copied to disk."""
    file = in_background(partial(_File, uri))
    if file.has_parts and file.size <= PIECE:
        return io.BytesIO(read_buffer(uri))
    if file.has_parts:
        return io.BufferedReader(_Reader(file, ahead), 128 * 1024)
    with tempfile.NamedTemporaryFile(prefix="kubedet-") as copied:
        copy(uri, Path(copied.name))
        return open(copied.name, "rb")


class _Reader(io.RawIOBase):
    """A file for one thread. If it is read in order, its hash is checked before its last bytes."""

    def __init__(self, file: _File, ahead: int) -> None:
        super().__init__()
        self._file, self._ahead = file, max(1, ahead)
        self._threads = DaemonThreadPool(self._ahead, "read")
        self._pieces = {0: self._threads.submit(file.piece, 0)}
        self._digest = hashlib.sha256()
        self._position = self._hashed = 0
        self._last = -1

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        if base + offset < 0:
            raise ValueError(f"negative position {base + offset}")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        if self._position >= self._file.size:
            return 0
        number, start = divmod(self._position, PIECE)
        view = memoryview(buffer).cast("B")
        data = memoryview(self._piece(number))[start : start + len(view)]
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._threads.shutdown(cancel_futures=True)
            self._pieces.clear()
        super().close()

    def _piece(self, number: int) -> Any:
        """Return a piece; if pieces are read in order, fetch the next ones meanwhile."""
        if number != self._last:
            ahead = self._ahead if number == self._last + 1 else 1
            for one in range(number, min(number + ahead, -(-self._file.size // PIECE))):
                if one not in self._pieces:
                    self._pieces[one] = self._threads.submit(self._file.piece, one * PIECE)
            for one in self._pieces.keys() - set(range(number - 1, number + self._ahead + 1)):
                self._pieces.pop(one).cancel()
            self._last = number
        data = result_of(self._pieces[number])
        if number == self._hashed and self._file.sha256:
            self._digest.update(data)
            self._hashed += 1
            if self._hashed * PIECE >= self._file.size:
                _compare(self._file.uri, self._digest.hexdigest(), self._file.sha256)
        return data


def state(uri: str) -> FileState | None:
    """Return a file's size, time and ETag as the server reports them, or None if it is missing."""
    if scheme(uri) in WEB:
        return web.state(uri)
    location, key = locate(uri)

    def look() -> FileState | None:
        with suppress(failures.Absent), translated(location, uri, "read"):
            try:
                return _file_state(obstore.head(location.reader, key))
            except Exception as error:
                if failures.status_of(error) in (301, 307, 400, 403):
                    obstore.get(location.reader, key)  # The answer to a HEAD has no reason.
                raise
        return None

    return in_background(look)


def scan(uri: str, recursive: bool) -> Iterator[tuple[str, FileState]]:
    """Yield the objects under a prefix by relative name, page by page."""
    if scheme(uri) in WEB:
        raise StorageError(
            f"cannot list {uri}", fix="name one file, or use a local folder or an object store"
        )
    location, prefix = locate(uri, folder=True)
    skip, empty = len(prefix) + 1 if prefix else 0, True
    for meta in _list(location, prefix, uri, recursive):
        empty = False
        name = meta["path"][skip:]
        if not name:  # A console's marker of the folder itself.
            continue
        if climbs(name):
            fix = "rename the object: no '..' and no first '/'"
            raise StorageError(f"refused name {name!r} under {uri}", fix=fix)
        yield name, _file_state(meta)
    if empty and scheme(uri) not in CLOUDS:
        _check_listing(uri, prefix)


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


def _check_listing(uri: str, prefix: str) -> None:
    """Refuse an empty listing from something that is no store, such as a web page."""
    client, bucket = environment.client(environment.settings(scheme(uri))), uri.split("/")[2]
    try:
        next(iter(client.list_objects(bucket, prefix=prefix)), None)
    except (MinioException, ParseError, ValueError) as error:
        fix = "check that the endpoint is one of S3, not a console or a proxy's page"
        raise StorageError(f"cannot list {uri}: this is no answer of an object store", fix=fix) from error
    except HTTPError:
        pass  # obstore had an answer.


def _file_state(meta: "obstore.ObjectMeta") -> FileState:
    modified = meta["last_modified"]
    assert isinstance(modified, datetime)
    # obstore returns the beginning of 1970 if a server does not report a time.
    return FileState(meta["size"], modified.timestamp() or None, (meta["e_tag"] or "").strip('"'))


def delete(uri: str) -> None:
    """Delete an object, if it exists."""
    location, key = _locate_to_write(uri)

    def request() -> None:
        with suppress(failures.Absent), translated(location, uri, "delete"):
            obstore.delete(location.reader, key)

    in_background(request)


def write_bytes(uri: str, data: bytes | memoryview, *, confirm: bool = False) -> None:
    """Write an object; `confirm` reads it back, and writes it again if it differs."""
    _Upload(uri, io.BytesIO(data), len(data), hashlib.sha256(data).hexdigest(), confirm).run("overwrite")


def upload(path: Path, uri: str, sha256: str = "", *, confirm: bool = False) -> None:
    """Write a local file's content as an object, in parts if it is large; see `write_bytes`."""
    with path.open("rb") as file:
        sha256 = sha256 or hashlib.file_digest(file, "sha256").hexdigest()
        _Upload(uri, file, path.stat().st_size, sha256, confirm).run("overwrite")


def create(uri: str, data: bytes) -> bool:
    """Write an object unless it exists; return whether it was written."""
    upload = _Upload(uri, io.BytesIO(data), len(data), hashlib.sha256(data).hexdigest())
    return state(uri) is None and upload.run("create")


class _Upload:
    """An object that is written with its sha256 as an attribute. The store checks each request's hash."""

    def __init__(self, uri: str, source: IO[bytes], size: int, sha256: str, confirm: bool = False) -> None:
        self._uri, self._confirm = uri, confirm
        self._location, self._key = _locate_to_write(uri)
        self._source, self._size, self._sha256 = source, size, sha256
        kind = mimetypes.guess_type(self._key)[0] or "application/octet-stream"  # For browsers.
        self._attributes = {"Content-Type": kind, "sha256": sha256}
        self._interrupted, self._ended = False, threading.Event()

    def run(self, mode: Literal["create", "overwrite"]) -> bool:
        """Write it; returns False if it exists and was not to be overwritten."""
        try:
            return retry_on_corruption(lambda: self._write(mode))
        except BaseException:
            # The upload may go on in another thread: it removes its parts when its source fails.
            self._interrupted = True
            self._ended.wait(_ABORT_SECONDS)
            raise

    def _write(self, mode: Literal["create", "overwrite"]) -> bool:
        self._ended.clear()
        try:
            with translated(self._location, self._uri, "write"):
                written = self._send(mode)
        finally:
            self._ended.set()
        if self._confirm:  # Stores have lost or altered what they acknowledged.
            problem = ""
            try:
                for _ in _File(self._uri).blocks(self._sha256):
                    pass
            except failures.Absent:
                problem = "it is not there"
            except failures.Corrupt:
                problem = "it came back altered"
            if problem:
                fix = "look at the store's log and disks, and run again: it is written again"
                message = f"{self._uri} was written, and the store acknowledged it, but {problem}"
                raise failures.Transient(message, fix=fix)
        return written

    def _send(self, mode: Literal["create", "overwrite"]) -> bool:
        self._source.seek(0)
        try:
            if self._size <= 2 * PART:
                traffic.written(self._size)
                self._put(self._source.read(), mode=mode, use_multipart=False)
            else:
                length = max(PART, -(-self._size // _MOST_PARTS))
                self._put(self._parts(length), chunk_size=length, max_concurrency=_SENDERS)
            return True
        except AlreadyExistsError:
            if mode == "create":
                return self._is_there()  # Another process was first, or the answer to our first try was lost.
            raise
        except Exception as error:
            # The answer to the last request of an upload may have been lost.
            if "NoSuchUpload" in str(error) and self._is_there():
                return True
            raise

    def _put(self, source: Any, **options: Any) -> None:
        obstore.put(self._location.writer, self._key, source, attributes=self._attributes, **options)

    def _parts(self, length: int) -> Iterator[bytes]:
        while block := self._source.read(length):
            if self._interrupted:
                raise Interrupted(f"{self._uri} is not written any more")
            traffic.written(len(block))
            yield block

    def _is_there(self) -> bool:
        """Return whether the object exists as we write it."""
        try:
            answer = obstore.get(self._location.writer, self._key)
        except FileNotFoundError:
            return False
        return (answer.meta["size"], _attribute(answer)) == (self._size, self._sha256)


def _locate_to_write(uri: str) -> tuple[Location, str]:
    if scheme(uri) in WEB:
        fix = "use a local folder or s3://bucket/key"
        raise StorageError(f"cannot write {uri}: the web is read only", fix=fix)
    return locate(uri)
