"""Where the pieces of a file go as they arrive, in any order and from several threads."""

import io
import os
import threading
from collections.abc import Iterator
from typing import Protocol

_BLOCK = 256 * 1024


class Sink(Protocol):
    """Where the pieces go."""

    def resize(self, size: int) -> None:
        """Make room for this many bytes, before the first; or cut off the rest, after the last."""

    def write(self, place: int, data: bytes) -> None:
        """Put bytes at a place. Threads may call it side by side for places that do not overlap."""

    def blocks(self, start: int, stop: int) -> Iterator[bytes]:
        """Give back what was written, in blocks."""


class FileSink:
    """A local file."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def resize(self, size: int) -> None:
        os.ftruncate(self._descriptor, size)

    def write(self, place: int, data: bytes) -> None:
        while data:
            written = os.pwrite(self._descriptor, data, place)
            place, data = place + written, data[written:]

    def blocks(self, start: int, stop: int) -> Iterator[bytes]:
        for place in range(start, stop, _BLOCK):
            yield os.pread(self._descriptor, min(_BLOCK, stop - place), place)


class MemorySink:
    """A buffer."""

    def __init__(self) -> None:
        self._buffer = io.BytesIO()
        self._lock = threading.Lock()

    def resize(self, size: int) -> None:
        with self._lock:
            if self._buffer.getbuffer().nbytes < size:
                # These zeros are pages that the system gives when they are first written to, and
                # become the buffer without a copy: nothing waits for 64 MB of them.
                self._buffer = io.BytesIO(bytes(size))
            else:
                self._buffer.truncate(size)

    def write(self, place: int, data: bytes) -> None:
        with self._lock:
            self._buffer.seek(place)
            self._buffer.write(data)

    def blocks(self, start: int, stop: int) -> Iterator[bytes]:
        for place in range(start, stop, _BLOCK):
            with self._lock:
                self._buffer.seek(place)
                data = self._buffer.read(min(_BLOCK, stop - place))
            yield data

    def value(self) -> bytes:
        """Return what was written, without a copy."""
        return self._buffer.getvalue()
