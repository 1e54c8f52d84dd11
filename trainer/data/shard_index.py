"""Reads samples of shards in any order, using the index.

The reader announces the shards that it needs next, and these are copied to the cache in that order. A shard
that is not cached yet is read from the store range by range. The processes of a machine share the copies (see
trainer/storage/cache.py).
"""

import hashlib
import json
import logging
import os
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from trainer import storage
from trainer.base.daemon_threads import DaemonThreadPool
from trainer.base.errors import DataError, StorageError
from trainer.base.json_files import parse
from trainer.base.os_errors import translate_oserror
from trainer.data.ground_truth import Classes, to_coco
from trainer.data.raw_folder import parse_npy
from trainer.data.samples import Sample
from trainer.data.shard_folder import (
    REPAIR_FIX,
    SAMPLE,
    Shard,
    Sidecar,
    mark_damaged,
    read_checked,
    read_index,
    read_sidecars,
)
from trainer.storage.cache import FOLDER_VARIABLE, LIMIT_VARIABLE, CacheBusy, CopyCache

_PIECE = 4 * 1024 * 1024
_MAX_DOWNLOADS = 2
logger = logging.getLogger(__name__)


class ShardCache(CopyCache):
    """A cache of shards in one folder, shared by threads and processes."""

    _warned = False

    def fetch(
        self, uri: str, sha256: str, size: int, is_cancelled: Callable[[], bool] = lambda: False
    ) -> bool:
        """Copy a shard to the cache; return False if there is no room or the folder is read-only.

        Raises:
            CacheBusy: another process or thread is fetching it, or `is_cancelled`, which is called between
                pieces, returned True.
        """

        def copy(path: Path) -> None:
            """Download the shard piece by piece in this thread, so that the process can exit at any time."""
            for _ in range(_MAX_DOWNLOADS):
                digest = hashlib.sha256()
                with path.open("wb") as file:
                    for start in range(0, size, _PIECE):
                        if is_cancelled():
                            raise CacheBusy
                        data = storage.read_range(uri, start, min(_PIECE, size - start))
                        digest.update(data)
                        file.write(data)
                if digest.hexdigest() == sha256:
                    return
            folder, _, tar = uri.rpartition("/")
            mark_damaged(folder, tar)
            problem = f"its sha256 is {digest.hexdigest()}, not {sha256}, on every read"
            raise StorageError(f"{uri} is damaged: {problem}", fix=REPAIR_FIX.format(folder))

        name = f"{sha256}.tar"
        if (self.folder / name).exists():
            return True
        if self.configured_limit == 0:
            return False
        try:
            os.close(self.add(name, size, copy))
        except OSError as error:  # The cache folder has a problem; the store would raise a StorageError.
            if not self._warned:
                self._warned = True
                logger.warning(
                    "shards are not cached in %s: %s; images are read from the store one by one instead "
                    "(%s sets the folder, %s the maximum gigabytes)",
                    self.folder,
                    error.strerror or error,
                    FOLDER_VARIABLE,
                    LIMIT_VARIABLE,
                )
            return False
        return True


_OPEN_FILES = 256
_FETCHERS = 8
_BUSY_SECONDS = 0.2
_TRIES = 3


class ShardFiles:
    """Reads ranges of shards; may be used by any number of threads."""

    def __init__(self, uri: str, shards: Sequence[Shard], cache: ShardCache) -> None:
        """Set the folder, its shards, and the cache, which is used unless the folder is local."""
        self._uris = [storage.join(uri, shard.name) for shard in shards]
        self._shards, self._cache = shards, cache
        self._local = storage.is_local(uri)
        self._files: OrderedDict[int, _OpenFile] = OrderedDict()
        self._failed: dict[int, StorageError] = {}
        self._wanted: set[int] = set()
        self._in_flight: set[int] = set()
        self._fetchers = DaemonThreadPool(_FETCHERS, "fetch-shards")
        self._lock = threading.Lock()

    def read(self, shard: int, start: int, stop: int) -> bytes:
        """Return a range of a shard; it is shorter if a local file ends before `stop`."""
        file = self._open(shard)
        if file is not None:
            return os.pread(file.descriptor, stop - start, start)
        if shard in self._failed:
            raise self._failed[shard]
        return storage.read_range(self._uris[shard], start, stop - start)

    def drop(self, shard: int) -> None:
        """Remove the cached copy of a shard that has incorrect bytes."""
        with self._lock:
            if self._files.pop(shard, None) is not None and not self._local:
                self._cache.drop(f"{self._shards[shard].sha256}.tar")

    def prefetch(self, shards: Sequence[int]) -> None:
        """Start to fetch these shards in this order, and close all others."""
        if self._local:
            return
        with self._lock:
            self._wanted = set(shards)
            for shard in self._files.keys() - self._wanted:
                del self._files[shard]
            for shard in shards:
                if shard not in self._files.keys() | self._failed.keys() | self._in_flight:
                    self._in_flight.add(shard)
                    self._fetchers.submit(self._fetch, shard)

    def _fetch(self, shard: int) -> None:
        """Fetch a shard, unless it is no longer needed or does not fit into the cache."""
        uri, expected = self._uris[shard], self._shards[shard]
        try:
            while shard in self._wanted:
                try:
                    is_here = self._cache.fetch(
                        uri, expected.sha256, expected.bytes, lambda: shard not in self._wanted
                    )
                    if is_here and shard in self._wanted:
                        self._open(shard)  # Keep it open, so that it is not evicted.
                    break
                except CacheBusy:
                    time.sleep(_BUSY_SECONDS)
        except StorageError as error:
            self._failed[shard] = error
        finally:
            with self._lock:
                self._in_flight.discard(shard)

    def _open(self, shard: int) -> "_OpenFile | None":
        with self._lock:
            file = self._files.get(shard)
            if file is not None:
                self._files.move_to_end(shard)
                return file
        if self._local:
            with translate_oserror(self._uris[shard], "read"):
                path = storage.local_path(self._uris[shard])
                file = _OpenFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        else:
            expected = self._shards[shard]
            descriptor = self._cache.open(f"{expected.sha256}.tar", expected.bytes)
            if descriptor is None:
                return None
            file = _OpenFile(descriptor)
        with self._lock:
            # A removed file is closed when the last reading thread releases it.
            self._files[shard] = file
            while len(self._files) > _OPEN_FILES:
                self._files.popitem(last=False)
        return file


class _OpenFile:
    """A file descriptor that is closed when it is garbage-collected."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


def data_root_of(shards_uri: str) -> str:
    """Return the data root of <data_root>/shards/<fingerprint>."""
    return storage.parent(storage.parent(shards_uri))


class ShardDataset:
    """The samples of one split, which any number of threads may read in any order."""

    def __init__(self, uri: str, split: str, cache: ShardCache | None = None) -> None:
        """Read the index of a folder of shards; `cache` is used for shards in an object store."""
        self.uri, self.split = uri, split
        self._cache = cache
        index = read_index(uri)
        if split not in index.splits:
            split_names = ", ".join(index.splits)
            fix = f"splits are: {split_names or 'none'}"
            raise DataError(f"no split {split!r} in the shards {uri}", fix=fix)
        self.index = index
        self.classes = Classes(index.categories, index.hierarchy)
        self.categories = self.classes.categories  # In COCO's form, with original_id.
        self.fingerprint = index.fingerprint
        self.shards = index.splits[split].shards
        name = f"{split}.samples.npy"
        where = storage.join(uri, name)
        self.samples = parse_npy(where, read_checked(index, name), REPAIR_FIX.format(uri))
        if self.samples.dtype != SAMPLE or len(self.samples) != index.splits[split].samples:
            raise DataError(f"{where} is damaged: it differs from the index", fix=REPAIR_FIX.format(uri))
        self._files = ShardFiles(uri, self.shards, cache or ShardCache())

    def __len__(self) -> int:
        return len(self.samples)

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardDataset, (self.uri, self.split, self._cache)

    @property
    def image_ids(self) -> np.ndarray:
        """Ids of the images in shard order, int64 [N]."""
        return self.samples["image_id"]

    @property
    def shard_sizes(self) -> list[int]:
        """Number of samples in each shard, in order."""
        return [shard.samples for shard in self.shards]

    @property
    def sizes(self) -> np.ndarray:
        """Width and height of the images in pixels, int32 [N, 2]."""
        return np.stack([self.samples["width"], self.samples["height"]], axis=1)

    def annotations(self) -> dict[str, Any]:
        """Return the cleaned ground truth of the split in COCO's format; only that of train is not stored."""
        if self.split != "train":
            name = f"annotations/{self.split}.json"
            data = read_checked(self.index, name)
            return parse(dict[str, Any], storage.join(self.uri, name), data, REPAIR_FIX.format(self.uri))
        return to_coco(chain.from_iterable(part.rows for part in self._sidecars()), self.classes)

    def _sidecars(self) -> Iterator[Sidecar]:
        return read_sidecars(self.uri, [shard.name.removesuffix(".tar") for shard in self.shards])

    def class_pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Return pairs of a sample and a class in it, without crowds: indices and labels, int64 [K]."""
        pairs, first = [np.zeros((0, 2), np.int64)], 0
        for sidecar in self._sidecars():
            for number, row in enumerate(sidecar.rows, first):
                labels = {box["category_id"] for box in row["annotations"] if not box["iscrowd"]}
                pairs.append(np.array([(number, label) for label in sorted(labels)], np.int64).reshape(-1, 2))
            first += len(sidecar.rows)
        samples, labels_of_samples = np.concatenate(pairs).T
        return samples, labels_of_samples

    def prefetch(self, indices: np.ndarray) -> None:
        """Start to fetch the shards of the samples that are read next, and close all others."""
        shards, first = np.unique(self.samples["shard"][indices], return_index=True)
        self._files.prefetch(shards[np.argsort(first)].tolist())

    def read(self, index: int) -> Sample:
        """Return a sample; if its bytes are incorrect, drop the cached copy and read them again.

        Raises:
            DataError: the shard is damaged.
            StorageError: it is missing or cannot be read.
        """
        row = self.samples[index]
        shard, start, _, json_start, json_length = row.item()[:5]
        for _ in range(_TRIES):
            sample = parse_sample(row, self._files.read(shard, start, json_start + json_length))
            if sample is not None:
                return sample
            self._files.drop(shard)
        name = self.shards[shard].name
        mark_damaged(self.uri, name)
        uri = storage.join(self.uri, name)
        raise DataError(f"{uri} is damaged: it differs from the index", fix=REPAIR_FIX.format(self.uri))


def parse_sample(row: np.void, data: bytes) -> Sample | None:
    """Parse a sample from its range of the shard (see SAMPLE); None if the bytes do not match the row."""
    _, offset, length, json_offset, json_length, image_id, _, _, crc32 = row.item()
    jpeg, text = data[:length], data[json_offset - offset :]
    if len(text) != json_length or zlib.crc32(text, zlib.crc32(jpeg)) != crc32:
        return None
    try:
        record = json.loads(text)
    except ValueError:
        return None
    sound = isinstance(record, dict) and record.get("image_id") == image_id and jpeg[:2] == b"\xff\xd8"
    return (jpeg, record) if sound else None
