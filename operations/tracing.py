"""Where a model or a run came from, down to its source, and which runs and models saw an image."""

from contextlib import suppress
from typing import Any

from components import container_digests
from components.data_versions import KEY
from components.records import PublishedRecord, RunRecord, below
from operations.lineage import runs, saw, version_of, versions
from trainer import storage
from trainer.base.errors import ConfigError, StorageError
from trainer.data import forgotten, seen
from trainer.export import bundle, published_models


def trace(what: str, data_root: str) -> dict[str, Any]:
    """Tell what something was made from, or who saw it.

    Args:
        what: a model (NAME, NAME@VERSION or a bundle's folder), a run (its name, id or folder), or an image
            (key, file name, or digest of its bytes or annotations, 16 hex digits).
        data_root: URI under which data are kept.

    Returns:
        kind ("model", "run" or "image"), and what is known.

    Raises:
        ConfigError: nothing of that name is known.
        StorageError: the data root cannot be read, or what tells of it is damaged.
    """
    exported = None
    with suppress(StorageError, ConfigError):
        exported = published_models.load(what, data_root)
    if exported is not None:
        return _of_model(exported, data_root)
    for record in runs(data_root):
        if what in (record.run, record.run_id) or below(what, data_root) == record.output:
            return {"kind": "run", **_of_run(record, data_root)}
    results = saw(data_root, frozenset({what}))
    if not results:
        raise ConfigError(
            f"{what!r} is no model, no run and no image that is known in {data_root}",
            fix="`kubedet model list` shows models; a run has the name of its folder; an image its key or "
            "the name of its file. Runs and images are known since version 0.2.0",
        )
    who = [_who(each, rows, data_root) for each, rows in results.items()]
    return {"kind": "image", "image": what, "seen": who}


def _of_model(exported: bundle.Bundle, data_root: str) -> dict[str, Any]:
    chosen = version_of(exported, data_root)
    description = {
        "kind": "model", "model": chosen.shown, "current": chosen.current, "digest": exported.digest,
        "checkpoint": chosen.checkpoint, "code": chosen.code, "registry": chosen.registry,
        "signed": storage.exists(storage.join(exported.uri, bundle.SIGNATURE)),
    }  # fmt: skip
    for run in runs(data_root):
        if run.run == chosen.run:
            return description | _of_run(run, data_root)
    return description | {"run": chosen.run} | _of_shards(chosen.shards, data_root)


def _of_run(record: RunRecord, data_root: str) -> dict[str, Any]:
    exported = [item.shown for item in versions(data_root) if item.run == record.run]
    freed = _freed({record.run}, data_root)
    keys = ("run", "run_id", "output", "recipe", "overrides", "weights", "started", KEY)
    description = {key: getattr(record, key) for key in keys} | {
        "run_code": record.code,
        "models": freed + exported,
        "freed": freed,
    }
    description["run_images"] = container_digests.read(data_root, record.run)
    description |= _of_shards(record.fingerprint, data_root)
    return description | {"raw": record.raw, "source": record.source}


def _of_shards(fingerprint: str, data_root: str) -> dict[str, Any]:
    uri = seen.place(data_root, fingerprint)
    description: dict[str, Any] = {"shards": f"shards/{fingerprint}"}
    description["forgotten"] = seen.forgotten_in(data_root, fingerprint)
    if storage.exists(uri):
        header = seen.header(uri)
        description |= {"raw": f"raw/{header['raw']}", "source": header["source"]}
        description["images"] = below(uri, data_root)
    return description


def _who(fingerprint: str, rows: list[dict[str, Any]], data_root: str) -> dict[str, Any]:
    """Return the runs and versions that had a set of shards, and what it had of an image."""
    of_runs = [item.run for item in runs(data_root) if item.fingerprint == fingerprint]
    of_models = [item.shown for item in versions(data_root) if item.shards == fingerprint]
    freed = _freed(set(of_runs), data_root)
    source = seen.header(seen.place(data_root, fingerprint))["source"]
    names = forgotten.names(data_root, source)
    marked = [row | {"forgotten": bool({row["key"], row["file_name"]} & names)} for row in rows]
    return {
        "shards": f"shards/{fingerprint}", "source": source, "runs": of_runs, "models": freed + of_models,
        "freed": freed, "images": marked,
    }  # fmt: skip


def _freed(names: set[str], data_root: str) -> list[str]:
    """Return versions that runs of these names have published and that are gone: somebody may use them."""
    present = {item.shown for item in versions(data_root)}
    published = [item.shown for item in PublishedRecord.read_all(data_root) if item.run in names]
    return [shown for shown in published if shown not in present]
