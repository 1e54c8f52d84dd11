"""What was made from what: `<data_root>/lineage/` has a small record of every training and every version.

    runs/<run>.json                written before a training begins: its folder, data, source, settings, code
    models/<name>@<version>.json   written when a version is published: its run, and where it is registered

The records name what lies below the data root relative to it, and stay when what they tell of is gone.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version as package_version
from typing import Any

from components.data_versions import KEY
from trainer import storage
from trainer.data import forgotten, seen
from trainer.errors import ConfigError, StorageError
from trainer.export import bundle, published_models

FOLDER = "lineage"


def run_began(
    data_root: str, output: str, run_id: str, data: dict[str, Any], recipe: str, overrides: dict[str, Any],
    weights: str,
) -> None:  # fmt: skip
    """Note down what a run trains on, and with which settings and code.

    Args:
        data_root: URI under which data are kept.
        output: URI of the run's folder.
        run_id: the run's id; may be empty.
        data: manifest of the shards.
        recipe: name of a recipe.
        overrides: dotted configuration keys and their values.
        weights: URI of the weights that it begins with; may be empty.

    Raises:
        StorageError: the data root cannot be written.
    """
    index = storage.read_json(storage.join(data["uri"], "index.json"))
    record = {
        "kind": "run", "version": 1, "run": _name(output), "run_id": run_id,
        "output": below(output, data_root),
        "shards": below(data["uri"], data_root), "raw": f"raw/{index.get('raw_fingerprint', '')}",
        "source": index["source"], KEY: data.get(KEY, ""), "recipe": recipe, "overrides": overrides,
        "weights": below(weights, data_root), "code": _code(), "started": _now(),
    }  # fmt: skip
    uri = storage.join(data_root, FOLDER, "runs", f"{_name(output)}.json")
    if not storage.exists(uri):  # A run that goes on began then.
        storage.write_json(uri, record)


def published(data_root: str, name: str, version: str, output: str, registry: str) -> None:
    """Note down which run made a version of a model, and the registry that knows it.

    Raises:
        StorageError: the data root cannot be written.
    """
    record = {"kind": "published", "version": 1, "model": name, "model_version": version}
    record |= {"run": _name(output), "registry": registry, "published": _now()}
    storage.write_json(storage.join(data_root, FOLDER, "models", f"{name}@{version}.json"), record)


def _name(output: str) -> str:
    return storage.absolute(output).rstrip("/").rpartition("/")[2]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _code() -> dict[str, str]:
    from components.images import COMPONENT_IMAGE

    code = {"kubedet": package_version("kubedet"), "torch": package_version("torch")}
    # In a pod the steps run in their image; it records the commit it was made of.
    return code | ({"image": COMPONENT_IMAGE} if "KUBERNETES_SERVICE_HOST" in os.environ else {})


def below(uri: str, data_root: str) -> str:
    """Return a URI relative to the data root, where it is below; a volume may be mounted elsewhere."""
    root = storage.absolute(data_root).rstrip("/") + "/"
    whole = storage.absolute(uri) if uri and storage.is_local(uri) else uri
    return whole.removeprefix(root)


def runs(data_root: str) -> list[dict[str, Any]]:
    """Return the records of all runs, the oldest first."""
    return sorted(_records(data_root, "runs"), key=lambda record: record["started"])


def _records(data_root: str, kind: str) -> Iterator[dict[str, Any]]:
    folder = storage.join(data_root, FOLDER, kind)
    for name in storage.list_files(folder):
        if name.endswith(".json"):
            yield storage.read_json(storage.join(folder, name))


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
    known = {f"{item['model']}@{item['model_version']}": item for item in _records(data_root, "models")}
    results = []
    for name in published_models.names(data_root):
        current = (published_models.current(data_root, name) or {}).get("version")
        for version, exported in published_models.versions(data_root, name)[0].items():
            results.append(_version(exported, name, known.get(f"{name}@{version}", {}), version == current))
    return results


def _version(exported: bundle.Bundle, name: str, record: dict[str, Any], current: bool) -> Version:
    origin = exported.metadata["trained_on"]
    # <run>/train/best.pt
    by_place = storage.parent(storage.parent(origin["checkpoint"])).rpartition("/")[2]
    return Version(
        name, exported.metadata["model_version"], origin["shards"], record.get("run") or by_place, current,
        origin["checkpoint"], exported.metadata.get("versions", {}), record.get("registry", ""),
    )  # fmt: skip


def saw(data_root: str, names: frozenset[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the images that are meant, by the fingerprint of the shards that had them.

    Args:
        data_root: URI under which data are kept.
        names: see `seen.find`.
    """
    folder = storage.join(data_root, seen.FOLDER)
    fingerprints = [name.removesuffix(".parquet") for name in storage.list_files(folder)]
    results = {each: list(seen.find(seen.place(data_root, each), names)) for each in fingerprints}
    return {each: rows for each, rows in results.items() if rows}


def held_back(data_root: str, source: str) -> dict[str, Any] | None:
    """Return the record of the newest run of a source that was evaluated, if the gate refused its model."""
    for record in reversed(runs(data_root)):
        gate = storage.join(folder_of(record, data_root), "evaluation", "gate.json")
        if record["source"] == source and storage.exists(gate):
            return None if storage.read_json(gate)["passed"] else record
    return None


def folder_of(run: dict[str, Any], data_root: str) -> str:
    """Return the URI of a run's folder, given its record."""
    output = str(run["output"])
    return output if "://" in output or output.startswith("/") else storage.join(data_root, output)


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
        StorageError: the data root cannot be read.
    """
    with suppress(StorageError, ConfigError):
        return _of_model(published_models.load(what, data_root), data_root)
    for record in runs(data_root):
        if what in (record["run"], record["run_id"]) or below(what, data_root) == record["output"]:
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
    name = exported.metadata["name"]
    records = {f"{item['model']}@{item['model_version']}": item for item in _records(data_root, "models")}
    record = records.get(f"{name}@{exported.metadata['model_version']}", {})
    current = (published_models.current(data_root, name) or {}).get("version")
    chosen = _version(exported, name, record, current == exported.metadata["model_version"])
    description = {
        "kind": "model", "model": chosen.shown, "current": chosen.current, "digest": exported.digest,
        "checkpoint": chosen.checkpoint, "code": chosen.code, "registry": chosen.registry,
        "signed": storage.exists(storage.join(exported.uri, bundle.SIGNATURE)),
    }  # fmt: skip
    for run in runs(data_root):
        if run["run"] == chosen.run:
            return description | _of_run(run, data_root)
    return description | {"run": chosen.run} | _of_shards(chosen.shards, data_root)


def _of_run(record: dict[str, Any], data_root: str) -> dict[str, Any]:
    fingerprint = record["shards"].rpartition("/")[2]
    exported = [item.shown for item in versions(data_root) if item.run == record["run"]]
    keys = ("run", "run_id", "output", "recipe", "overrides", "weights", "started", KEY)
    description = {key: record[key] for key in keys} | {"run_code": record["code"], "models": exported}
    description |= _of_shards(fingerprint, data_root)
    return description | {"raw": record["raw"], "source": record["source"]}


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
    of_runs = [item["run"] for item in runs(data_root) if item["shards"].endswith(f"/{fingerprint}")]
    of_models = [item.shown for item in versions(data_root) if item.shards == fingerprint]
    source = seen.header(seen.place(data_root, fingerprint))["source"]
    names = forgotten.names(data_root, source)
    marked = [row | {"forgotten": bool({row["key"], row["file_name"]} & names)} for row in rows]
    return {
        "shards": f"shards/{fingerprint}", "source": source, "runs": of_runs, "models": of_models,
        "images": marked,
    }  # fmt: skip
