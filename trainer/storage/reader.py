"""A file on a server as one reads a local one: anywhere, or in order with pieces fetched ahead."""

import io
import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import IO, Any

from trainer.storage import failures, reads
from trainer.storage.content_hash import Check, Content
from trainer.storage.parallel import Workers
from trainer.storage.store import Place, locate

_BUFFER = 128 * 1024


def open_reader(uri: str, ahead: int) -> IO[bytes]:
    """Return a seekable binary file that holds at most `ahead` + 2 pieces in memory.

    Where a server gives files only whole it is copied to disk.

    Raises:
        StorageError: it is missing or cannot be read; later too, from any of its methods.
    """
    place = locate(uri)
    try:
        content, first = reads.begin(place)
        if content.size <= reads.PIECE:
            return io.BytesIO(next(reads.checked(place, content, "", [first()])))
        return io.BufferedReader(_Reader(place, content, first, ahead), _BUFFER)
    except failures.Whole:
        pass
    file = tempfile.TemporaryFile(prefix="kubedet-", buffering=0)  # noqa: SIM115 (the caller closes it)
    try:
        reads.copy_whole(uri, file, "")
    except BaseException:
        file.close()
        raise
    file.seek(0)
    return io.BufferedReader(file, _BUFFER)


class _Reader(io.RawIOBase):
    """What `open_reader` returns, without a buffer. One thread at a time.

    Read from the start to the end in order, the hash is checked, where one is known, before the last bytes
    are given.
    """

    def __init__(self, place: Place, content: Content, first: Callable[[], Any], ahead: int) -> None:
        super().__init__()
        self._content, self._ahead = content, max(1, ahead)
        self._workers = Workers(self._ahead, "read")
        self._piece = partial(reads.piece, place, content)
        self._pieces: dict[int, Future[Any]] = {}
        self._check = Check(place.uri, content)
        self._place = self._hashed = 0
        self._last = -1
        self._pieces[0] = self._workers.submit(first)
        self._workers.result(self._pieces[0])  # Whether there are parts to be had shows with the first.

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
        number, start = divmod(self._place, reads.PIECE)
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
            most = (self._content.size - 1) // reads.PIECE
            for one in range(number, min(number + ahead, most) + 1):
                if one not in self._pieces:
                    end = min((one + 1) * reads.PIECE, self._content.size)
                    self._pieces[one] = self._workers.submit(self._piece, one * reads.PIECE, end)
            self._last = number
            self._forget()
        data = self._workers.result(self._pieces[number])
        if number == self._hashed:
            self._check.update(data)
            self._hashed += 1
            if self._hashed * reads.PIECE >= self._content.size:
                self._check.compare()
        return data

    def _forget(self) -> None:
        """Drop what is least likely to be read: what lies behind, then what lies far ahead."""

        def distance(number: int) -> int:
            return number - self._last if number >= self._last else self._last - number + self._ahead

        for number in sorted(self._pieces, key=distance)[self._ahead + 2 :]:
            self._pieces.pop(number).cancel()
