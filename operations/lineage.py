"""Reads the records of runs and versions (`components.records`), and what each of them trained on."""

from dataclasses import dataclass
from typing import Any

from components.records import NothingNewRecord, PublishedRecord, RunRecord, VerdictRecord
from trainer import storage
from trainer.data import seen
from trainer.export import bundle, published_models


def runs(data_root: str, *, strict: bool = False) -> list[RunRecord]:
    """Return the records of all runs, the oldest first; see `StepRecord.read_all`."""
    return sorted(RunRecord.read_all(data_root, strict=strict), key=lambda record: record.started)


def verdicts(data_root: str) -> dict[str, VerdictRecord]:
    """Return what the gate decided, by the run's name; damaged records are left out with a warning."""
    return {record.run: record for record in VerdictRecord.read_all(data_root)}


def without_news(data_root: str) -> frozenset[str]:
    """Return the ids of the runs that ended because there was nothing new.

    Raises:
        StorageError: the data root cannot be read.
    """
    names = storage.list_files(NothingNewRecord.place(data_root))
    return frozenset(name.removesuffix(".json") for name in names)


def held_back(data_root: str, source: str) -> RunRecord | None:
    """Return the newest run of a source that was evaluated, if the gate refused its model."""
    decisions = verdicts(data_root)
    for record in reversed(runs(data_root)):
        if record.source == source and record.run in decisions:
            return None if decisions[record.run].passed else record
    return None


@dataclass(frozen=True)
class Version:
    """A version of a model."""

    name: str
    version: str
    shards: str
    """Fingerprint of those it was trained on."""
    run: str
    """"" where it is not known."""
    current: bool
    checkpoint: str
    code: dict[str, Any]
    registry: str

    @property
    def shown(self) -> str:
        """Return name and version as commands take them."""
        return f"{self.name}@{self.version}"


def versions(data_root: str) -> list[Version]:
    """Return all versions of all models; damaged ones are left out."""
    records = _published(data_root)
    return [
        _version(exported, data_root, records)
        for name in published_models.names(data_root)
        for exported in published_models.versions(data_root, name)[0].values()
    ]


def version_of(exported: bundle.Bundle, data_root: str) -> Version:
    """Return the version that a bundle is."""
    return _version(exported, data_root, _published(data_root))


def _published(data_root: str) -> dict[str, PublishedRecord]:
    return {record.shown: record for record in PublishedRecord.read_all(data_root)}


def _version(exported: bundle.Bundle, data_root: str, records: dict[str, PublishedRecord]) -> Version:
    name, version = exported.metadata["name"], exported.metadata["model_version"]
    origin, record = exported.metadata["trained_on"], records.get(f"{name}@{version}")
    # <run>/train/best.pt
    by_place = storage.parent(storage.parent(origin["checkpoint"])).rpartition("/")[2]
    return Version(
        name, version, origin["shards"], record.run if record else by_place,
        (published_models.current(data_root, name) or {}).get("version") == version,
        origin["checkpoint"], exported.metadata.get("versions", {}), record.registry if record else "",
    )  # fmt: skip


def saw(data_root: str, names: frozenset[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the images that are meant, by the fingerprint of the shards that had them.

    Args:
        data_root: URI under which data are kept.
        names: see `seen.find`.
    """
    results = {each: list(seen.find(seen.place(data_root, each), names)) for each in seen.listed(data_root)}
    return {each: rows for each, rows in results.items() if rows}
