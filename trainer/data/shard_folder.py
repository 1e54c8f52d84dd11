"""The files of a folder of shards: read by the hashes that are known of them; what is damaged is noted.

For a note, `<file>.damaged`, the next shard step writes that file anew: without it the step would have to
read all shards to know. It is removed then.
"""

import hashlib
import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from trainer import storage
from trainer.base import typed_json
from trainer.base.errors import DamagedError, DataError, KubedetError, StorageError
from trainer.data.problem_counts import Cases
from trainer.data.raw_folder import Category
from trainer.data.statistics import SplitStatistics

VERSION = 5
"""Of shards and their index. Raise it when the same raw images give other shards."""

INDEX = "index.json"
NOTE = ".damaged"
REPAIR = "run `kubedet data verify --repair {}`, or the command that made it again: it writes this file anew"
_BLOCK = 4 * 1024 * 1024
_LOG = logging.getLogger("data")


@dataclass(frozen=True)
class Shard:
    """One shard of a split."""

    name: str
    """Of its tar file."""
    samples: int
    boxes: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class ShardSplit:
    """The shards of a split."""

    samples: int
    boxes: int
    shards: list[Shard]


@dataclass(frozen=True)
class StoredFile:
    """A file of the folder besides the shards."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class DuplicatePair:
    """Two images of different splits that look the same."""

    splits: list[str]
    file_names: list[str]
    rows: list[int] = field(default_factory=list)
    """Of both in their splits."""


@dataclass(frozen=True)
class Quarantined:
    """An image that was left out, and why."""

    file_name: str
    reason: str


@dataclass(frozen=True)
class ShardIndex:
    """What a folder of shards holds."""

    fingerprint: str
    source: str
    raw_fingerprint: str
    categories: list[Category]
    splits: dict[str, ShardSplit]
    problems: dict[str, int]
    class_counts: dict[str, dict[str, int]]
    """Boxes of each class by name, of each split."""
    kind: str = "shards"
    version: int = VERSION
    uri: str = ""
    """Of the folder; not stored, since a folder may be moved."""
    hierarchy: dict[str, list[int]] = field(default_factory=dict)
    """See `trainer.data.raw_folder.RawManifest`."""
    warnings: list[str] = field(default_factory=list)
    near_duplicates: list[DuplicatePair] = field(default_factory=list)
    quarantined: list[Quarantined] = field(default_factory=list)
    statistics: dict[str, SplitStatistics] = field(default_factory=dict)
    files: dict[str, StoredFile] = field(default_factory=dict)
    """Tables of samples and ground truth, by name."""
    settings: dict[str, Any] | None = None
    """Keys of the section `data` that they were made with; None in files of before 0.2."""
    content: str = ""
    """Which raw images there were, see `trainer.data.raw_folder.content_of`."""

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
        """Write it into its folder.

        Raises:
            StorageError: it cannot be written.
        """
        stored = self.to_json()
        del stored["uri"]
        storage.write_json(storage.join(self.uri, INDEX), stored)


@dataclass(frozen=True)
class Sidecar:
    """What is known of one shard when it is written."""

    block: int
    """Of the raw table that its images are from."""
    samples: int
    boxes: int
    bytes: int
    sha256: str
    quarantined: list[Quarantined]
    problems: dict[str, Cases]
    statistics: SplitStatistics
    rows: list[Any]
    """A mapping for each sample: its record, and the fields of `shard_index.SAMPLE` that tell where it is."""
    hashes: str = ""
    """Of the pictures, see `plausibility.picture_hash`, in base64."""

    def write(self, folder: str, name: str) -> None:
        """Write it beside its shard, whose name without extension is given."""
        # `asdict` would copy all rows.
        record = vars(self) | {
            "quarantined": [asdict(item) for item in self.quarantined],
            "problems": {reason: asdict(cases) for reason, cases in self.problems.items()},
            "statistics": asdict(self.statistics),
        }
        storage.write_json(storage.join(folder, f"{name}.json"), record)


def read_index(uri: str) -> ShardIndex:
    """Return the index of a folder of shards, `uri` as it is now.

    Raises:
        StorageError: it is missing, cannot be read, or is damaged.
        DataError: it is of a newer version, or of another form.
    """
    place = storage.join(uri, INDEX)
    record = storage.read_json(place, storage.Form("shards", VERSION, remedy=_remedy(uri)))
    return typed_json.load(ShardIndex, record | {"uri": storage.absolute(uri)}, place, _remedy(uri))


def read_sidecar(uri: str, name: str) -> Sidecar:
    """Return what is known of one shard.

    Raises:
        StorageError: it is missing, cannot be read, or is damaged, which is noted.
        DataError: it is of another form.
    """
    place = storage.join(uri, f"{name}.json")
    try:
        return typed_json.load(Sidecar, storage.read_json(place), place, _remedy(uri))
    except DamagedError:
        note(uri, f"{name}.tar")
        raise


def read_known(uri: str, name: str, known: StoredFile | None) -> bytes:
    """Return a file that the index names.

    Args:
        uri: the folder.
        name: of the file.
        known: its entry in the index; None where the index is from before there were any.

    Raises:
        DamagedError: it is not what was written.
        StorageError: it is missing or cannot be read.
    """
    try:
        return storage.read_bytes(storage.join(uri, name), sha256=known.sha256 if known else "")
    except DamagedError as error:
        raise DamagedError(error.message, fix=_remedy(uri)) from None


def digest(uri: str) -> str:
    """Return the sha256 of a file, read from start to end."""
    actual = hashlib.sha256()
    with storage.open_reader(uri) as file:
        while block := file.read(_BLOCK):
            actual.update(block)
    return actual.hexdigest()


def blame(uri: str, split: str, shard: Shard) -> KubedetError:
    """Return the error for a sample whose bytes are not what its table says: which of both has changed.

    Args:
        uri: the folder.
        split: of the sample.
        shard: its entry in the index.

    Raises:
        StorageError: the shard cannot be read.
    """
    try:
        actual = digest(storage.join(uri, shard.name))
    except DamagedError as error:
        actual = error.message
    if actual == shard.sha256:
        name = f"{split}.samples.npy"
        return DataError(
            f"{storage.join(uri, name)} is damaged: {shard.name} has the bytes that it was written "
            "with, and not the samples that this table says",
            fix=_remedy(uri),
        )
    note(uri, shard.name)
    return DataError(
        f"{storage.join(uri, shard.name)} is damaged: it differs from what the index says",
        fix=_remedy(uri),
    )


def note(uri: str, name: str) -> None:
    """Note that a file is damaged, where the folder may be written."""
    with suppress(StorageError):
        storage.write_json(storage.join(uri, name + NOTE), {"kind": "damaged", "version": 1, "file": name})


def noted(names: Iterable[str]) -> list[str]:
    """Return the files that are noted as damaged, of the names in a folder."""
    return sorted(name.removesuffix(NOTE) for name in names if name.endswith(NOTE))


def faults(index: ShardIndex) -> list[str]:
    """Return the files of finished shards that are missing, cut off or damaged, as far as it shows quickly.

    Sizes and notes are those of a listing; tables and ground truth, which are small, are read.
    """
    states = storage.list_states(index.uri, recursive=True)
    shards = [shard for split in index.splits.values() for shard in split.shards]
    sizes = {shard.name: shard.bytes for shard in shards}
    sizes |= {name: file.bytes for name, file in index.files.items()}
    actual = [
        name for name in (f"{shard.name.removesuffix('.tar')}.json" for shard in shards) if name not in states
    ]
    actual += [name for name, size in sizes.items() if name not in states or states[name].size != size]
    for name in index.files.keys() - set(actual):
        try:
            read_known(index.uri, name, index.files[name])
        except DamagedError:
            actual.append(name)
    return sorted({*actual, *noted(states)})


def _remedy(uri: str) -> str:
    return REPAIR.format(uri)
