"""What was made from what: `<data_root>/lineage/` has a small record of every training and every version.

    runs/<run>.json                written before a training begins: its folder, data, source, settings, code
    images/<run>.json              the images that its containers really ran
    models/<name>@<version>.json   written when a version is published: its run, and where it is registered
    verdicts/<run>.json            written when the gate has decided: whether it passed, and its metrics
    nothing_new/<run id>.json      written when a run ends before its training: since what nothing is new

Locations below the data root are relative to it. Records stay after the data they describe are deleted. Each
holds its own hash; records of early versions have none. `operations` reads them.
"""

import logging
import os
from collections.abc import Iterator
from dataclasses import MISSING, asdict, dataclass, field, fields
from datetime import UTC, datetime
from importlib.metadata import version as package_version
from typing import Any, ClassVar, Self

from components.data_versions import KEY
from trainer import storage
from trainer.base.errors import DamagedError, FormError
from trainer.data.shard_folder import read_index
from trainer.storage import Form, records

logger = logging.getLogger(__name__)

FOLDER = "lineage"


@dataclass(frozen=True)
class StepRecord:
    """A record that a step writes once. Fields without a default must be in its file, with their types."""

    FOLDER: ClassVar[str]
    """Below the folder of all records."""
    KIND: ClassVar[str]
    REMEDY: ClassVar[str]
    """What to do if a record cannot be read."""

    @classmethod
    def place(cls, data_root: str, name: str = "") -> str:
        """Return the URI of a record, or of the folder of all records of its kind."""
        folder = storage.join(data_root, FOLDER, cls.FOLDER)
        return storage.join(folder, f"{name}.json") if name else folder

    @classmethod
    def form(cls) -> Form:
        """Return the form that its file must have."""
        shapes: dict[Any, Any] = {dict[str, Any]: {}, dict[str, float]: {"*": float}, list[str]: [str]}
        shape = {}
        for item in fields(cls):
            required = item.default is MISSING and item.default_factory is MISSING
            shape[item.name if required else f"{item.name}?"] = shapes.get(item.type, item.type)
        return Form(cls.KIND, 1, shape, cls.REMEDY)

    @classmethod
    def read(cls, uri: str) -> Self:
        """Read a record; raises as `storage.read_json`."""
        tree = storage.read_json(uri, cls.form())
        return cls(**{item.name: tree[item.name] for item in fields(cls) if item.name in tree})

    @classmethod
    def read_all(cls, data_root: str, *, strict: bool = False) -> Iterator[Self]:
        """Yield all records of this kind; damaged ones, unless `strict`, are left out with a warning.

        Raises:
            DamagedError, FormError: see `strict`; DataError: a record is of a newer version.
            StorageError: the data root cannot be read.
        """
        for name in storage.list_files(cls.place(data_root)):
            if name.endswith(".json"):
                try:
                    record = cls.read(storage.join(cls.place(data_root), name))
                except (DamagedError, FormError) as error:
                    if strict:
                        raise
                    logger.warning("%s; it is left out", error.message)
                    continue
                yield record

    def encoded(self) -> bytes:
        """Return it as JSON with its hash."""
        return records.encode({"kind": self.KIND, "version": 1, **asdict(self)})


def now() -> str:
    """Return the time as records have it: UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class RunRecord(StepRecord):
    """What a run trains on, and with which settings and code; the train step writes it before it trains."""

    FOLDER = "runs"
    KIND = "run"
    REMEDY = "resume the run, which writes it again, or restore it from a copy: nothing else has what it says"

    run: str
    """Name of the run's folder."""
    run_id: str
    output: str
    """The run's folder."""
    shards: str
    """shards/<fingerprint>."""
    raw: str
    """raw/<fingerprint>."""
    source: str
    data_version: str
    recipe: str
    overrides: dict[str, Any]
    weights: str
    """The weights that it begins with; may be empty."""
    code: dict[str, Any]
    """Versions of the packages, and the image."""
    started: str

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the shards."""
        return self.shards.rpartition("/")[2]

    def folder(self, data_root: str) -> str:
        """Return the URI of the run's folder."""
        is_whole = "://" in self.output or self.output.startswith("/")
        return self.output if is_whole else storage.join(data_root, self.output)


@dataclass(frozen=True)
class ImagesRecord(StepRecord):
    """The images that a run really ran, each `name@sha256:...`; the train step writes it."""

    FOLDER = "images"
    KIND = "images"
    REMEDY = "the run writes it again"

    run: str
    step: list[str] = field(default_factory=list)
    """Of the train step's own container."""
    training: list[str] = field(default_factory=list)
    """Of the pods that trained: several if an image was replaced under its name."""

    @classmethod
    def of_run(cls, data_root: str, run: str) -> "ImagesRecord":
        """Return the images of a run, as far as they are known.

        Raises:
            StorageError: the data root cannot be read; DataError: the record is of a newer version.
        """
        uri = cls.place(data_root, run)
        if storage.exists(uri):
            try:
                return cls.read(uri)
            except (DamagedError, FormError) as error:
                logger.warning("%s; it is left out", error.message)
        return cls(run)

    def joined(self, other: "ImagesRecord") -> "ImagesRecord":
        """Return the images of two records of one run."""
        step, training = {*self.step, *other.step}, {*self.training, *other.training}
        return ImagesRecord(self.run, sorted(step), sorted(training))


@dataclass(frozen=True)
class PublishedRecord(StepRecord):
    """Which run made a version of a model, and the registry that knows it; the export step writes it."""

    FOLDER = "models"
    KIND = "published"
    REMEDY = "export and publish that version again, or restore it from a copy"

    model: str
    model_version: str
    run: str
    registry: str
    """URL; may be empty."""
    published: str = ""

    @property
    def shown(self) -> str:
        """Return name and version as commands take them."""
        return f"{self.model}@{self.model_version}"


@dataclass(frozen=True)
class VerdictRecord(StepRecord):
    """What the gate decided about a run; the evaluate step writes it."""

    FOLDER = "verdicts"
    KIND = "verdict"
    REMEDY = "evaluate that run again, or delete it"

    run: str
    passed: bool
    metrics: dict[str, float]
    decided: str = ""


@dataclass(frozen=True)
class NothingNewRecord(StepRecord):
    """Why a run ended before its training; the prepare step writes it."""

    FOLDER = "nothing_new"
    KIND = "nothing new"
    REMEDY = "delete it"

    run_id: str
    since: str
    """The model version, or the run, since which nothing is new."""
    found: str
    """What differs from it."""
    ended: str = ""


def run_began(
    data_root: str, output: str, run_id: str, data: dict[str, Any], recipe: str, overrides: dict[str, Any],
    weights: str,
) -> None:  # fmt: skip
    """Record what a run trains on; `data` is the shards' manifest. A resumed run's record stays.

    Raises:
        StorageError: the data root cannot be written.
    """
    index = read_index(data["uri"])
    record = RunRecord(
        name_of(output), run_id, below(output, data_root), below(data["uri"], data_root),
        f"raw/{index.raw_fingerprint}", index.source, data.get(KEY, ""), recipe, overrides,
        below(weights, data_root), _code(), now(),
    )  # fmt: skip
    uri = RunRecord.place(data_root, record.run)
    if storage.exists(uri):
        try:
            RunRecord.read(uri)
        except (DamagedError, FormError) as error:
            logger.warning("%s; it is written again", error.message)
        else:
            return
    storage.write_bytes(uri, record.encoded())


def published(data_root: str, name: str, version: str, output: str, registry: str) -> None:
    """Record which run, given its folder, made a version of a model.

    Raises:
        StorageError: the data root cannot be written.
    """
    record = PublishedRecord(name, version, name_of(output), registry, now())
    storage.write_bytes(PublishedRecord.place(data_root, record.shown), record.encoded())


def decided(data_root: str, output: str, passed: bool, metrics: dict[str, float]) -> None:
    """Record what the gate decided about the run of a folder.

    Raises:
        StorageError: the data root cannot be written.
    """
    record = VerdictRecord(name_of(output), passed, metrics, now())
    storage.write_bytes(VerdictRecord.place(data_root, record.run), record.encoded())


def name_of(output: str) -> str:
    """Return the name of a run in the records, given the URI of its folder."""
    return storage.absolute(output).rstrip("/").rpartition("/")[2]


def below(uri: str, data_root: str) -> str:
    """Return a URI relative to the data root if it is below it: a volume may be mounted elsewhere."""
    root = storage.absolute(data_root).rstrip("/") + "/"
    absolute = storage.absolute(uri) if uri and storage.is_local(uri) else uri
    return absolute.removeprefix(root)


def _code() -> dict[str, str]:
    from components.images import COMPONENT_IMAGE

    code = {"kubedet": package_version("kubedet"), "torch": package_version("torch")}
    # In a pod the steps run in their image; it records the commit it was made of.
    return code | ({"image": COMPONENT_IMAGE} if "KUBERNETES_SERVICE_HOST" in os.environ else {})
