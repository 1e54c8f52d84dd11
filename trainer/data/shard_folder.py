"""The files of a folder of shards: how they are read, checked and written.

Whatever finds a damaged file leaves a note, `<file>.damaged`, so that the next shard step writes the file
again without reading all shards to find the damage.
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

VERSION = 5  # Increase it, and that of `ShardIndex`, if the same raw images give other shards.

INDEX = "index.json"
DAMAGE_SUFFIX = ".damaged"
REPAIR_FIX = "run `kubedet data verify --repair {}`, or run the command that wrote it again"
_READERS = 8

SAMPLE = np.dtype(
    [
        ("shard", "<i4"), ("offset", "<i8"), ("length", "<i4"), ("json_offset", "<i8"),
        ("json_length", "<i4"), ("image_id", "<i8"), ("width", "<i4"), ("height", "<i4"), ("crc32", "<u4"),
    ]
)  # fmt: skip
"""A row of a split's table of samples: its shard, where its JPEG and its JSON are, the image's size, and the
CRC-32 (ISO 3309, as in zlib) of both together."""


@dataclass(config=STRICT, frozen=True)
class Shard:
    """One shard of a split; its name is that of the tar file."""

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
    """A file of the folder besides the shards."""

    bytes: int
    sha256: str


@dataclass(config=STRICT, frozen=True)
class QuarantinedImage:
    """An image that was left out, and the reason."""

    file_name: str
    reason: str


@dataclass(config=STRICT, frozen=True)
class ShardIndex:
    """What a folder of shards contains."""

    fingerprint: str
    source: str
    raw_fingerprint: str
    categories: list[Category]
    splits: dict[str, ShardSplit]
    problems: dict[str, int]
    class_counts: dict[str, dict[str, int]]  # Boxes of each class by name, of each split.
    settings: dict[str, Any]  # Keys of `data` that they were made with.
    kind: Literal["shards"] = "shards"
    version: Literal[5] = 5
    uri: str = ""  # Not stored, because a folder may be moved.
    hierarchy: dict[str, list[int]] = field(default_factory=dict)  # See `raw_manifest.RawManifest`.
    warnings: list[str] = field(default_factory=list)
    quarantined: list[QuarantinedImage] = field(default_factory=list)
    statistics: dict[str, SplitStatistics] = field(default_factory=dict)
    files: dict[str, StoredFile] = field(default_factory=dict)  # Tables of samples and ground truth, by name.
    content: str = ""  # Digest of the raw images, see `trainer.data.raw_folder.write_image_table`.

    @property
    def names(self) -> list[str]:
        """Names of the classes, by label."""
        return [category.name for category in self.categories]

    @property
    def samples(self) -> dict[str, int]:
        """Samples of each split."""
        return {name: split.samples for name, split in self.splits.items()}

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON, without empty fields that are optional."""
        return {key: value for key, value in asdict(self).items() if value not in (None, "")}

    def write(self) -> None:
        """Write it into its folder; raise StorageError if that fails."""
        storage.write_json(storage.join(self.uri, INDEX), replace(self, uri="").to_json())


@dataclass(config=STRICT, frozen=True)
class Sidecar:
    """The record of one shard."""

    block: int  # Of the raw table that its images are from.
    samples: int
    boxes: int
    bytes: int
    sha256: str
    quarantined: list[QuarantinedImage]
    problems: dict[str, Cases]
    statistics: SplitStatistics
    rows: list[Any]  # `samples.IndexedRecord` of each sample, not checked when it is loaded.
    hashes: str  # See `plausibility.picture_hash`, in base64.

    def write(self, folder: str, name: str) -> None:
        """Write it next to its shard of that name (without extension)."""
        # `asdict` would copy all rows.
        record = vars(self) | {
            "quarantined": [asdict(item) for item in self.quarantined],
            "problems": {reason: asdict(cases) for reason, cases in self.problems.items()},
            "statistics": asdict(self.statistics),
        }
        storage.write_json(storage.join(folder, f"{name}.json"), record)


def read_index(uri: str) -> ShardIndex:
    """Return the index of a folder of shards, with its `uri` as it is now.

    Raises:
        StorageError: it is missing, cannot be read, or is damaged.
        DataError: it is of a newer version, or of another form.
    """
    index = storage.read_model(storage.join(uri, INDEX), ShardIndex, REPAIR_FIX.format(uri))
    return replace(index, uri=storage.absolute(uri))


def find_listing_faults(
    index: ShardIndex, states: Mapping[str, storage.FileState]
) -> dict[str, tuple[str, str]]:
    """Return the files that are missing from a listing or have a different size: reason and example by
    name.
    """
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
            faults[name] = ("file of another size", fault)
    return faults


def read_sidecar(uri: str, name: str) -> Sidecar:
    """Return the record of one shard (named without extension), and note if it is damaged."""
    try:
        return storage.read_model(storage.join(uri, f"{name}.json"), Sidecar, REPAIR_FIX.format(uri))
    except DamagedError:
        mark_damaged(uri, f"{name}.tar")
        raise


def read_sidecars(uri: str, names: list[str]) -> Iterator[Sidecar]:
    """Yield the sidecars of shards in order, read a little ahead."""
    with ThreadPoolExecutor(_READERS) as readers:
        for first in range(0, len(names), _READERS):
            yield from readers.map(partial(read_sidecar, uri), names[first : first + _READERS])


def read_checked(index: ShardIndex, name: str) -> bytes:
    """Return a file of a folder, checked against the index."""
    try:
        return storage.read_bytes(storage.join(index.uri, name), sha256=index.files[name].sha256)
    except DamagedError as error:
        raise DamagedError(error.message, fix=REPAIR_FIX.format(index.uri)) from None


def mark_damaged(uri: str, name: str) -> None:
    """Note that a file is damaged, if the folder may be written."""
    with suppress(StorageError):
        storage.write_json(
            storage.join(uri, name + DAMAGE_SUFFIX), {"kind": "damaged", "version": 1, "file": name}
        )


def list_damaged(names: Iterable[str]) -> list[str]:
    """Return the files with a note of damage, from the names in a folder."""
    return sorted(name.removesuffix(DAMAGE_SUFFIX) for name in names if name.endswith(DAMAGE_SUFFIX))
