"""Lineage: `<data_root>/lineage/` contains a small record of each training run and model version.

    runs/<run>.json                written before training starts: folder, data, source, settings, code
    models/<name>@<version>.json   written when a version is published: its run, and where it is registered
    verdicts/<run>.json            written when the gate has decided: whether it passed, and its metrics
    nothing_new/<run id>.json      written when a run skips training, with the reason

Locations below the data root are relative to it. A record is kept when its data is deleted, and contains its
own hash.
"""

import logging
from collections.abc import Iterator
from dataclasses import asdict, fields
from datetime import UTC, datetime
from importlib.metadata import version as package_version
from typing import ClassVar, Literal, Self

from pydantic.dataclasses import dataclass

from trainer import storage
from trainer.base import json_files
from trainer.base.errors import DamagedError, FormatError
from trainer.base.json_files import STRICT
from trainer.config.types import Overrides
from trainer.steps.manifests import Shards, run_name

logger = logging.getLogger(__name__)

FOLDER = "lineage"


@dataclass(config=STRICT, frozen=True)
class StepRecord:
    """A record that a step writes once."""

    _folder: ClassVar[str]
    _remedy: ClassVar[str]

    def __init_subclass__(cls, *, folder: str, remedy: str) -> None:
        """Set the subfolder of a kind of record, and the remedy for an unreadable one."""
        cls._folder, cls._remedy = folder, remedy

    @property
    def name(self) -> str:
        """Name of the record's file, without the suffix."""
        return str(getattr(self, fields(self)[0].name))

    @classmethod
    def record_uri(cls, data_root: str, name: str = "") -> str:
        """Return the URI of a record, or without a name that of the folder of all records of its kind."""
        folder = storage.join(data_root, FOLDER, cls._folder)
        return storage.join(folder, f"{name}.json") if name else folder

    @classmethod
    def read(cls, uri: str) -> Self:
        """Read a record; raises the errors of `storage.read_model`."""
        return storage.read_model(uri, cls, cls._remedy)

    @classmethod
    def find(cls, data_root: str, name: str) -> Self | None:
        """Return the record of this name; None if it is missing or damaged."""
        uri = cls.record_uri(data_root, name)
        try:
            return cls.read(uri) if storage.exists(uri) else None
        except (DamagedError, FormatError) as error:
            logger.warning("%s; the record is written again", error.message)
            return None

    @classmethod
    def read_all(cls, data_root: str, *, strict: bool = False) -> Iterator[Self]:
        """Yield all records of this kind; skip damaged ones with a warning, unless `strict`."""
        for name in storage.list_files(cls.record_uri(data_root)):
            if name.endswith(".json"):
                try:
                    yield cls.read(storage.join(cls.record_uri(data_root), name))
                except (DamagedError, FormatError) as error:
                    if strict:
                        raise
                    logger.warning("%s; the record is skipped", error.message)

    def to_bytes(self) -> bytes:
        """Return the record as JSON with its hash."""
        return json_files.encode(asdict(self))

    def write(self, data_root: str) -> None:
        storage.write_bytes(self.record_uri(data_root, self.name), self.to_bytes())


def utc_timestamp() -> str:
    """Return the current time in UTC, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(config=STRICT, frozen=True)
class RunRecord(StepRecord, folder="runs", remedy="resume the run, or restore it from a copy"):
    """Data, settings and code of a run; written by the train step before training."""

    run: str  # Name of the run folder, `output`.
    run_id: str
    output: str
    shards: str  # shards/<fingerprint>; `raw` has the same form.
    raw: str
    source: str
    recipe: str
    overrides: Overrides
    weights: str  # Initial weights; may be empty.
    code: dict[str, str]  # Versions of the packages, and the image.
    started: str
    kind: Literal["run"] = "run"
    version: Literal[1] = 1

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the shards."""
        return self.shards.rpartition("/")[2]

    def folder(self, data_root: str) -> str:
        """Return the URI of the run folder."""
        is_absolute = "://" in self.output or self.output.startswith("/")
        return self.output if is_absolute else storage.join(data_root, self.output)


@dataclass(config=STRICT, frozen=True)
class PublishedRecord(StepRecord, folder="models", remedy="publish that version again, or restore a copy"):
    """The run and registry of a published model version; written by the export step."""

    model: str
    model_version: str
    run: str
    registry: str  # URL; may be empty.
    published: str = ""
    kind: Literal["published"] = "published"
    version: Literal[1] = 1

    @property
    def name(self) -> str:
        """Name and version, as in commands: NAME@VERSION."""
        return f"{self.model}@{self.model_version}"


@dataclass(config=STRICT, frozen=True)
class VerdictRecord(StepRecord, folder="verdicts", remedy="evaluate that run again, or delete it"):
    """What the gate decided about a run; written by the evaluate step."""

    run: str
    passed: bool
    metrics: dict[str, float]
    decided: str = ""
    kind: Literal["verdict"] = "verdict"
    version: Literal[1] = 1


@dataclass(config=STRICT, frozen=True)
class NothingNewRecord(StepRecord, folder="nothing_new", remedy="delete it"):
    """Why a run skipped training; written by the download step."""

    run_id: str
    since: str  # The model version or run that the source was compared with.
    found: str  # The differences from it.
    ended: str = ""
    kind: Literal["nothing new"] = "nothing new"
    version: Literal[1] = 1


def record_run(
    shards: Shards, output: str, *, run_id: str, image: str, weights: str, overrides: Overrides
) -> None:
    """Write the record of a run; a resumed run keeps its record. `image` is the container image, or empty."""
    from trainer.data.shard_folder import read_index

    data_root, name = shards.data_root, run_name(output)
    if RunRecord.find(data_root, name):
        return
    code = {"kubedet": package_version("kubedet"), "torch": package_version("torch")}
    code |= {"image": image} if image else {}  # An image names the commit it was built from.
    index = read_index(shards.uri)
    record = RunRecord(
        run=name,
        run_id=run_id,
        output=relative_to_root(output, data_root),
        shards=relative_to_root(shards.uri, data_root),
        raw=f"raw/{index.raw_fingerprint}",
        source=index.source,
        recipe=shards.recipe,
        overrides=overrides,
        weights=relative_to_root(weights, data_root),
        code=code,
        started=utc_timestamp(),
    )
    record.write(data_root)


def latest_rejected_run(data_root: str, source: str) -> RunRecord | None:
    """Return the newest evaluated run of a source, if the gate rejected its model."""
    verdicts = {record.run: record for record in VerdictRecord.read_all(data_root)}
    runs = [record for record in RunRecord.read_all(data_root) if record.source == source]
    for record in sorted(runs, key=lambda record: record.started, reverse=True):
        if record.run in verdicts:
            return None if verdicts[record.run].passed else record
    return None


def relative_to_root(uri: str, data_root: str) -> str:
    """Return a URI relative to the data root if it is inside: volumes may be mounted elsewhere later."""
    root = storage.absolute(data_root).rstrip("/") + "/"
    absolute = storage.absolute(uri) if uri and storage.is_local(uri) else uri
    return absolute.removeprefix(root)
