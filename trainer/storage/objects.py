"""Files on servers: read whole or in parts, listed, written and deleted.

A file is read in pieces side by side, all of one version, and compared with its sha256: that which the caller
knows, or the attribute `sha256` that every object of ours carries. What does not agree is read again.
"""

import hashlib
import io
import itertools
import mimetypes
import random
import re
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from datetime import datetime
from functools import cached_property, partial
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
from trainer.storage import environment, failures, retry_policy, web
from trainer.storage.location import Location, locate, read_at_once, translated
from trainer.storage.uris import CLOUDS, WEB, FileState, climbs, scheme

Result = TypeVar("Result")

PIECE = 4 * 1024 * 1024
"""Bytes of one request: large enough that 20 ms of waiting do not matter, small enough to repeat."""

THREADS = 16
"""Pieces of one file that are read at the same time."""

PART = 8 * 1024 * 1024
"""Bytes of a part of what is written; more if an object would have too many parts."""

_MOST_PARTS = 10_000
_SENDERS = 6
_TRIES = 4
_ABORT_SECONDS = 5.0
"""How long an upload that is interrupted may take to remove its parts, which no listing shows."""

_BLOCK = 1024 * 1024
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NO_RANGES = ("non-partial response", "Range request not supported")
"""What obstore says of a store that answers with the whole object if a part was asked for."""


class _Object:
    """An object whose first bytes have been asked for, which tells its size too.

    Args:
        uri: of the object.

    Raises:
        StorageError: it is missing or cannot be read.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._bucket, self._key = locate(uri)
        self._first: Any = None
        with translated(self._bucket, uri, "read"):
            self._answer = self._asked()
            self.gives_parts = self._bucket.gives_ranges
            self.size = self._answer.range[1]
            if self.size >= PIECE:
                self.size = self._answer.meta["size"]
            elif self.gives_parts:
                self._first = _received(self._answer)

    @cached_property
    def _etag(self) -> str:
        return self._answer.meta["e_tag"] or ""

    @cached_property
    def sha256(self) -> str:
        """The hash that the object carries; "" if it carries none."""
        return _known_hash(self._answer)

    def _asked(self) -> "obstore.GetResult":
        if self._bucket.gives_ranges:
            try:
                return _get(self._bucket, self._key, range=(0, PIECE))
            except _WithoutRanges:
                pass
            except Exception as error:
                if failures.status_of(error) != 416:  # An empty object has no part.
                    raise
        return _get(self._bucket, self._key)

    def first(self) -> Any:
        """Return the first bytes, all of a small object."""
        with translated(self._bucket, self.uri, "read"):
            data = _received(self._answer) if self._first is None else self._first
        end = min(PIECE, self.size)
        # A proxy may have cut the answer off.
        return data if len(data) >= end else bytes(data) + bytes(self.piece(len(data), end))

    def piece(self, start: int, stop: int) -> Any:
        """Return a part of the object, of the same version.

        Raises:
            Changed: it is another version now.
            StorageError: it cannot be read.
        """
        options: dict[str, Any] = {"range": (start, stop)}
        if self._etag and not self._etag.startswith("W/"):  # A weak mark holds for no range.
            options["if_match"] = self._etag
        try:
            with translated(self._bucket, self.uri, "read"):
                answer = _get(self._bucket, self._key, **options)
                data = _received(answer)
        except (failures.Absent, _WithoutRanges):
            raise failures.changed(self.uri) from None
        meta = answer.meta
        if (meta["size"], meta["e_tag"] or "") != (self.size, self._etag) or not len(data):
            raise failures.changed(self.uri)
        if len(data) < stop - start:  # A proxy cut the answer off.
            return bytes(data) + bytes(self.piece(start + len(data), stop))
        return data

    def stream(self) -> Iterator[Any]:
        """Yield all bytes as they arrive, of a store that gives no parts."""
        with translated(self._bucket, self.uri, "read"):
            for block in self._answer.stream(min_chunk_size=_BLOCK):
                traffic.read(len(block))
                yield block


def _begin(uri: str) -> "_Object | web.WebFile":
    return web.WebFile(uri, PIECE) if scheme(uri) in WEB else _Object(uri)


def retry_on_corruption(read: Callable[[], Result]) -> Result:
    """Read or write again what was cut off, altered or changed meanwhile; signals are handled meanwhile.

    Raises:
        StorageError: of the last try.
    """

    def tries() -> Result:
        for number in range(1, _TRIES):
            try:
                return read()
            except failures.Transient:
                time.sleep(random.uniform(0, min(retry_policy.RETRIES.wait, 0.2 * 2**number)))
        return read()

    return in_background(tries)


def read_buffer(uri: str, sha256: str = "") -> Any:
    """Return a file's content as a buffer; its hash must be `sha256` unless that is ""."""

    def read() -> Any:
        if scheme(uri) in WEB:
            data = read_at_once(uri, PIECE)
            if data is not None and (not sha256 or hashlib.sha256(data).hexdigest() == sha256):
                traffic.read(len(data))
                return data
        file = _begin(uri)
        if not file.gives_parts or file.size > PIECE:
            return b"".join(_blocks(file, sha256))
        data = file.first()
        if expected := sha256 or file.sha256:
            _compare(uri, hashlib.sha256(data).hexdigest(), expected)
        return data

    return retry_on_corruption(read)


def read_range(uri: str, start: int, length: int) -> bytes:
    """Return `length` bytes from `start` on, or as many as there are."""

    def read() -> bytes:
        if length <= PIECE:
            if scheme(uri) in WEB:
                return web.read_range(uri, start, start + length)
            bucket, key = locate(uri)
            if bucket.gives_ranges:
                with suppress(_WithoutRanges), translated(bucket, uri, "read"):
                    try:
                        return bytes(_received(_get(bucket, key, range=(start, start + length))))
                    except Exception as error:
                        if failures.status_of(error) != 416:
                            raise
                        return b""
        file = _begin(uri)
        if not file.gives_parts:
            return b"".join(_blocks(file, ""))[start : start + length]
        return b"".join(_pieces(file, start, min(start + length, file.size)))

    return retry_on_corruption(read)


def copy(uri: str, path: Path, sha256: str = "") -> None:
    """Write a file's content to a local path; its hash must be `sha256` unless that is ""."""

    def read() -> None:
        with path.open("wb", buffering=0) as file:
            _write_blocks(file, _blocks(_begin(uri), sha256))

    retry_on_corruption(read)


def open_reader(uri: str, ahead: int) -> IO[bytes]:
    """Return a seekable binary file that holds at most `ahead` + 2 pieces in memory.

    If a server gives files only whole, it is copied to disk.

    Raises:
        StorageError: it is missing or cannot be read; later too, from any of its methods.
    """
    file = in_background(partial(_begin, uri))
    if file.gives_parts:
        if file.size > PIECE:
            return io.BufferedReader(_Reader(file, ahead), 128 * 1024)
        return io.BytesIO(read_buffer(uri))
    copied = tempfile.TemporaryFile(prefix="kubedet-", buffering=0)  # noqa: SIM115 (the caller closes it)
    try:

        def read() -> None:
            copied.seek(0)
            copied.truncate()
            _write_blocks(copied, _blocks(_begin(uri), ""))

        retry_on_corruption(read)
    except BaseException:
        copied.close()
        raise
    copied.seek(0)
    return io.BufferedReader(copied, 128 * 1024)


class _Reader(io.RawIOBase):
    """What `open_reader` returns, without a buffer. One thread at a time.

    If it is read from the start to the end in order, the hash is checked before the last bytes are given.
    """

    def __init__(self, file: "_Object | web.WebFile", ahead: int) -> None:
        super().__init__()
        self._file, self._ahead = file, max(1, ahead)
        self._threads = DaemonThreadPool(self._ahead, "read")
        self._pieces = {0: self._threads.submit(file.first)}
        self._digest = hashlib.sha256() if file.sha256 else None
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
            raise ValueError(f"negative place {base + offset}")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        if self._position >= self._file.size:
            return 0
        number, start = divmod(self._position, PIECE)
        view = memoryview(buffer).cast("B")
        data = memoryview(self._get(number))[start : start + len(view)]
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._threads.shutdown(cancel_futures=True)
            for future in self._pieces.values():
                future.cancel()
            self._pieces.clear()
        super().close()

    def _get(self, number: int) -> Any:
        """Return a piece; if the pieces are read one after the other, fetch the next ones meanwhile."""
        size = self._file.size
        if number != self._last:
            ahead = self._ahead if number == self._last + 1 else 0
            for one in range(number, min(number + ahead, (size - 1) // PIECE) + 1):
                if one not in self._pieces:
                    stop = min((one + 1) * PIECE, size)
                    self._pieces[one] = self._threads.submit(self._file.piece, one * PIECE, stop)
            self._last = number
            wanted = sorted(self._pieces, key=lambda one: (one < number, abs(one - number)))
            for one in wanted[self._ahead + 2 :]:
                self._pieces.pop(one).cancel()
        data = result_of(self._pieces[number])
        if number == self._hashed and self._digest is not None:
            self._digest.update(data)
            self._hashed += 1
            if self._hashed * PIECE >= size:
                _compare(self._file.uri, self._digest.hexdigest(), self._file.sha256)
        return data


class _WithoutRanges(Exception):
    """The store has just turned out to give objects only whole."""


def _get(bucket: Location, key: str, **options: Any) -> "obstore.GetResult":
    store = bucket.parts if bucket.gives_ranges else bucket.whole
    try:
        return obstore.get(store, key, options=options or None)  # type: ignore[arg-type]
    except Exception as error:
        if "range" in options and any(said in str(error) for said in _NO_RANGES):
            bucket.gives_ranges = False
            raise _WithoutRanges from error
        raise


def _received(answer: "obstore.GetResult") -> Any:
    data = answer.bytes()
    traffic.read(len(data))
    return data


def _known_hash(answer: "obstore.GetResult") -> str:
    attribute = answer.attributes.get("sha256", "")
    return attribute if _SHA256.fullmatch(attribute) else ""


def _pieces(file: "_Object | web.WebFile", start: int, stop: int) -> Iterator[Any]:
    """Yield the part of a file in order, in buffers, while the next ones are fetched."""
    fetched: deque[Future[Any]] = deque()
    with DaemonThreadPool(min(THREADS, 1 + (stop - start) // PIECE), "read") as threads:
        for begin in range(start, stop, PIECE):
            end = min(begin + PIECE, stop)
            is_first = begin == 0 and end == min(PIECE, file.size)
            fetched.append(threads.submit(file.first) if is_first else threads.submit(file.piece, begin, end))
            if len(fetched) > THREADS:
                yield result_of(fetched.popleft())
        while fetched:
            yield result_of(fetched.popleft())


def _blocks(file: "_Object | web.WebFile", sha256: str) -> Iterator[Any]:
    """Yield the content of a file in buffers, in order; its hash is checked before the last one.

    Raises:
        Corrupt: it is another one.
    """
    expected = sha256 or file.sha256
    digest, last = hashlib.sha256() if expected else None, None
    if not file.gives_parts:
        blocks = file.stream()
    elif file.size <= PIECE:
        blocks = iter((file.first(),))
    else:
        blocks = _pieces(file, 0, file.size)
    for block in blocks:
        if digest is not None:
            digest.update(block)
        if last is not None:
            yield last
        last = block
    if digest is not None:
        _compare(file.uri, digest.hexdigest(), expected)
    yield b"" if last is None else last


def _compare(uri: str, digest: str, expected: str) -> None:
    if digest != expected:
        raise failures.Corrupt(
            f"{uri} is damaged: its sha256 is {digest}, not {expected}",
            fix="it was read again and differs still: run the command that writes it again",
        )


def _write_blocks(file: Any, blocks: Iterator[Any]) -> None:
    for block in blocks:
        left = memoryview(block)
        while left:
            left = left[file.write(left) :]


def state(uri: str) -> FileState | None:
    """Return a file's size, time and ETag as the server tells them, or None if it is missing."""
    if scheme(uri) in WEB:
        return web.state(uri)
    bucket, key = locate(uri)

    def look() -> FileState:
        with translated(bucket, uri, "read"):
            try:
                return _file_state(obstore.head(bucket.parts, key))
            except Exception as error:
                if failures.status_of(error) in (301, 307, 400, 403):
                    obstore.get(bucket.parts, key)  # The answer to a HEAD does not say why.
                raise

    try:
        return in_background(look)
    except failures.Absent:
        return None


def scan(uri: str, recursive: bool) -> Iterator[tuple[str, FileState]]:
    """Yield the objects under a prefix, by name relative to it; page by page in order if it is recursive.

    Raises:
        StorageError: it cannot be listed, or a name leads out of the folder.
    """
    if scheme(uri) in WEB:
        fix = "name one file, or use a local folder or an object store"
        raise StorageError(f"cannot list {uri}", fix=fix)
    bucket, prefix = locate(uri, folder=True)
    skip, empty = len(prefix) + 1 if prefix else 0, True
    for meta, following in itertools.pairwise(itertools.chain(_list(bucket, prefix, uri, recursive), [None])):
        empty = False
        name = meta["path"][skip:]
        if not name or _is_folder(bucket, uri, meta, following):
            continue
        if climbs(name):
            fix = "rename the object: no '..' and no first '/'"
            raise StorageError(f"refused name {name!r} under {uri}", fix=fix)
        yield name, _file_state(meta)
    if empty and scheme(uri) not in CLOUDS:
        _check_listing(uri, prefix)


def _list(bucket: Location, prefix: str, uri: str, recursive: bool) -> Iterator[Any]:
    with translated(bucket, uri, "list"):
        if not recursive:
            listing = in_background(lambda: obstore.list_with_delimiter(bucket.parts, prefix or None))
            yield from listing["objects"]
            return
        last, tries = None, 1
        while tries:
            pages = obstore.list(bucket.parts, prefix or None, offset=last, chunk_size=1000)
            try:
                while metas := in_background(partial(next, pages, None)):
                    yield from metas
                    last, tries = metas[-1]["path"], 1
                tries = 0
            except GenericError:  # A page that is cut off is not retried by obstore.
                tries += 1
                if tries > _TRIES:
                    raise


def _is_folder(bucket: Location, uri: str, meta: Any, following: Any) -> bool:
    """Tell whether an object stands for a folder: its key ends in a slash, which obstore leaves out.

    Consoles make them, empty. If no file of the folder follows, the store is asked for an object without
    the slash; not for names that have a dot, of which there may be many that are files.
    """
    if meta["size"]:
        return False
    if following and following["path"].startswith(f"{meta['path']}/"):
        return True
    if "." in meta["path"].rpartition("/")[2]:
        return False
    try:
        with translated(bucket, uri, "read"):
            in_background(lambda: obstore.head(bucket.parts, meta["path"]))
    except failures.Absent:
        return True
    return False


def _check_listing(uri: str, prefix: str) -> None:
    """Refuse an empty listing of something that is no store, such as a web page."""
    client, bucket = environment.client(environment.settings(scheme(uri))), uri.split("/")[2]
    try:
        next(iter(client.list_objects(bucket, prefix=prefix)), None)
    except (MinioException, ParseError, ValueError) as error:
        raise failures.no_store(uri, "list") from error
    except HTTPError:
        pass  # obstore had an answer, which holds.


def _file_state(meta: "obstore.ObjectMeta") -> FileState:
    modified = meta["last_modified"]
    assert isinstance(modified, datetime)
    # obstore gives the beginning of 1970 if a server does not tell.
    return FileState(meta["size"], modified.timestamp() or None, (meta["e_tag"] or "").strip('"'))


def delete(uri: str) -> None:
    """Delete an object; one that is not there is no error."""
    bucket, key = _locate_to_write(uri)

    def request() -> None:
        with suppress(failures.Absent), translated(bucket, uri, "delete"):
            obstore.delete(bucket.parts, key)

    in_background(request)


def write_bytes(uri: str, data: bytes | memoryview, *, confirm: bool = False) -> None:
    """Write an object; `confirm` reads it back, and writes it again if it is not what was sent."""
    _Upload(uri, io.BytesIO(data), len(data), hashlib.sha256(data).hexdigest(), confirm).run("overwrite")


def upload(path: Path, uri: str, sha256: str = "", *, confirm: bool = False) -> None:
    """Write a local file's content as an object; in parts if it is large.

    Args:
        path: the file.
        uri: of the object.
        sha256: of the content, if it is known.
        confirm: see `write_bytes`.
    """
    with path.open("rb") as file:
        sha256 = sha256 or hashlib.file_digest(file, "sha256").hexdigest()
        _Upload(uri, file, path.stat().st_size, sha256, confirm).run("overwrite")


def create(uri: str, data: bytes) -> bool:
    """Write an object unless there is one; tell whether it was written.

    A store that does not know conditional writes overwrites what another writer puts there between
    the look and the write.
    """
    upload = _Upload(uri, io.BytesIO(data), len(data), hashlib.sha256(data).hexdigest())
    return state(uri) is None and upload.run("create")


class _Upload:
    """One object that is written, with as many tries as it takes.

    It carries its sha256 as an attribute. With each request goes a hash of its body, signed or as a checksum,
    with which the store compares what it gets.
    """

    def __init__(self, uri: str, source: IO[bytes], size: int, sha256: str, confirm: bool = False) -> None:
        self._uri, self._confirm = uri, confirm
        self._bucket, self._key = _locate_to_write(uri)
        self._source, self._size, self._sha256 = source, size, sha256
        kind = mimetypes.guess_type(self._key)[0] or "application/octet-stream"
        self._attributes = {"Content-Type": kind, "sha256": sha256}  # A browser wants to know what it is.
        self._interrupted, self._ended = False, threading.Event()

    def run(self, mode: Literal["create", "overwrite"]) -> bool:
        """Write it; returns False if there is another one that was not to be overwritten."""
        try:
            return retry_on_corruption(lambda: self._written(mode))
        except BaseException:
            # An upload that goes on in another thread removes its parts when its source fails.
            self._interrupted = True
            self._ended.wait(_ABORT_SECONDS)
            raise

    def _written(self, mode: Literal["create", "overwrite"]) -> bool:
        """Write it, and confirm that it is there: stores have lost or altered what they acknowledged."""
        self._ended.clear()
        try:
            with translated(self._bucket, self._uri, "write"):
                written = self._send(mode)
        finally:
            self._ended.set()
        if self._confirm:
            try:
                for _ in _blocks(_begin(self._uri), self._sha256):
                    pass
            except failures.Absent:
                raise failures.not_kept(self._uri, "it is not there") from None
            except failures.Corrupt:
                raise failures.not_kept(self._uri, "it came back altered") from None
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
                return self._is_there()  # Another was first, or the answer to a try of ours was lost.
            raise
        except Exception as error:
            # The last request of an upload may have been answered, and the answer been lost.
            if "NoSuchUpload" in str(error) and self._is_there():
                return True
            raise

    def _put(self, source: Any, **options: Any) -> None:
        obstore.put(self._bucket.whole, self._key, source, attributes=self._attributes, **options)

    def _parts(self, length: int) -> Iterator[bytes]:
        while block := self._source.read(length):
            if self._interrupted:
                raise Interrupted(f"{self._uri} is not written any more")
            traffic.written(len(block))
            yield block

    def _is_there(self) -> bool:
        """Tell whether the object is there as we write it."""
        try:
            answer = obstore.get(self._bucket.whole, self._key)
        except FileNotFoundError:
            return False
        return (answer.meta["size"], _known_hash(answer)) == (self._size, self._sha256)


def _locate_to_write(uri: str) -> tuple[Location, str]:
    if scheme(uri) in WEB:
        fix = "use a local folder or s3://bucket/key"
        raise StorageError(f"cannot write {uri}: the web is read only", fix=fix)
    return locate(uri)
