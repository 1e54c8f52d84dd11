"""Files in object stores and on web servers: read, written, listed and deleted.

Buckets are accessed through obstore; their settings are read from the environment once. Large files are read
in pieces, several at a time and all of the same version. The content's hash is compared with the expected one
or with the `sha256` attribute of the object; on a mismatch the file is read again.
"""

import hashlib
import io
import mimetypes
import os
import re
import tempfile
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import IO, Any
from xml.etree.ElementTree import ParseError

import obstore
from minio.credentials import StaticProvider
from minio.error import MinioException
from obstore import exceptions
from obstore.store import GCSStore, ObjectStore, S3Store
from urllib3.exceptions import HTTPError

from trainer.base.daemon_threads import DaemonThreadPool, run_in_background, wait_for
from trainer.base.errors import Interrupted, MissingError, StorageError
from trainer.base.os_errors import missing_error
from trainer.storage import environment, outages, web
from trainer.storage.retries import (
    BUSY,
    MAX_TRIES,
    RETRY_FIX,
    CorruptError,
    RangePastEndError,
    RangesNotSupported,
    TransientError,
    changed_error,
    probe,
    retry,
)
from trainer.storage.uris import WEB, FileState, check_digest, check_uri, scheme

PIECE_BYTES = 4 * 1024 * 1024  # of one read request: enough to hide 20 ms of latency, few enough to repeat
READ_THREADS = 16  # pieces of one file that are read concurrently
PIECES_AHEAD = 8  # pieces that a sequential reader fetches ahead
PART_BYTES = 8 * 1024 * 1024  # of one write request; more if an object would have too many parts
_MAX_PARTS = 10_000
_UPLOAD_THREADS = 6
_ABORT_SECONDS = 5.0  # how long an interrupted upload may take to remove its parts
_BLOCK_BYTES = 1024 * 1024
_CREDENTIAL_SECONDS = 10.0  # how long to wait for a cloud's metadata server
_REFUSED_FIX = "check the permissions of these keys; for a public bucket set AWS_SKIP_SIGNATURE=true"
_KEYS_FIX = (
    "check the access keys in the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
    "MINIO_ACCESS_KEY and MINIO_SECRET_KEY) and the region; for a public bucket set AWS_SKIP_SIGNATURE=true"
)
_REGION_FIX = "set AWS_REGION (for minio:// MINIO_REGION) to the bucket's region"
_FIXES = {  # by the codes of S3 (https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html)
    "AccessDenied": _REFUSED_FIX,
    "InvalidAccessKeyId": _KEYS_FIX,
    "SignatureDoesNotMatch": _KEYS_FIX,
    "ExpiredToken": "the session's token has expired: log in again and set AWS_SESSION_TOKEN with its keys",
    "RequestTimeTooSkewed": "this machine's clock is wrong: set it",
    "AuthorizationHeaderMalformed": _REGION_FIX,
    "PermanentRedirect": _REGION_FIX,
    "InvalidObjectState": "the object is in an archive tier: have it restored first",
    "EntityTooLarge": "the store takes no object of this size: make shards smaller (data.shard_bytes)",
    "QuotaExceeded": "the bucket's quota is used up: free space or raise it",
    "XMinioStorageFull": "the store's disk is full: free space there",
}
_TRANSIENT = (  # codes with status 400 or 404, which obstore does not retry; a retry may succeed
    "BadDigest", "IncompleteBody", "InvalidPart", "NoSuchUpload", "OperationAborted", "RequestTimeout",
    "XAmzContentSHA256Mismatch",
)  # fmt: skip


class Location:
    """The bucket or container of a URI."""

    reader: ObjectStore  # for short requests: objects of a few megabytes, parts, listings
    writer: ObjectStore  # for long requests: no response arrives while the body is sent
    supports_ranges = True  # false if the store sends whole objects only

    def __init__(self, uri: str) -> None:
        check_uri(uri)
        self.kind = scheme(uri)
        if self.kind in WEB:
            message = f"cannot list, write or delete {uri}: files on the web can only be read"
            raise StorageError(message, fix="use one file, a local folder or an object store")
        kind, bucket = self.kind, uri.partition("://")[2].partition("/")[0]
        waits, settings = environment.RETRIES, None
        if kind == "gs":
            self.server = environment.google_url()
        else:
            settings = environment.read_settings(kind)
            self.server = settings.url
        end = time.monotonic() + waits.first
        while problem := probe(self.server, uri, waits.first):
            if not problem.transient or time.monotonic() > end:
                raise problem
            time.sleep(min(1.0, waits.wait))
        options = _s3_options(settings, bucket) if settings else {}
        try:
            self.reader = _new_store(kind, bucket, self.server, options, waits.read_timeout, waits.total / 2)
            self.writer = _new_store(kind, bucket, self.server, options, waits.total, 86_400.0)
            if kind == "gs":  # obstore itself waits for minutes for a missing metadata server.
                with DaemonThreadPool(1, "credentials") as thread, suppress(FileNotFoundError):
                    thread.submit(obstore.head, self.reader, "kubedet").result(timeout=_CREDENTIAL_SECONDS)
        except BaseException as error:
            is_known = isinstance(error, StorageError) or kind != "gs"
            if is_known or not (isinstance(error, Exception) or is_panic(error)):
                raise
            if not http_status(error):  # With a status the credentials were found.
                reason = str(error).partition("\n")[0].strip()[:300] or "no server gives credentials"
                problem = StorageError(f"cannot use gs://: {reason}", fix=environment.GOOGLE_CREDENTIALS_FIX)
                raise probe(self.server, uri, 5.0) or problem from error


def _new_store(
    kind: str, bucket: str, server: str, options: dict[str, Any], read_timeout: float, longest: float
) -> ObjectStore:
    """Create an obstore client; its requests take at most `longest` seconds."""
    waits, proxy = environment.RETRIES, environment.find_proxy(server)
    client: Any = {
        "allow_http": True,
        "user_agent": "kubedet",
        "root_certificate": environment.ca_certificates(),
        "connect_timeout": timedelta(seconds=waits.connect),
        "read_timeout": timedelta(seconds=read_timeout),
        "timeout": timedelta(seconds=longest),
    }
    if kind == "gs":  # The metadata server is never behind a proxy.
        client["proxy_excludes"] = "169.254.169.254,metadata.google.internal"
    if proxy:
        client["proxy_url"] = proxy
    first, most = timedelta(seconds=min(0.1, waits.wait)), timedelta(seconds=waits.wait)
    retries: Any = {
        "max_retries": 10_000,
        "retry_timeout": timedelta(seconds=waits.total),
        "backoff": {"init_backoff": first, "max_backoff": most, "base": 2},
    }
    make: Any = GCSStore if kind == "gs" else S3Store
    store: ObjectStore = make(bucket, client_options=client, retry_config=retries, **options)
    return store


def _s3_options(settings: environment.Settings, bucket: str) -> dict[str, Any]:
    options: dict[str, Any] = {"region": settings.region}
    if not settings.region:
        # https://docs.aws.amazon.com/AmazonS3/latest/API/API_HeadBucket.html
        try:
            address, client = f"{settings.url}/{bucket}", environment.web_client(settings.url)
            answer = client.request("HEAD", address, redirect=False, retries=3, timeout=10.0)
        except HTTPError as error:
            message = f"cannot get the region of {bucket} from {settings.url}: {error}"
            raise StorageError(message, fix="check the network, or set AWS_REGION") from error
        options["region"] = answer.headers.get("x-amz-bucket-region", "") or "us-east-1"
    if settings.url != environment.AMAZON:
        # The environment cannot override this option's name, in contrast to aws_endpoint_url.
        options["aws_endpoint_url_s3"] = settings.url
    provider = settings.keys
    if provider is None:  # Anonymous: an unsigned request needs a checksum of its body.
        return {**options, "skip_signature": True, "checksum_algorithm": "SHA256"}

    def keys() -> dict[str, Any]:
        current = provider.retrieve()
        # The provider renews expiring keys, so obstore has to call this function again soon.
        soon = datetime.now(UTC) + timedelta(minutes=10)
        return {
            "access_key_id": current.access_key,
            "secret_access_key": current.secret_key,
            "token": current.session_token,
            "expires_at": None if isinstance(provider, StaticProvider) else soon,
        }

    return {**options, "credential_provider": keys}


_locations: dict[str, "Future[Location]"] = {}
_process = 0  # the process that uses buckets: forked children do not have obstore's threads


def locate(uri: str, *, folder: bool = False) -> tuple[Location, str]:
    """Return the bucket of a URI, created once for all threads, and the key of the object, not decoded."""
    global _process  # noqa: PLW0603 (of this process)
    if _process not in (0, os.getpid()):
        raise StorageError(
            "this process was forked after its parent had read from an object store",
            fix="start it with spawn, or fork before the first read from a store",
        )
    head, _, rest = uri.partition("://")
    bucket, _, key = rest.partition("/")
    name = f"{head}://{bucket}"
    future = _locations.get(name)
    if future is None:
        _process = os.getpid()
        own: Future[Location] = Future()
        future = _locations.setdefault(name, own)
        if future is own:
            try:
                own.set_result(Location(uri))
            except BaseException as error:
                _locations.pop(name, None)
                own.set_exception(error)
    location = future.result()
    if not key and not folder:
        raise StorageError(f"{uri} has no object key", fix=f"use {head}://bucket/key")
    key = key.rstrip("/")
    if key and not {"", ".", ".."}.isdisjoint(key.split("/")):
        fix = "use a key without '.', '..' or empty parts between slashes"
        raise StorageError(f"refused key {key!r} in {uri}", fix=fix)
    return location, key


def forget_locations() -> None:
    """Drop all buckets, so that the environment is read again on the next use."""
    _locations.clear()
    web.reset_clients()


@contextmanager
def translate_errors(location: Location, uri: str, verb: str) -> Iterator[None]:
    """Convert obstore's errors to StorageErrors, and log if the store does not respond."""
    try:
        with outages.report_outages(location.server):
            yield
    except BaseException as error:
        if not isinstance(error, exceptions.BaseError | FileNotFoundError | ValueError) and not is_panic(
            error
        ):
            raise
        problem = to_storage_error(error, location.kind, uri, verb)
        if isinstance(problem, RangesNotSupported):
            location.supports_ranges = False
        elif not isinstance(problem, MissingError | TransientError):
            forget_locations()  # In a notebook the user may correct the environment.
            if problem.transient and not http_status(error):
                problem = probe(location.server, uri, 5.0) or problem
        raise problem from error


def is_panic(error: BaseException) -> bool:
    """Return whether obstore panicked; the exception class cannot be imported."""
    return type(error).__name__ == "PanicException"


def http_status(error: BaseException) -> int:
    """Return the HTTP status in an obstore error; 0 if there was no response."""
    match = re.search(r"status code: (\d{3})", str(error))
    if match:
        return int(match[1])
    return 301 if "redirect without LOCATION" in str(error) else 0


def to_storage_error(error: BaseException, kind: str, uri: str, verb: str) -> StorageError:
    """Convert an obstore error to a StorageError that names the URI and the remedy."""
    text, status = str(error), http_status(error)
    if isinstance(error, exceptions.PreconditionError) or status in (412, 416):
        return changed_error(uri, status)
    if "non-partial response" in text or "Range request not supported" in text:
        return RangesNotSupported(f"{uri} cannot be read in parts")
    code = next(iter(re.findall(r"<Code>(\w+)</Code>", text)), "")
    if code in _TRANSIENT:
        fix = (
            "the store received different bytes than were sent: check the network and the proxies on the "
            "way to it"
        )
        return TransientError(f"cannot {verb} {uri}: {code}", fix=fix)
    if isinstance(error, FileNotFoundError) or status == 404:
        if code != "NoSuchBucket" and verb in ("read", "delete"):
            return missing_error(uri)
        fix = "create the bucket, or correct the URI"
        return StorageError(f"cannot {verb} {uri}: no such bucket", fix=fix)
    code = code or {301: "PermanentRedirect", 401: "AccessDenied", 403: "AccessDenied"}.get(status, "")
    reason, transient = code or f"status {status}", status in BUSY
    if not status:
        reason, transient = text.partition("\n")[0].strip()[:300], "HTTP error" in text
        is_known = isinstance(error, exceptions.BaseError)
        fix = RETRY_FIX if is_known else "check the URI, the endpoint and the keys"
        if isinstance(error, exceptions.InvalidPathError) or "invalid path" in reason:
            fix = "rename the object: without '.', '..' or empty parts between slashes"
    elif status in BUSY:
        fix = _FIXES.get(code, "the store is overloaded or down: run again later, what is finished is kept")
    elif kind == "gs":
        fix = f"check the permissions of this identity; {environment.GOOGLE_CREDENTIALS_FIX}"
    else:
        no_store = "check that the endpoint is an S3 endpoint, and read the store's log"
        fix = _FIXES.get(code, _REFUSED_FIX if status in (401, 403) else no_store)
    return StorageError(f"cannot {verb} {uri}: {reason}", fix=fix, transient=transient)


class _RemoteFile:
    """A remote file of one version. The first request returns its size and its first piece."""

    def __init__(self, uri: str) -> None:
        self.uri, self._get = uri, web.read_part if scheme(uri) in WEB else _read_part
        self.has_parts, self.size, self.sha256, self._etag, self._via = True, -1, "", "", ""
        self._unread: web.Part | None = None
        try:
            start = self._get(uri, 0, PIECE_BYTES)
        except (RangesNotSupported, RangePastEndError):  # An empty file has no ranges.
            self.has_parts = False
        else:
            self.size, self.sha256, self._etag, self._via = start.size, start.sha256, start.etag, start.uri
            self._unread = start

    def read_range(self, start: int, stop: int) -> Any:
        """Return the bytes from `start` to `stop`; raise if the file has changed."""
        data: Any = b""
        while len(data) < stop - start:  # A proxy may truncate an answer.
            begin, part = start + len(data), None
            if begin == 0:
                part, self._unread = self._unread, None
            try:
                part = part or self._get(self.uri, begin, stop, self._etag, self._via)
            except (MissingError, RangesNotSupported):
                raise changed_error(self.uri) from None
            if (part.size, part.etag) != (self.size, self._etag) or not len(part.data):
                raise changed_error(self.uri)
            data = bytes(data) + bytes(part.data) if data else part.data
        return data

    def pieces(self, start: int, stop: int, ahead: int = READ_THREADS) -> Iterator[Any]:
        """Yield a range in pieces; the next `ahead` pieces are read concurrently."""
        fetched: deque[Future[Any]] = deque()
        begin = start
        with DaemonThreadPool(min(ahead, 1 + (stop - start) // PIECE_BYTES), "read") as threads:
            while fetched or begin < stop:
                while begin < stop and len(fetched) <= ahead:
                    fetched.append(threads.submit(self.read_range, begin, min(begin + PIECE_BYTES, stop)))
                    begin += PIECE_BYTES
                yield wait_for(fetched.popleft())

    def blocks(self, sha256: str = "", ahead: int = READ_THREADS) -> Iterator[Any]:
        """Yield the content in order, and check its hash before the last buffer."""
        known, blocks = self.sha256, self.pieces(0, self.size, ahead)
        if not self.has_parts:
            known, blocks = _stream(self.uri)
        expected, digest, received = sha256 or known, hashlib.sha256(), 0
        for block in blocks:
            if expected:
                digest.update(block)
                received += len(block)
                if received == self.size:
                    check_digest(self.uri, digest.hexdigest(), expected, CorruptError)
            yield block
        if expected and not 0 < received == self.size:  # The size was unknown, or the file is empty.
            check_digest(self.uri, digest.hexdigest(), expected, CorruptError)


def _read_part(uri: str, start: int, stop: int, etag: str = "", via: str = "") -> web.Part:
    """Read a range of an object; see `web.read_part`."""
    location, key = locate(uri)
    if not location.supports_ranges:
        raise RangesNotSupported(uri)
    options: dict[str, Any] = {"range": (start, stop)}
    if etag and not etag.startswith("W/"):  # A weak ETag cannot be used with ranges.
        options["if_match"] = etag
    with translate_errors(location, uri, "read"):
        answer = obstore.get(location.reader, key, options=options)  # type: ignore[arg-type]
        data = answer.bytes()
    meta = answer.meta
    return web.Part(uri, meta["size"], meta["e_tag"] or "", str(answer.attributes.get("sha256", "")), data)


def _stream(uri: str) -> tuple[str, Iterator[Any]]:
    """Return the `sha256` attribute of an object ("" if none), and a stream of its content."""
    if scheme(uri) in WEB:
        return "", web.stream(uri)
    location, key = locate(uri)
    with translate_errors(location, uri, "read"):
        answer = obstore.get(location.writer, key)

    def blocks() -> Iterator[Any]:
        with translate_errors(location, uri, "read"):
            yield from answer.stream(min_chunk_size=_BLOCK_BYTES)

    return str(answer.attributes.get("sha256", "")), blocks()


@retry
def read_buffer(uri: str, sha256: str = "") -> Any:
    """Return a file's content as a buffer, after comparing its hash with `sha256` unless that is ""."""
    file = _RemoteFile(uri)
    if not file.has_parts or file.size > PIECE_BYTES:
        return b"".join(file.blocks(sha256))
    data = file.read_range(0, file.size)
    if expected := sha256 or file.sha256:
        check_digest(uri, hashlib.sha256(data).hexdigest(), expected, CorruptError)
    return data


@retry
def read_range(uri: str, start: int, length: int) -> bytes:
    """Return `length` bytes from `start` on; fewer if the file ends before."""
    if length <= PIECE_BYTES:
        try:
            get = web.read_part if scheme(uri) in WEB else _read_part
            return bytes(get(uri, start, start + length).data)
        except RangePastEndError:
            return b""
        except RangesNotSupported:
            pass
    file = _RemoteFile(uri)
    if not file.has_parts:
        return b"".join(file.blocks())[start : start + length]
    return b"".join(file.pieces(start, min(start + length, file.size)))


@retry
def download(uri: str, path: Path, sha256: str = "") -> None:
    """Download a file to a local path, and compare its hash with `sha256` unless that is ""."""
    with path.open("wb") as file:
        file.writelines(_RemoteFile(uri).blocks(sha256))


@retry
def open_reader(uri: str) -> IO[bytes]:
    """Open a file for reading and seeking; download it first if the server only sends complete files."""
    file = _RemoteFile(uri)
    if file.has_parts and file.size <= PIECE_BYTES:
        return io.BytesIO(b"".join(file.blocks()))
    if file.has_parts:
        return io.BufferedReader(_Reader(file), PIECE_BYTES)
    with tempfile.NamedTemporaryFile(prefix="kubedet-") as copied:
        download(uri, Path(copied.name))
        return open(copied.name, "rb")


class _Reader(io.RawIOBase):
    """A remote file as a raw stream for one thread.

    If it is read from start to end, its hash is checked before the last bytes are returned.
    """

    def __init__(self, file: _RemoteFile) -> None:
        super().__init__()
        self._file, self._position = file, 0
        self._blocks = self._read_from_position()
        self._rest = memoryview(b"")  # Unread bytes of the last block.

    def _read_from_position(self) -> Generator[Any, None, None]:
        """Yield the bytes from the current position on; after a seek, the first piece is read alone."""
        start, size = self._position, self._file.size
        if start == 0:
            yield from self._file.blocks(ahead=PIECES_AHEAD)
        elif start < size:
            yield self._file.read_range(start, min(start + PIECE_BYTES, size))
            yield from self._file.pieces(min(start + PIECE_BYTES, size), size, PIECES_AHEAD)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[
            whence
        ] + offset
        if position < 0:
            raise ValueError(f"negative position {position}")
        if position != self._position:
            self._position = position
            self._restart()
        return position

    def readinto(self, buffer: Any) -> int:
        if not self._rest:
            try:
                self._rest = memoryview(next(self._blocks, b""))
            except BaseException:
                self._restart()  # Otherwise the next read would report the end of the file.
                raise
        view = memoryview(buffer).cast("B")
        data, self._rest = self._rest[: len(view)], self._rest[len(view) :]
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        self._blocks.close()
        super().close()

    def _restart(self) -> None:
        self._blocks.close()
        self._blocks, self._rest = self._read_from_position(), memoryview(b"")


@retry
def state(uri: str) -> FileState | None:
    """Return a file's size, modification time and ETag; None if it is missing."""
    if scheme(uri) in WEB:
        return web.state(uri)
    location, key = locate(uri)
    with suppress(MissingError), translate_errors(location, uri, "read"):
        try:
            return _file_state(obstore.head(location.reader, key))
        except Exception as error:
            if http_status(error) in (301, 307, 400, 403):
                obstore.get(location.reader, key)  # The response to a HEAD request does not give the reason.
            raise
    return None


def scan(uri: str, recursive: bool) -> Iterator[tuple[str, FileState]]:
    """Yield the relative names and states of the objects under a prefix."""
    location, prefix = locate(uri, folder=True)
    skip, last, tries = len(prefix) + 1 if prefix else 0, None, 1
    with translate_errors(location, uri, "list"):
        while tries:
            pages: Any = obstore.list(location.reader, prefix or None, offset=last, chunk_size=1000)
            if not recursive:
                listing = run_in_background(
                    lambda: obstore.list_with_delimiter(location.reader, prefix or None)
                )
                pages = iter([listing["objects"]])
            try:
                while metas := run_in_background(partial(next, pages, None)):
                    for meta in metas:
                        if meta["path"][skip:]:  # Skip the marker of the folder itself.
                            yield meta["path"][skip:], _file_state(meta)
                    last, tries = metas[-1]["path"], 1
                tries = 0
            except exceptions.GenericError:  # obstore does not retry a page that is cut off.
                tries += 1
                if tries > MAX_TRIES:
                    raise
    if last is not None or location.kind == "gs":
        return
    try:  # obstore reports an empty listing if the response is e.g. a web page.
        client = environment.read_settings(location.kind).client
        next(iter(client.list_objects(uri.split("/")[2], prefix=prefix)), None)
    except (MinioException, ParseError, ValueError) as error:
        fix = "check that the endpoint is an S3 endpoint, not a console or a proxy's page"
        raise StorageError(f"cannot list {uri}: the response is not from an object store", fix=fix) from error
    except HTTPError:
        pass  # obstore's request did succeed.


def _file_state(meta: "obstore.ObjectMeta") -> FileState:
    modified = meta["last_modified"]
    assert isinstance(modified, datetime)
    # obstore returns the beginning of 1970 if a server does not report a time.
    return FileState(meta["size"], modified.timestamp() or None, (meta["e_tag"] or "").strip('"'))


@retry
def delete(uri: str) -> None:
    """Delete an object, if it exists."""
    location, key = locate(uri)
    with suppress(MissingError), translate_errors(location, uri, "delete"):
        obstore.delete(location.reader, key)


def write(
    uri: str, source: IO[bytes], *, sha256: str = "", confirm: bool = False, create: bool = False
) -> bool:
    """Write an object with its sha256 as an attribute; the store verifies the hash of each request.

    `confirm` reads it back, and rewrites it if it differs. `create` writes it only if it does not exist.
    Returns whether it was written.
    """
    location, key = locate(uri)
    if create and state(uri) is not None:
        return False
    sha256 = sha256 or hashlib.file_digest(source, "sha256").hexdigest()  # type: ignore[arg-type]
    size = source.seek(0, io.SEEK_END)
    kind = mimetypes.guess_type(key)[0] or "application/octet-stream"  # For browsers.
    interrupted, ended = threading.Event(), threading.Event()

    def parts(length: int) -> Iterator[bytes]:
        while block := source.read(length):
            if interrupted.is_set():
                raise Interrupted(f"{uri} is not written any more")
            yield block

    def send() -> bool:
        put = partial(obstore.put, location.writer, key, attributes={"Content-Type": kind, "sha256": sha256})
        source.seek(0)
        if size > 2 * PART_BYTES:
            length = max(PART_BYTES, -(-size // _MAX_PARTS))
            put(parts(length), chunk_size=length, max_concurrency=_UPLOAD_THREADS)
            return True
        try:
            put(source.read(), mode="create" if create else "overwrite", use_multipart=False)
        except (
            exceptions.AlreadyExistsError
        ):  # Another process was first, or the answer to our first try was lost.
            with suppress(FileNotFoundError):
                answer = obstore.get(location.writer, key)
                return (answer.meta["size"], answer.attributes.get("sha256", "")) == (size, sha256)
            return False
        return True

    @retry
    def attempt() -> bool:
        ended.clear()
        try:
            with translate_errors(location, uri, "write"):
                written = send()
        finally:
            ended.set()
        if confirm:  # Some stores lose or alter objects that they acknowledged.
            try:
                for _ in _RemoteFile(uri).blocks(sha256):
                    pass
            except (MissingError, CorruptError) as error:
                raise TransientError(
                    f"{uri} is missing or differs, although the store acknowledged it",
                    fix="check the store's log and disks, then run the command again",
                ) from error
        return written

    try:
        return attempt()
    except BaseException:
        # The upload may continue in another thread; it removes its parts when reading the source fails.
        interrupted.set()
        ended.wait(_ABORT_SECONDS)
        raise
