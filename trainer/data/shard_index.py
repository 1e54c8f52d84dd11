"""Reads the samples of shards at random, by their index.

Shards are read from the local disk, from cached copies, or from the store. The reader announces which shards
it reads next: those are copied to the cache in that order. Until a shard is cached it is read from the store
range by range, so that nobody waits for a whole shard. The copies are shared by the processes of a machine
(see trainer/storage/copies.py) and named by their sha256.
"""

import hashlib
import io
import json
import logging
import os
import threading
import time
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import IO, Any

import numpy as np

from trainer import storage
from trainer.base.errors import DamagedError, DataError, StorageError
from trainer.base.os_errors import translate_oserror
from trainer.data.ground_truth import Classes, ground_truth
from trainer.data.shard_folder import (
    REPAIR,
    SAMPLE,
    Shard,
    ShardIndex,
    Sidecar,
    blame,
    note,
    read_index,
    read_known,
    sidecars,
)
from trainer.storage.copies import FOLDER, LIMIT, Busy, Copies
from trainer.storage.records import decode

_PIECE = 4 * 1024 * 1024
_TIMES = 2
logger = logging.getLogger(__name__)


class Fetched(Enum):
    """The outcome of fetching a shard."""

    THERE = "there"
    BUSY = "busy"
    """Another process or thread is fetching it, or one whose hash begins alike."""
    FULL = "full"
    """No room: all copies are in use, or the folder cannot be written."""
    GIVEN_UP = "given up"


class _GivenUp(Exception):
    """The shard is not needed any more."""


class ShardCache:
    """The copies of one folder. Any number of objects, threads and processes may use it."""

    def __init__(self, folder: Path | None = None, limit: int | None = None) -> None:
        """Set the place; nothing is made before something is fetched.

        Args:
            folder: where copies are kept; by default as the environment says.
            limit: most bytes of all copies, 0 for none; by default as the environment says.

        Raises:
            ConfigError: the environment's limit is no number.
            StorageError: the default folder was made by another user.
        """
        self._copies = Copies(folder, limit)
        self._warned = False

    def open(self, sha256: str, size: int) -> int | None:
        """Return a descriptor of the copy of a shard, which stays as long as that is open; or None."""
        return self._copies.open(_name(sha256), size)

    def fetch(
        self, uri: str, sha256: str, size: int, given_up: Callable[[], bool] = lambda: False
    ) -> Fetched:
        """Copy a shard here, if it is not and there is room.

        Args:
            uri: the shard.
            sha256: its hash.
            size: its bytes.
            given_up: called now and then; tells whether the shard is not needed any more.

        Raises:
            StorageError: it cannot be read, or is damaged however often it is read.
        """
        if self._copies.path(_name(sha256)).exists():
            return Fetched.THERE
        if self._copies.asked == 0:
            return Fetched.FULL
        try:
            os.close(
                self._copies.add(_name(sha256), size, lambda path: _copy(uri, sha256, size, path, given_up))
            )
        except Busy:
            return Fetched.BUSY
        except _GivenUp:
            return Fetched.GIVEN_UP
        except OSError as error:  # Of the folder: what the store refuses is a StorageError.
            self._warn_once(error.strerror or str(error))
            return Fetched.FULL
        return Fetched.THERE

    def drop(self, sha256: str) -> None:
        """Remove a copy that turned out to be damaged; open descriptors stay readable."""
        self._copies.drop(_name(sha256))

    def _warn_once(self, reason: str) -> None:
        """Warn once that shards are not cached: training goes on, but reads more slowly."""
        if self._warned:
            return
        self._warned = True
        logger.warning(
            "shards are not kept in %s: %s; images are read from the store one by one instead "
            "(%s says where shards are kept, %s how many gigabytes they may take)",
            self._copies.folder, reason, FOLDER, LIMIT,
        )  # fmt: skip


def _name(sha256: str) -> str:
    return f"{sha256}.tar"


def _copy(uri: str, sha256: str, size: int, path: Path, given_up: Callable[[], bool]) -> None:
    """Read a shard, one piece after the other; shards are read in parallel, not their pieces.

    So a process that ends need not wait for threads of the storage, whose server may be dead.
    """
    for _ in range(_TIMES):
        digest = hashlib.sha256()
        with path.open("wb", buffering=0) as file:
            for start in range(0, size, _PIECE):
                if given_up():
                    raise _GivenUp
                data = storage.read_range(uri, start, min(_PIECE, size - start))
                digest.update(data)
                _write(file, data)
        if digest.hexdigest() == sha256:
            return
    folder, _, name = uri.rpartition("/")
    note(folder, name)
    raise StorageError(
        f"{uri} is damaged: its sha256 is {digest.hexdigest()}, not {sha256}, however often it is read",
        fix=REPAIR.format(folder),
    )


def _write(file: IO[bytes], data: bytes) -> None:
    """Write all of it: a disk that is nearly full takes a part, and refuses the next."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


_OPEN_FILES = 256
_FETCHERS = 8
_BUSY_SECONDS = 0.2
_TRIES = 3


class ShardFiles:
    """Reads ranges of shards for any number of threads."""

    def __init__(self, uri: str, shards: Sequence[Shard], cache: ShardCache) -> None:
        """Set the shards; nothing is read yet.

        Args:
            uri: their folder.
            shards: name, bytes and sha256 of each, as in the index.
            cache: for copies of shards that are not on a local disk.
        """
        self._uris = [storage.join(uri, shard.name) for shard in shards]
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
                self._cache.drop(self._shards[shard].sha256)
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
                        self._uris[shard], self._shards[shard].sha256, self._shards[shard].bytes,
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
            with translate_oserror(self._uris[shard], "read"):
                path = storage.local_path(self._uris[shard])
                file = _File(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        else:
            descriptor = self._cache.open(self._shards[shard].sha256, self._shards[shard].bytes)
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


def data_root_of(shards_uri: str) -> str:
    """Return the data root that shards lie in: <data_root>/shards/<fingerprint>."""
    return storage.parent(storage.parent(shards_uri))


class ShardDataset:
    """The samples of one split, read at random by any number of threads.

    Shards in an object store are read range by range, and those that are expected whole.
    """

    def __init__(self, uri: str, split: str, cache: ShardCache | None = None) -> None:
        """Open the index.

        Args:
            uri: folder that `shard` wrote.
            split: train, val or test.
            cache: copies of the shards of an object store; by default as the environment says.

        Raises:
            StorageError: there is no index.
            DataError: it has no such split, or its table of samples is damaged.
        """
        self.uri, self.split = uri, split
        self._cache = cache
        index = read_index(uri)
        if split not in index.splits:
            split_names = ", ".join(index.splits)
            raise DataError(
                f"no split {split!r} in the shards {uri}", fix=f"splits are: {split_names or 'none'}"
            )
        self.index = index
        self.names = Classes(index.categories, index.hierarchy)
        """The classes with their hierarchy."""
        self.categories = self.names.categories
        """id (the label), name and original_id of each class, as COCO's form has them."""
        self.fingerprint = index.fingerprint
        self.shards = index.splits[split].shards
        self.samples = _read_table(index, split)
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
        """Samples in each shard, in order; the samples of a shard follow each other."""
        return [shard.samples for shard in self.shards]

    @property
    def sizes(self) -> np.ndarray:
        """Width and height of the images in pixels, int32 [N, 2]."""
        return np.stack([self.samples["width"], self.samples["height"]], axis=1)

    def annotations(self) -> dict[str, Any]:
        """Ground truth of the split in COCO's form, cleaned; that of train is put together anew."""
        if self.split != "train":
            name = f"annotations/{self.split}.json"
            where = storage.join(self.uri, name)
            form = storage.Form(shape={"images": [{}], "annotations": [{}], "categories": [{}]})
            truth: dict[str, Any] = decode(
                where, read_known(self.uri, name, self.index.files.get(name)), form
            )
            return truth
        return ground_truth([row for sidecar in self._sidecars() for row in sidecar.rows], self.names)

    def _sidecars(self) -> Iterator[Sidecar]:
        names = [shard.name.removesuffix(".tar") for shard in self.shards]
        return (sidecar for _, sidecar in sidecars(self.uri, names))

    def classes(self) -> tuple[np.ndarray, np.ndarray]:
        """Which classes samples have, crowd regions left out: index and label of each pair, int64 [K]."""
        pairs, first = [np.zeros((0, 2), np.int64)], 0
        for sidecar in self._sidecars():
            for number, row in enumerate(sidecar.rows, first):
                labels = {box["category_id"] for box in row["annotations"] if not box["iscrowd"]}
                pairs.append(np.array([(number, label) for label in sorted(labels)], np.int64).reshape(-1, 2))
            first += len(sidecar.rows)
        samples, labels_of_samples = np.concatenate(pairs).T
        return samples, labels_of_samples

    def expect(self, indices: np.ndarray) -> None:
        """Announce which samples are read next: their shards are prefetched, all others closed."""
        shards, first = np.unique(self.samples["shard"][indices], return_index=True)
        self._files.expect(shards[np.argsort(first)].tolist())

    def read(self, index: int) -> tuple[bytes, dict[str, Any]]:
        """Return a sample: its JPEG, and {"image_id", "file_name", "width", "height", "annotations"}.

        Wrong bytes are read again, from the store if they came from a copy.

        Raises:
            DataError: the shard is damaged.
            StorageError: it is missing or cannot be read.
        """
        row = self.samples[index]
        shard, start, length, json_start, json_length = row.item()[:5]
        while True:
            data = self._files.read(shard, (start, length), (json_start, json_length))
            sample = parse_sample(row, *data)
            if sample is not None:
                return sample
            if not self._files.distrust(shard):
                raise blame(self.uri, self.split, self.shards[shard])


def _read_table(index: ShardIndex, split: str) -> np.ndarray:
    """Read the rows of SAMPLE of a split.

    Raises:
        DataError: they are other ones, or none.
        StorageError: the file is missing or cannot be read; DamagedError: it is not what was written.
    """
    uri, name = index.uri, f"{split}.samples.npy"
    where, known = storage.join(uri, name), index.files.get(name)
    table = None
    with suppress(ValueError, EOFError):
        if storage.is_local(where):
            # Straight into the array: for millions of samples two more copies would be slow.
            try:
                path = storage.local_copy(where, sha256=known.sha256 if known else "")
            except DamagedError as error:
                raise DamagedError(error.message, fix=REPAIR.format(uri)) from None
            with translate_oserror(where, "read"):
                table = np.load(path, allow_pickle=False)
        else:
            table = np.load(io.BytesIO(read_known(uri, name, known)), allow_pickle=False)
    if table is None or table.dtype != SAMPLE or len(table) != index.splits[split].samples:
        raise DataError(f"{where} is damaged: it differs from what the index says", fix=REPAIR.format(uri))
    return table


def parse_sample(row: np.void, jpeg: bytes, text: bytes) -> tuple[bytes, dict[str, Any]] | None:
    """Return JPEG and record of a sample from its bytes; None if they are not those of the row.

    Args:
        row: of SAMPLE.
        jpeg: the bytes where its JPEG is.
        text: the bytes where its JSON is.
    """
    _, _, length, _, json_length, image_id, _, _, crc32 = row.item()
    if len(jpeg) != length or len(text) != json_length or jpeg[:2] != b"\xff\xd8":
        return None
    if zlib.crc32(text, zlib.crc32(jpeg)) != crc32:
        return None
    try:
        record = json.loads(text)
    except ValueError:
        return None
    sound = isinstance(record, dict) and record.get("image_id") == image_id
    return (jpeg, record) if sound else None
