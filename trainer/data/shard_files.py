"""Reads a split's shards: from the local disk, from cached copies, or from the store.

The reader announces which shards it reads next: those are prefetched whole, in that order. What is not
cached yet is read from the store, range by range, so that nobody waits for a whole shard.
"""

import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

from trainer import storage
from trainer.base.errors import StorageError
from trainer.base.os_errors import explained
from trainer.data.shard_cache import Fetched, ShardCache

_OPEN_FILES = 256
_FETCHERS = 8
_BUSY_SECONDS = 0.2
_TRIES = 3


class ShardFiles:
    """Reads ranges of shards for any number of threads."""

    def __init__(self, uri: str, shards: Sequence[dict[str, Any]], cache: ShardCache) -> None:
        """Set the shards; nothing is read yet.

        Args:
            uri: their folder.
            shards: name, bytes and sha256 of each, as in the index.
            cache: for copies of shards that are not on a local disk.
        """
        self._uris = [storage.join(uri, shard["name"]) for shard in shards]
        self._shards, self._cache = shards, cache
        self._local = storage.is_local(uri)
        self._files: OrderedDict[int, _File] = OrderedDict()
        self._wrong: Counter[int] = Counter()
        self._failed: dict[int, StorageError] = {}
        self._expected: list[int] = []
        self._in_flight: set[int] = set()
        self._busy_until: dict[int, float] = {}
        self._fetchers = 0
        self._changed = threading.Condition()

    def read(self, shard: int, *spans: tuple[int, int]) -> list[bytes]:
        """Return ranges of a shard, near each other and in order, each given as start and length.

        They are shorter where a local file ends before.

        Raises:
            StorageError: it is missing, cannot be read, or arrived damaged when it was fetched.
        """
        file = self._open(shard)
        if file is not None:
            return [file.read(start, length) for start, length in spans]
        if shard in self._failed:
            raise self._failed[shard]
        first, last = spans[0][0], sum(spans[-1])
        data = storage.read_range(self._uris[shard], first, last - first)
        return [data[start - first : start - first + length] for start, length in spans]

    def distrust(self, shard: int) -> bool:
        """Drop the copy of a shard that gave wrong bytes; tell whether to read again."""
        if self._local:
            return False
        with self._changed:
            self._wrong[shard] += 1
            if self._files.pop(shard, None) is not None:
                self._cache.drop(self._shards[shard]["sha256"])
            return self._wrong[shard] < _TRIES

    def expect(self, shards: Sequence[int]) -> None:
        """Prefetch these shards in this order, and close all others."""
        if self._local:
            return
        with self._changed:
            self._expected = list(shards)
            for shard in self._files.keys() - set(shards):
                del self._files[shard]
            while self._fetchers < min(_FETCHERS, len(self._expected)):
                self._fetchers += 1
                threading.Thread(target=self._fetch, name="fetch-shards", daemon=True).start()
            self._changed.notify_all()

    def _fetch(self) -> None:
        """Fetch the expected shards; end when all are here, or when one does not fit."""
        try:
            while (shard := self._next()) is not None:
                outcome = None
                try:
                    outcome = self._cache.fetch(
                        self._uris[shard], self._shards[shard]["sha256"], self._shards[shard]["bytes"],
                        lambda shard=shard: shard not in self._expected,  # type: ignore[misc]
                    )  # fmt: skip
                except StorageError as error:
                    self._failed[shard] = error
                finally:
                    with self._changed:
                        self._in_flight.discard(shard)
                if outcome is Fetched.FULL:
                    return
                with self._changed:
                    if outcome is Fetched.BUSY:
                        self._busy_until[shard] = time.monotonic() + _BUSY_SECONDS
                    still_expected = shard in self._expected
                if outcome is Fetched.THERE and still_expected:
                    self._open(shard)  # An open copy is not evicted.
        finally:
            with self._changed:
                self._fetchers -= 1

    def _next(self) -> int | None:
        """Choose the first expected shard that is not here and that nobody else is fetching."""
        with self._changed:
            while remaining := [
                shard
                for shard in self._expected
                if shard not in self._files and shard not in self._in_flight and shard not in self._failed
            ]:
                now = time.monotonic()
                for shard in remaining:
                    if self._busy_until.get(shard, now) <= now:
                        self._in_flight.add(shard)
                        return shard
                self._changed.wait(_BUSY_SECONDS)
        return None

    def _open(self, shard: int) -> "_File | None":
        with self._changed:
            file = self._files.get(shard)
            if file is not None:
                self._files.move_to_end(shard)
                return file
        if self._local:
            with explained(self._uris[shard], "read"):
                path = storage.local_path(self._uris[shard])
                file = _File(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        else:
            descriptor = self._cache.open(self._shards[shard]["sha256"], self._shards[shard]["bytes"])
            if descriptor is None:
                return None
            file = _File(descriptor)
        with self._changed:
            # An evicted file is closed when the last thread that reads it drops it.
            self._files[shard] = file
            while len(self._files) > _OPEN_FILES:
                self._files.popitem(last=False)
        return file


class _File:
    """A file that is read at any place by any thread, and closed when nobody uses it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self, start: int, length: int) -> bytes:
        return os.pread(self._descriptor, length, start)

    def __del__(self) -> None:
        os.close(self._descriptor)
