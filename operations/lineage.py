"""Origin of models and runs, from the records of steps (`trainer.steps.records`)."""

from contextlib import suppress
from typing import Any, NamedTuple

from trainer import storage
from trainer.base.errors import ConfigError, StorageError
from trainer.export import bundle, published_models
from trainer.export.metadata import Metadata
from trainer.steps import records
from trainer.steps.records import KEY, PublishedRecord, RunRecord, VerdictRecord, below


def runs(data_root: str, *, strict: bool = False) -> list[RunRecord]:
    """Return the records of all runs, the oldest first; see `StepRecord.read_all`."""
    return sorted(RunRecord.read_all(data_root, strict=strict), key=lambda record: record.started)


def verdicts(data_root: str) -> dict[str, VerdictRecord]:
    """Return the gate's decisions by the run's name; skips damaged records with a warning."""
    return {record.run: record for record in VerdictRecord.read_all(data_root)}


def without_news(data_root: str) -> frozenset[str]:
    """Return the ids of the runs that ended because there was nothing new; raises StorageError."""
    names = storage.list_files(records.NothingNewRecord.place(data_root))
    return frozenset(name.removesuffix(".json") for name in names)


class Version(NamedTuple):
    """A version of a model."""

    shown: str  # Name and version as commands take them.
    metadata: Metadata
    run: str  # "" if it is not known.
    current: bool
    registry: str

    @property
    def shards(self) -> str:
        """Fingerprint of its shards."""
        return self.metadata.trained_on.shards


def versions(data_root: str, *exported: bundle.Bundle) -> list[Version]:
    """Return the versions in bundles, by default all of all models; skips damaged ones."""
    records = {record.name: record for record in PublishedRecord.read_all(data_root)}
    found = []
    for each in exported or (
        version
        for name in published_models.names(data_root)
        for version in published_models.versions(data_root, name)[0].values()
    ):
        metadata = each.metadata
        shown = f"{metadata.name}@{metadata.model_version}"
        record = records.get(shown)
        # <run>/train/best.pt
        by_place = storage.parent(storage.parent(metadata.trained_on.checkpoint)).rpartition("/")[2]
        current = published_models.current(data_root, metadata.name)
        is_current = current is not None and current.version == metadata.model_version
        run, registry = (record.run, record.registry) if record else (by_place, "")
        found.append(Version(shown, metadata, run, is_current, registry))
    return found


def trace(name: str, data_root: str) -> dict[str, Any]:
    """Return the origin of a model or run as JSON.

    `name` is a model (NAME, NAME@VERSION or a bundle's folder) or a run (its name, id or folder).
    """
    exported = None
    with suppress(StorageError, ConfigError):
        exported = published_models.load(name, data_root)
    known = runs(data_root)
    if exported is not None:
        (chosen,) = versions(data_root, exported)
        description = {
            "kind": "model",
            "model": chosen.shown,
            "current": chosen.current,
            "digest": exported.digest,
            "checkpoint": chosen.metadata.trained_on.checkpoint,
            "code": chosen.metadata.versions,
            "registry": chosen.registry,
            "signed": storage.exists(storage.join(exported.uri, bundle.SIGNATURE)),
        }
        if record := next((record for record in known if record.run == chosen.run), None):
            return description | _trace_run(record, data_root)
        return description | {"run": chosen.run} | _trace_shards(chosen.shards, data_root)
    for record in known:
        if name in (record.run, record.run_id) or below(name, data_root) == record.output:
            return {"kind": "run", **_trace_run(record, data_root)}
    raise ConfigError(
        f"{name!r} is not a known model or run in {data_root}",
        fix="`kubedet model list` shows models; a run has the name of its folder",
    )


def _trace_run(record: RunRecord, data_root: str) -> dict[str, Any]:
    exported = [item.shown for item in versions(data_root) if item.run == record.run]
    freed = _pruned_versions({record.run}, data_root)
    keys = ("run", "run_id", "output", "recipe", "overrides", "weights", "started", KEY)
    description = {key: getattr(record, key) for key in keys}
    description |= {"run_code": record.code, "models": freed + exported, "freed": freed}
    description |= _trace_shards(record.fingerprint, data_root)
    return description | {"raw": record.raw, "source": record.source}


def _trace_shards(fingerprint: str, data_root: str) -> dict[str, Any]:
    from trainer.data.shard_folder import INDEX, read_index

    description: dict[str, Any] = {"shards": f"shards/{fingerprint}"}
    uri = storage.join(data_root, "shards", fingerprint)
    if storage.exists(storage.join(uri, INDEX)):
        index = read_index(uri)
        description |= {"raw": f"raw/{index.raw_fingerprint}", "source": index.source}
    return description


def _pruned_versions(names: set[str], data_root: str) -> list[str]:
    """Return the published versions of these runs that were deleted here: they may still be in use."""
    present = {item.shown for item in versions(data_root)}
    published = [item.name for item in PublishedRecord.read_all(data_root) if item.run in names]
    return [shown for shown in published if shown not in present]
