"""Objects written to a store: whole or not at all, checked on the way, in parts if they are large.

Every object carries its sha256 as an attribute, so that it can be checked when it is read, whatever the store
makes of its ETag. With each request goes a hash of its body, signed or as a checksum, with which the store
compares what it gets. A store that does not (there are such) keeps what came; then the attribute, or a hash
in a manifest, tells whoever reads it.
"""

import hashlib
import mimetypes
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal

import obstore
from obstore.exceptions import AlreadyExistsError

from trainer.base.errors import Interrupted
from trainer.storage import attempts, failures, reads, traffic
from trainer.storage.parallel import watch
from trainer.storage.store import locate, state

PART = 8 * 1024 * 1024
"""Bytes of a part; more where an object would have too many parts."""

_MOST_PARTS = 10_000
_SENDERS = 6
_ABORT_SECONDS = 5.0
"""How long an upload that is interrupted may take to remove its parts, which no listing shows."""


def write_bytes(uri: str, data: bytes, *, confirm: bool = False) -> None:
    """Write an object; `confirm` reads it back, and writes it again where it is not what was sent."""
    _Upload(uri, data, len(data), hashlib.sha256(data).hexdigest(), confirm).run("overwrite")


def upload(path: Path, uri: str, sha256: str = "", *, confirm: bool = False) -> None:
    """Write a local file's content as an object; in parts if it is large.

    Args:
        path: the file.
        uri: of the object.
        sha256: of the content, where it is known.
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
    writing = _Upload(uri, data, len(data), hashlib.sha256(data).hexdigest())
    return state(uri) is None and writing.run("create")


class _Upload:
    """One object that is written, with as many attempts as it takes."""

    def __init__(
        self, uri: str, source: bytes | BinaryIO, size: int, sha256: str, confirm: bool = False
    ) -> None:
        self._confirm = confirm
        self._place = locate(uri, "write")
        self._source, self._size, self._sha256 = source, size, sha256
        kind = mimetypes.guess_type(self._place.key)[0] or "application/octet-stream"
        self._attributes = {"Content-Type": kind, "sha256": sha256}  # a browser wants to know what it is
        self._is_given_up = watch()
        self._interrupted = False
        self._ended = threading.Event()

    def run(self, mode: Literal["create", "overwrite"]) -> bool:
        """Write it; returns False where there is another one that was not to be overwritten."""
        try:
            return attempts.repeated(lambda: self._written(mode))
        except BaseException:
            # An upload that is under way in another thread removes its parts when its source fails.
            self._interrupted = True
            self._ended.wait(_ABORT_SECONDS)
            raise

    def _written(self, mode: Literal["create", "overwrite"]) -> bool:
        """Write it, and see that it is there: stores have lost or altered what they acknowledged.

        Raises:
            Spoiled: it is not; the whole may go well at the next try.
        """
        written = self._place.call("write", lambda: self._send(mode))
        if self._confirm:
            uri = self._place.uri
            try:
                reads.confirm(uri, self._sha256)
            except failures.Absent:
                raise failures.unkept(uri, "it is not there") from None
            except failures.Damaged:
                raise failures.unkept(uri, "it came back altered") from None
        return written

    def _send(self, mode: Literal["create", "overwrite"]) -> bool:
        self._ended.clear()
        try:
            if self._size <= 2 * PART:
                traffic.written(self._size)
                self._put(self._content(), mode=mode, use_multipart=False)
            else:
                length = max(PART, -(-self._size // _MOST_PARTS))
                self._put(self._parts(length), chunk_size=length, max_concurrency=_SENDERS)
            return True
        except AlreadyExistsError:
            if mode == "create":
                # Somebody else was first, or the answer to an attempt of ours was lost.
                return self._is_there()
            raise
        except Exception as error:
            # The last request of an upload may have been answered, and the answer been lost.
            if "NoSuchUpload" in str(error) and self._is_there():
                return True
            raise
        finally:
            self._ended.set()

    def _put(self, source: Any, **options: Any) -> None:
        assert self._place.store is not None, "only addresses of the web have none"
        obstore.put(self._place.store, self._place.key, source, attributes=self._attributes, **options)

    def _content(self) -> bytes:
        if isinstance(self._source, bytes):
            return self._source
        self._source.seek(0)
        return self._source.read()

    def _parts(self, length: int) -> Iterator[Any]:
        if isinstance(self._source, bytes):
            whole = memoryview(self._source)
            blocks: Iterator[Any] = (whole[at : at + length] for at in range(0, self._size, length))
        else:
            self._source.seek(0)
            blocks = iter(partial(self._source.read, length), b"")
        for block in blocks:
            if self._interrupted or self._is_given_up():
                raise Interrupted(f"{self._place.uri} is not written any more")
            traffic.written(len(block))
            yield block

    def _is_there(self) -> bool:
        """Tell whether the object is there as we write it."""
        try:
            answer = self._place.get()
        except FileNotFoundError:
            return False
        return answer.meta["size"] == self._size and answer.attributes.get("sha256") == self._sha256
