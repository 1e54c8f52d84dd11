"""What was made from what: `<data_root>/lineage/` has a small record of every training and every version.

    runs/<run>.json                written before a training begins: its folder, data, source, settings, code
    models/<name>@<version>.json   written when a version is published: its run, and where it is registered
    verdicts/<run>.json            written when the gate has decided: whether it passed, and its metrics
    nothing_new/<run id>.json      written when a run ends before its training, with the reason

Locations below the data root are relative to it. Records outlive the data they describe. Each contains its
own hash.
"""

import logging
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib.metadata import version as package_version
from typing import Any, ClassVar, Self

from components.images import COMPONENT_IMAGE
from trainer import storage
from trainer.base import json_files, typed_json
from trainer.base.errors import DamagedError, FormError
from trainer.config.types import Overrides
from trainer.storage import Form

logger = logging.getLogger(__name__)

FOLDER = "lineage"
KEY = "data_version"  # Key of the version of the data in manifests and metadata.


@dataclass(frozen=True)
class StepRecord:
    """A record that a step writes once; its name is its first field or `name`."""

    _folder: ClassVar[str]
    _form: ClassVar[Form]

    def __init_subclass__(cls, *, folder: str, kind: str, remedy: str) -> None:
        """Set the folder below that of all records, the kind, and what to do about an unreadable record."""
        cls._folder, cls._form = folder, Form(kind, 1, remedy=remedy)

    @property
    def name(self) -> str:
        """Name of its file, without the suffix."""
        return str(getattr(self, fields(self)[0].name))

    @classmethod
    def place(cls, data_root: str, name: str = "") -> str:
        """Return the URI of a record, or of the folder of all records of its kind."""
        folder = storage.join(data_root, FOLDER, cls._folder)
        return storage.join(folder, f"{name}.json") if name else folder

    @classmethod
    def read(cls, uri: str) -> Self:
        """Read a record; keys of later versions are ignored. Raises as `storage.read_json`."""
        tree = storage.read_json(uri, cls._form)
        known = {item.name: tree[item.name] for item in fields(cls) if item.name in tree}
        return typed_json.load(cls, known, uri, cls._form.remedy)

    @classmethod
    def find(cls, data_root: str, name: str) -> Self | None:
        """Return the record of this name; None if there is none, or if it is damaged."""
        uri = cls.place(data_root, name)
        try:
            return cls.read(uri) if storage.exists(uri) else None
        except (DamagedError, FormError) as error:
            logger.warning("%s; the record is written again", error.message)
            return None

    @classmethod
    def read_all(cls, data_root: str, *, strict: bool = False) -> Iterator[Self]:
        """Yield all records of this kind; skip damaged ones with a warning, unless `strict`."""
        for name in storage.list_files(cls.place(data_root)):
            if name.endswith(".json"):
                try:
                    yield cls.read(storage.join(cls.place(data_root), name))
                except (DamagedError, FormError) as error:
                    if strict:
                        raise
                    logger.warning("%s; the record is skipped", error.message)

    def encoded(self) -> bytes:
        """Return it as JSON with its hash."""
        return json_files.encode({"kind": self._form.kind, "version": 1, **asdict(self)})

    def write(self, data_root: str) -> None:
        storage.write_bytes(self.place(data_root, self.name), self.encoded())


def now() -> str:
    """Return the time in UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class RunRecord(StepRecord, folder="runs", kind="run", remedy="resume the run, or restore it from a copy"):
    """Data, settings and code of a run; the train step writes it before it trains."""

    run: str  # Name of the run's folder, `output`.
    run_id: str
    output: str
    shards: str  # shards/<fingerprint>, likewise `raw`.
    raw: str
    source: str
    data_version: str
    recipe: str
    overrides: Overrides
    weights: str  # Initial weights; may be empty.
    code: dict[str, Any]  # Versions of the packages, and the image.
    started: str

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the shards."""
        return self.shards.rpartition("/")[2]

    def folder(self, data_root: str) -> str:
        """Return the URI of the run's folder."""
        is_absolute = "://" in self.output or self.output.startswith("/")
        return self.output if is_absolute else storage.join(data_root, self.output)


@dataclass(frozen=True)
class PublishedRecord(
    StepRecord, folder="models", kind="published", remedy="publish that version again, or restore a copy"
):
    """The run that made a version of a model, and its registry; the export step writes it."""

    model: str
    model_version: str
    run: str
    registry: str  # URL; may be empty.
    published: str = ""

    @property
    def name(self) -> str:
        """Name and version as commands take them."""
        return f"{self.model}@{self.model_version}"


@dataclass(frozen=True)
class VerdictRecord(
    StepRecord, folder="verdicts", kind="verdict", remedy="evaluate that run again, or delete it"
):
    """What the gate decided about a run; the evaluate step writes it."""

    run: str
    passed: bool
    metrics: dict[str, float]
    decided: str = ""


@dataclass(frozen=True)
class NothingNewRecord(StepRecord, folder="nothing_new", kind="nothing new", remedy="delete it"):
    """Why a run ended before its training; the prepare step writes it."""

    run_id: str
    since: str  # The model version, or the run, since which nothing is new.
    found: str  # The differences from it.
    ended: str = ""


def record_run(
    data_root: str,
    output: str,
    run_id: str,
    data: dict[str, Any],
    recipe: str,
    overrides: Overrides,
    weights: str,
) -> None:
    """Write the record of a run; `data` is the shards' manifest. A resumed run's record stays."""
    from trainer.data.shard_folder import read_index

    if RunRecord.find(data_root, name_of(output)):
        return
    code = {"kubedet": package_version("kubedet"), "torch": package_version("torch")}
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        code["image"] = COMPONENT_IMAGE  # It names the commit it was built from.
    index = read_index(data["uri"])
    record = RunRecord(
        name_of(output),
        run_id,
        below(output, data_root),
        below(data["uri"], data_root),
        f"raw/{index.raw_fingerprint}",
        index.source,
        data.get(KEY, ""),
        recipe,
        overrides,
        below(weights, data_root),
        code,
        now(),
    )
    record.write(data_root)


def name_of(output: str) -> str:
    """Return the name of a run in the records, given the URI of its folder."""
    return storage.absolute(output).rstrip("/").rpartition("/")[2]


def below(uri: str, data_root: str) -> str:
    """Return a URI relative to the data root if it is below it: a volume may be mounted elsewhere."""
    root = storage.absolute(data_root).rstrip("/") + "/"
    absolute = storage.absolute(uri) if uri and storage.is_local(uri) else uri
    return absolute.removeprefix(root)
