"""A file on a server as one reads a local one: anywhere, or from start to end with pieces fetched ahead."""

import io
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import IO, Any

from trainer.storage import connections
from trainer.storage.answers import Response
from trainer.storage.connections import Deadline
from trainer.storage.sinks import FileSink
from trainer.storage.transfer import PIECE, Check, Empty, Opener, Remote, fetch

_BUFFER = 128 * 1024


def open_reader(uri: str, open_range: Opener, ahead: int) -> IO[bytes]:
    """Return a seekable binary file that holds at most `ahead` + 2 pieces in memory.

    Where a server gives files only whole, and where there is nothing to give, it is copied to disk.

    Raises:
        StorageError: it is missing or cannot be read; later too, from any of its methods.
    """
    remote = Remote(uri, open_range)
    with suppress(Empty):
        with connections.until(Deadline(connections.PATIENCE.total)):
            first = remote.ask(0, PIECE)
        head = remote.head
        if head is not None and head.ranges and head.size is not None:
            return io.BufferedReader(_Reader(remote, first, head.size, ahead), _BUFFER)
        first[0].close()
    copy = tempfile.TemporaryFile(prefix="kubedet-", buffering=0)  # noqa: SIM115 (the caller closes it)
    try:
        fetch(uri, open_range, FileSink(copy.fileno()))
    except BaseException:
        copy.close()
        raise
    copy.seek(0)
    return io.BufferedReader(copy, _BUFFER)


class _Reader(io.RawIOBase):
    """What `open_reader` returns, without a buffer. One thread at a time.

    Read from the start to the end in order, the hash is checked, where the store tells one, before
    the last bytes are given.
    """

    def __init__(self, remote: Remote, first: tuple[Response, int], size: int, ahead: int) -> None:
        super().__init__()
        assert remote.head is not None
        self._remote, self._size, self._ahead = remote, size, max(1, ahead)
        self._pool = ThreadPoolExecutor(self._ahead, "read")
        self._pieces = {0: self._pool.submit(self._fetch, 0, first)}
        self._check = Check(remote.head, "", whole=True)
        self._place = self._hashed = 0
        self._last = -1

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"negative place {base + offset}")
        self._place = base + offset
        return self._place

    def readinto(self, buffer: Any) -> int:
        if self._place >= self._size:
            return 0
        number, start = divmod(self._place, PIECE)
        view = memoryview(buffer).cast("B")
        data = memoryview(self._piece(number))[start : start + len(view)]
        view[: len(data)] = data
        self._place += len(data)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._remote.close()
            self._pool.shutdown(cancel_futures=True)
            self._pieces.clear()
        super().close()

    def _piece(self, number: int) -> bytearray:
        """Return a piece; when the pieces are read one after the other, let the next ones come."""
        if number != self._last:
            ahead = self._ahead if number == self._last + 1 else 0
            for wanted in range(number, min(number + ahead, (self._size - 1) // PIECE) + 1):
                if wanted not in self._pieces:
                    self._pieces[wanted] = self._pool.submit(self._fetch, wanted)
            self._last = number
            self._forget()
        data = self._pieces[number].result()
        if number == self._hashed:
            self._check.update([data])
            self._hashed += 1
            if self._hashed * PIECE >= self._size:
                self._check.compare(self._remote.uri)
        return data

    def _forget(self) -> None:
        """Drop what is least likely to be read: what lies behind, then what lies far ahead."""

        def distance(number: int) -> int:
            return number - self._last if number >= self._last else self._last - number + self._ahead

        for number in sorted(self._pieces, key=distance)[self._ahead + 2 :]:
            self._pieces.pop(number).cancel()

    def _fetch(self, number: int, first: tuple[Response, int] | None = None) -> bytearray:
        start = number * PIECE
        data = bytearray(min(PIECE, self._size - start))

        def write(place: int, block: bytes) -> None:
            data[place - start : place - start + len(block)] = block

        self._remote.copy(start, start + len(data), write, first)
        return data
