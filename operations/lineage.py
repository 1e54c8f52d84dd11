"""Origin of models and runs, and use of images, from the records of steps (`components.records`)."""

from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from components import records
from components.records import KEY, PublishedRecord, RunRecord, VerdictRecord, below
from trainer import storage
from trainer.base.errors import ConfigError, StorageError
from trainer.data import exclusions
from trainer.export import bundle, published_models

if TYPE_CHECKING:
    from trainer.data.training_record import RecordedImage


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


def held_back(data_root: str, source: str) -> RunRecord | None:
    """Return the newest run of a source that was evaluated, if the gate refused its model."""
    decisions = verdicts(data_root)
    for record in reversed(runs(data_root)):
        if record.source == source and record.run in decisions:
            return None if decisions[record.run].passed else record
    return None


class Version(NamedTuple):
    """A version of a model."""

    shown: str  # Name and version as commands take them.
    metadata: bundle.Metadata
    run: str  # "" if it is not known.
    current: bool
    registry: str

    @property
    def shards(self) -> str:
        """Fingerprint of its shards."""
        return self.metadata.shards


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
        by_place = storage.parent(storage.parent(metadata.checkpoint)).rpartition("/")[2]
        current = published_models.current(data_root, metadata.name)
        is_current = current is not None and current.version == metadata.model_version
        run, registry = (record.run, record.registry) if record else (by_place, "")
        found.append(Version(shown, metadata, run, is_current, registry))
    return found


def trained_on(data_root: str, names: frozenset[str]) -> dict[str, list["RecordedImage"]]:
    """Return the images with these names (see `training_record.find`), by the fingerprint of their shards."""
    from trainer.data import training_record

    results = {
        each: list(training_record.find(training_record.place(data_root, each), names))
        for each in training_record.listed(data_root)
    }
    return {each: rows for each, rows in results.items() if rows}


def trace(name: str, data_root: str) -> dict[str, Any]:
    """Return the origin of a model or run, or the runs and models that used an image, as JSON.

    `name` is a model (NAME, NAME@VERSION or a bundle's folder), a run (its name, id or folder), or an image
    (key, file name, or digest of its bytes or annotations, 16 hex digits).
    """
    from trainer.data import training_record

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
            "checkpoint": chosen.metadata.checkpoint,
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
    results = trained_on(data_root, frozenset({name}))
    if not results:
        raise ConfigError(
            f"{name!r} is not a known model, run or image in {data_root}",
            fix="`kubedet model list` shows models; a run has the name of its folder; an image has its "
            "key or file name",
        )
    seen = []
    for fingerprint, rows in results.items():
        of_runs = [record.run for record in known if record.fingerprint == fingerprint]
        of_models = [item.shown for item in versions(data_root) if item.shards == fingerprint]
        freed = _pruned_versions(set(of_runs), data_root)
        source = training_record.header(training_record.place(data_root, fingerprint)).source
        excluded = exclusions.names(data_root, source)
        marked = [asdict(row) | {"forgotten": bool({row.key, row.file_name} & excluded)} for row in rows]
        seen.append(
            {
                "shards": f"shards/{fingerprint}",
                "source": source,
                "runs": of_runs,
                "models": freed + of_models,
                "freed": freed,
                "images": marked,
            }
        )
    return {"kind": "image", "image": name, "seen": seen}


def _trace_run(record: RunRecord, data_root: str) -> dict[str, Any]:
    exported = [item.shown for item in versions(data_root) if item.run == record.run]
    freed = _pruned_versions({record.run}, data_root)
    keys = ("run", "run_id", "output", "recipe", "overrides", "weights", "started", KEY)
    description = {key: getattr(record, key) for key in keys}
    description |= {"run_code": record.code, "models": freed + exported, "freed": freed}
    description |= _trace_shards(record.fingerprint, data_root)
    return description | {"raw": record.raw, "source": record.source}


def _trace_shards(fingerprint: str, data_root: str) -> dict[str, Any]:
    from trainer.data import training_record

    uri = training_record.place(data_root, fingerprint)
    description: dict[str, Any] = {"shards": f"shards/{fingerprint}"}
    description["forgotten"] = training_record.excluded_in(data_root, fingerprint)
    if storage.exists(uri):
        header = training_record.header(uri)
        description |= {"raw": f"raw/{header.raw}", "source": header.source}
        description["images"] = below(uri, data_root)
    return description


def _pruned_versions(names: set[str], data_root: str) -> list[str]:
    """Return the published versions of these runs that were deleted here: they may still be in use."""
    present = {item.shown for item in versions(data_root)}
    published = [item.name for item in PublishedRecord.read_all(data_root) if item.run in names]
    return [shown for shown in published if shown not in present]
