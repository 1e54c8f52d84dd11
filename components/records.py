"""What was made from what: `<data_root>/lineage/` has a small record of every training and every version.

    runs/<run>.json                written before a training begins: its folder, data, source, settings, code
    images/<run>.json              the images that it really ran, see `components.container_digests`
    models/<name>@<version>.json   written when a version is published: its run, and where it is registered
    verdicts/<run>.json            written when the gate has decided: whether it passed, and its metrics
    nothing_new/<run id>.json      written when a run ends before it begins: since what nothing is new

The records name what lies below the data root relative to it, and stay when what they tell of is gone. Each
holds its own hash; those of earlier programs have none.
"""

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version as package_version
from typing import Any

from components.data_versions import KEY
from trainer import storage
from trainer.base.errors import DamagedError, FormError
from trainer.data import seen
from trainer.export import bundle, published_models
from trainer.storage import Form, records

logger = logging.getLogger(__name__)

FOLDER = "lineage"

_RUNS, _MODELS, _VERDICTS, _NOTHING_NEW = "runs", "models", "verdicts", "nothing_new"
_TEXTS = ("run", "run_id", "output", "shards", "raw", "source", KEY, "recipe", "weights", "started")
_RUN = Form(
    "run", 1, dict.fromkeys(_TEXTS, str) | {"overrides": {}, "code": {}},
    "the run writes it anew when it goes on; else put a copy of it back, for nothing else tells of that run",
)  # fmt: skip
_PUBLISHED = Form(
    "published", 1, {"model": str, "model_version": str, "run": str, "registry": str},
    "export and publish that version again, or put a copy of it back",
)  # fmt: skip
_VERDICT = Form(
    "verdict",
    1,
    {"run": str, "passed": bool, "metrics": {"*": float}},
    "evaluate that run again, or delete it",
)
_FORMS = {_RUNS: _RUN, _MODELS: _PUBLISHED, _VERDICTS: _VERDICT}


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
        "kind": "run", "version": 1, "run": name_of(output), "run_id": run_id,
        "output": below(output, data_root),
        "shards": below(data["uri"], data_root), "raw": f"raw/{index.get('raw_fingerprint', '')}",
        "source": index["source"], KEY: data.get(KEY, ""), "recipe": recipe, "overrides": overrides,
        "weights": below(weights, data_root), "code": _code(), "started": _now(),
    }  # fmt: skip
    uri = storage.join(data_root, FOLDER, _RUNS, f"{name_of(output)}.json")
    if not storage.exists(uri) or _read(uri, _RUN) is None:  # A run that goes on began then.
        storage.write_json(uri, record)


def published(data_root: str, name: str, version: str, output: str, registry: str) -> None:
    """Note down which run made a version of a model, and the registry that knows it.

    Raises:
        StorageError: the data root cannot be written.
    """
    record = {"kind": "published", "version": 1, "model": name, "model_version": version}
    record |= {"run": name_of(output), "registry": registry, "published": _now()}
    storage.write_json(storage.join(data_root, FOLDER, _MODELS, f"{name}@{version}.json"), record)


def decided(data_root: str, output: str, passed: bool, metrics: dict[str, float]) -> None:
    """Note down what the gate made of a run, for when its folder is gone.

    Args:
        data_root: URI under which data are kept.
        output: URI of the run's folder.
        passed: whether its model may be exported.
        metrics: of its evaluation, by name.

    Raises:
        StorageError: the data root cannot be written.
    """
    record = {"kind": "verdict", "version": 1, "run": name_of(output), "passed": passed, "metrics": metrics}
    uri = storage.join(data_root, FOLDER, _VERDICTS, f"{name_of(output)}.json")
    storage.write_json(uri, record | {"decided": _now()})


def verdicts(data_root: str) -> dict[str, dict[str, Any]]:
    """Return what the gate made of runs, by the run's name; damaged records are left out with a warning."""
    return {record["run"]: record for record in _records(data_root, _VERDICTS)}


def nothing_new(data_root: str, run_id: str, since: str, differences: str) -> bool:
    """Note down that a run ended since there was nothing new; tells whether nobody had before.

    Args:
        data_root: URI under which data are kept.
        run_id: the run's id.
        since: the model, or the run, since which nothing is new.
        differences: what is.

    Raises:
        StorageError: the data root cannot be written.
    """
    record = {"kind": "nothing new", "version": 1, "run_id": run_id, "since": since, "found": differences}
    uri = storage.join(data_root, FOLDER, _NOTHING_NEW, f"{run_id}.json")
    return storage.create(uri, records.encode(record | {"ended": _now()}))


def without_news(data_root: str) -> frozenset[str]:
    """Return the ids of the runs that ended since there was nothing new.

    Raises:
        StorageError: the data root cannot be read.
    """
    names = storage.list_files(storage.join(data_root, FOLDER, _NOTHING_NEW))
    return frozenset(name.removesuffix(".json") for name in names)


def name_of(output: str) -> str:
    """Return how a run is called in the lineage, given the URI of its folder."""
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


def runs(data_root: str, *, strict: bool = False) -> list[dict[str, Any]]:
    """Return the records of all runs, the oldest first.

    Args:
        data_root: URI under which data are kept.
        strict: whether a damaged record is an error, and not left out with a warning.

    Raises:
        DamagedError: see `strict`; or DataError: a record is of a newer version.
        StorageError: the data root cannot be read.
    """
    return sorted(_records(data_root, _RUNS, strict=strict), key=lambda record: record["started"])


def publications(data_root: str) -> list[dict[str, Any]]:
    """Return the records of all published versions; damaged ones are left out with a warning."""
    return list(_records(data_root, _MODELS))


def _records(data_root: str, kind: str, *, strict: bool = False) -> Iterator[dict[str, Any]]:
    folder = storage.join(data_root, FOLDER, kind)
    for name in storage.list_files(folder):
        if name.endswith(".json") and (record := _read(storage.join(folder, name), _FORMS[kind], strict)):
            yield record


def _read(uri: str, form: Form, strict: bool = False) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = storage.read_json(uri, form)
    except (DamagedError, FormError) as error:
        if strict:
            raise
        logger.warning("%s; it is left out", error.message)
        return None
    return record


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
    known = _published(data_root)
    results = []
    for name in published_models.names(data_root):
        current = (published_models.current(data_root, name) or {}).get("version")
        for version, exported in published_models.versions(data_root, name)[0].items():
            results.append(_version(exported, name, known.get(f"{name}@{version}", {}), version == current))
    return results


def version_of(exported: bundle.Bundle, data_root: str) -> Version:
    """Return the version that a bundle is."""
    name, version = exported.metadata["name"], exported.metadata["model_version"]
    current = (published_models.current(data_root, name) or {}).get("version")
    return _version(exported, name, _published(data_root).get(f"{name}@{version}", {}), current == version)


def _published(data_root: str) -> dict[str, dict[str, Any]]:
    return {f"{item['model']}@{item['model_version']}": item for item in publications(data_root)}


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
    results = {each: list(seen.find(seen.place(data_root, each), names)) for each in seen.listed(data_root)}
    return {each: rows for each, rows in results.items() if rows}


def held_back(data_root: str, source: str) -> dict[str, Any] | None:
    """Return the record of the newest run of a source that was evaluated, if the gate refused its model."""
    decisions = verdicts(data_root)
    for record in reversed(runs(data_root)):
        if record["source"] == source and record["run"] in decisions:
            return None if decisions[record["run"]]["passed"] else record
    return None


def folder_of(run: dict[str, Any], data_root: str) -> str:
    """Return the URI of a run's folder, given its record."""
    output = str(run["output"])
    return output if "://" in output or output.startswith("/") else storage.join(data_root, output)
