"""Reads, checks and writes the files of a folder of shards.

A damaged file is marked by a file `<file>.damaged`, so that the next shard step rewrites it without having to
read all shards.
"""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
from pydantic.dataclasses import dataclass

from trainer import storage
from trainer.base.errors import DamagedError, StorageError
from trainer.base.json_files import STRICT
from trainer.data.problem_counts import Cases
from trainer.data.raw_manifest import Category
from trainer.data.statistics import SplitStatistics

VERSION = 5  # Increase it, also in `ShardIndex`, if the same raw images would give other shards.

INDEX = "index.json"
DAMAGE_SUFFIX = ".damaged"
REPAIR_FIX = "run `kubedet data verify --repair {}`, or run the command again that wrote it"
_READERS = 8

SAMPLE = np.dtype(
    [
        ("shard", "<i4"), ("offset", "<i8"), ("length", "<i4"), ("json_offset", "<i8"),
        ("json_length", "<i4"), ("image_id", "<i8"), ("width", "<i4"), ("height", "<i4"), ("crc32", "<u4"),
    ]
)  # fmt: skip
"""A row of a split's table of samples: the shard, the positions of JPEG and JSON, the size of the image, and
the CRC-32 (as in zlib) of JPEG and JSON together."""


@dataclass(config=STRICT, frozen=True)
class Shard:
    """A shard of a split, named after its tar file."""

    name: str
    samples: int
    boxes: int
    bytes: int
    sha256: str


@dataclass(config=STRICT, frozen=True)
class ShardSplit:
    """The shards of a split."""

    samples: int
    boxes: int
    shards: list[Shard]


@dataclass(config=STRICT, frozen=True)
class StoredFile:
    """A file of the folder that is not a shard."""

    bytes: int
    sha256: str


@dataclass(config=STRICT, frozen=True)
class QuarantinedImage:
    """An image that was left out, and the reason."""

    file_name: str
    reason: str


@dataclass(config=STRICT, frozen=True)
class ShardIndex:
    """The index of a folder of shards."""

    fingerprint: str
    source: str
    raw_fingerprint: str
    categories: list[Category]
    splits: dict[str, ShardSplit]
    problems: dict[str, int]
    class_counts: dict[str, dict[str, int]]  # Number of boxes, by split and class name.
    settings: dict[str, Any]  # Values of the `data` keys that determine shards.
    kind: Literal["shards"] = "shards"
    version: Literal[5] = 5
    uri: str = ""  # Not stored, because a folder may be moved.
    hierarchy: dict[str, list[int]] = field(default_factory=dict)  # See `raw_manifest.RawManifest`.
    warnings: list[str] = field(default_factory=list)
    quarantined: list[QuarantinedImage] = field(default_factory=list)
    statistics: dict[str, SplitStatistics] = field(default_factory=dict)
    files: dict[str, StoredFile] = field(default_factory=dict)  # Sample tables and ground truth, by name.
    content: str = ""  # Digest of the raw images, see `trainer.data.raw_folder.write_image_table`.

    @property
    def class_names(self) -> list[str]:
        """Names of the classes, by label."""
        return [category.name for category in self.categories]

    @property
    def samples(self) -> dict[str, int]:
        """Number of samples in each split."""
        return {name: split.samples for name, split in self.splits.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return the index as a dictionary for JSON, without empty fields."""
        return {key: value for key, value in asdict(self).items() if value not in (None, "")}

    def write(self) -> None:
        """Write the index to its folder."""
        storage.write_json(storage.join(self.uri, INDEX), replace(self, uri="").to_dict())


@dataclass(config=STRICT, frozen=True)
class Sidecar:
    """The description of one shard, in a file next to it."""

    block: int  # Block of the raw table that its images come from.
    samples: int
    boxes: int
    bytes: int
    sha256: str
    quarantined: list[QuarantinedImage]
    problems: dict[str, Cases]
    statistics: SplitStatistics
    rows: list[Any]  # `samples.IndexedRecord` of each sample; not validated on loading.
    hashes: str  # See `plausibility.picture_hash`, in base64.

    def write(self, folder: str, name: str) -> None:
        """Write the sidecar next to its shard, whose name is given without extension."""
        # `asdict` would copy all rows.
        record = vars(self) | {
            "quarantined": [asdict(item) for item in self.quarantined],
            "problems": {reason: asdict(cases) for reason, cases in self.problems.items()},
            "statistics": asdict(self.statistics),
        }
        storage.write_json(storage.join(folder, f"{name}.json"), record)


def read_index(uri: str) -> ShardIndex:
    """Read the index of a folder of shards, and set its current `uri`.

    Raises:
        StorageError: it is missing, cannot be read, or is damaged.
        DataError: it has another version, or unexpected content.
    """
    index = storage.read_model(storage.join(uri, INDEX), ShardIndex, REPAIR_FIX.format(uri))
    return replace(index, uri=storage.absolute(uri))


def find_listing_faults(
    index: ShardIndex, states: Mapping[str, storage.FileState]
) -> dict[str, tuple[str, str]]:
    """Return the reason and an example for each file that a listing lacks, or lists with a different size."""
    sizes: dict[str, int | None] = {name: file.bytes for name, file in index.files.items()}
    for split in index.splits.values():
        for shard in split.shards:
            sizes |= {shard.name: shard.bytes, f"{shard.name.removesuffix('.tar')}.json": None}
    faults = {}
    for name, size in sizes.items():
        if name not in states:
            faults[name] = ("file missing", name)
        elif size not in (None, states[name].size):
            fault = f"{name}: {states[name].size:,} bytes, not {size:,}"
            faults[name] = ("file with a different size", fault)
    return faults


def read_sidecar(uri: str, name: str) -> Sidecar:
    """Read the sidecar of a shard (named without extension); mark the shard if the sidecar is damaged."""
    try:
        return storage.read_model(storage.join(uri, f"{name}.json"), Sidecar, REPAIR_FIX.format(uri))
    except DamagedError:
        mark_damaged(uri, f"{name}.tar")
        raise


def read_sidecars(uri: str, names: list[str]) -> Iterator[Sidecar]:
    """Yield the sidecars of shards in order; a few are read ahead."""
    with ThreadPoolExecutor(_READERS) as readers:
        for first in range(0, len(names), _READERS):
            yield from readers.map(partial(read_sidecar, uri), names[first : first + _READERS])


def read_checked(index: ShardIndex, name: str) -> bytes:
    """Read a file of a folder of shards, and check its hash against the index."""
    try:
        return storage.read_bytes(storage.join(index.uri, name), sha256=index.files[name].sha256)
    except DamagedError as error:
        raise DamagedError(error.message, fix=REPAIR_FIX.format(index.uri)) from None


def mark_damaged(uri: str, name: str) -> None:
    """Mark a file as damaged, if the folder is writable."""
    with suppress(StorageError):
        storage.write_json(
            storage.join(uri, name + DAMAGE_SUFFIX), {"kind": "damaged", "version": 1, "file": name}
        )


def list_damaged(names: Iterable[str]) -> list[str]:
    """Return the files that are marked as damaged, given the names in a folder."""
    return sorted(name.removesuffix(DAMAGE_SUFFIX) for name in names if name.endswith(DAMAGE_SUFFIX))
