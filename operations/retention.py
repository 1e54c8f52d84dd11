"""Frees space in a data root: deletes old runs, model versions, and data that nothing else needs.

An artifact is a run, a version of a model, shards, raw tables, the images of a source, or the
trial runs of a search; its name is its path below the data root, such as `runs/20261121-4f0c`. The old images
of a kept source that are in no kept raw table are an artifact, too. Steps update
the time of data that they reuse (`storage.touch`), so the data of a starting run is recent.

Files that mark a folder as complete are deleted first: an interrupted prune leaves no partial data that looks
complete, and the next one continues it.
"""

import logging
import re
import time
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from operator import attrgetter
from pathlib import Path

from trainer import storage
from trainer.base.errors import ConfigError, DataError, KubedetError, MissingError, StorageError
from trainer.data import image_keys
from trainer.export import bundle, published_models
from trainer.steps.records import PublishedRecord, RunRecord, VerdictRecord

logger = logging.getLogger(__name__)

DAYS = 7.0
"""Default age up to which everything is kept."""
MAX_RUN_DAYS = 30.0
"""Days for which a run without a verdict counts as unfinished, because it may be resumed."""
_DAY_SECONDS = 24 * 3600.0
_DEPTHS = {"models": 2, "runs": 1, "tuning": 2, "shards": 1, "raw": 1, "images": 1}
"""Folders of the data root, with the depth of their artifacts, which refer only to those in later folders."""
_MARKERS = {"models": (bundle.CHECKSUMS,), "raw": ("manifest.json", "plan.json"), "shards": ("index.json",)}
"""Files that mark a folder as complete."""
_DATA_FOLDERS = ("raw", "shards", "images")
_THREADS = 32


@dataclass
class Artifact:
    """A part of a data root that is kept or deleted as a whole."""

    name: str
    uri: str
    size: int = 0  # Bytes.
    modified: float | None = 0.0
    """Time of its newest file, in seconds since 1970; None if the store does not report it."""
    files: set[str] = field(default_factory=set)  # File names; empty for images, which may be millions.
    reasons: list[str] = field(default_factory=list)  # Why it is kept.

    @property
    def kind(self) -> str:
        """The folder of the data root that contains it."""
        return self.name.partition("/")[0]

    def add(self, name: str, state: storage.FileState) -> None:
        """Add one of its files."""
        self.size += state.size
        known = state.modified is not None and self.modified is not None
        self.modified = max(self.modified or 0.0, state.modified or 0.0) if known else None
        if self.kind != "images":
            self.files.add(name)


def list_artifacts(data_root: str) -> dict[str, Artifact]:
    """Return the artifacts of a data root by name."""
    artifacts: dict[str, Artifact] = {}
    for kind, depth in _DEPTHS.items():
        for path, state in storage.scan(storage.join(data_root, kind)):
            parts = path.split("/")
            if len(parts) > depth:  # Otherwise the file belongs to no artifact.
                name = "/".join([kind, *parts[:depth]])
                artifact = artifacts.setdefault(name, Artifact(name, storage.join(data_root, name)))
                artifact.add("/".join(parts[depth:]), state)
    return artifacts


def check_keep(keep: int) -> None:
    """Raise ConfigError if the number of runs to keep is invalid."""
    if keep < 1:
        raise ConfigError(
            f"the number of runs to keep is {keep}", fix="use 1 or more: --keep N, or --prune N for a run"
        )


class Pruning:
    """Decides which artifacts are kept, and why: runs first, then versions of models, then data.

    An artifact whose use cannot be determined is kept.
    """

    def __init__(self, data_root: str, keep: int, days: float = DAYS, *, now: float | None = None) -> None:
        """Decide without deleting; `keep` is the number of runs and of earlier versions of each model."""
        check_keep(keep)
        self._root, self._keep_count, self._now = data_root, keep, time.time() if now is None else now
        self._young_seconds = days * _DAY_SECONDS
        # Read records first: anything written later is recent.
        records = sorted(RunRecord.read_all(data_root, strict=True), key=attrgetter("started"))
        self._records = {record.run: record for record in records}
        self.artifacts = list_artifacts(data_root)
        for artifact in self.artifacts.values():
            if artifact.modified is None:
                artifact.reasons.append("its age is unknown")
            elif self._now - artifact.modified < self._young_seconds:
                artifact.reasons.append(f"younger than {days:g} days")
        self._knows_images = True  # Whether all images that kept artifacts need are known.
        self._keep_runs()
        self._keep_versions()
        self._keep_searches()
        self._keep_raw_tables()
        self._keep_images()

    @property
    def deleted(self) -> list[Artifact]:
        """Artifacts that are not kept."""
        return [artifact for artifact in self.artifacts.values() if not artifact.reasons]

    @property
    def summary(self) -> str:
        """The deleted artifacts by kind and their size, in one line."""
        kinds = [artifact.kind for artifact in self.deleted]
        numbers = [f"{kinds.count(kind)} of {kind}" for kind in _DEPTHS if kind in kinds]
        size = sum(artifact.size for artifact in self.deleted)
        return f"{', '.join(numbers) or 'nothing'}: {size / 1e6:,.1f} MB"

    def _keep(self, name: str, reason: str) -> None:
        artifact = self.artifacts.get(name)
        if artifact and reason not in artifact.reasons:
            artifact.reasons.append(reason)

    def select(self, kind: str) -> list[tuple[str, Artifact]]:
        """Return the artifacts of a kind with their names below its folder."""
        return [
            (name.removeprefix(f"{kind}/"), artifact)
            for name, artifact in self.artifacts.items()
            if artifact.kind == kind
        ]

    def _keep_runs(self) -> None:
        """Keep the newest and the unfinished runs, and their data."""
        verdicts = {record.run: record for record in VerdictRecord.read_all(self._root)}
        published = {record.run for record in PublishedRecord.read_all(self._root)}
        runs = {*[name for name in self._records if f"runs/{name}" in self.artifacts][-self._keep_count :]}
        for name in runs:
            self._keep(f"runs/{name}", f"one of the newest {self._keep_count} runs")
        for name, record in self._records.items():
            ended = name in verdicts and (name in published or not verdicts[name].passed)
            if not ended and self._is_recent(datetime.fromisoformat(record.started).timestamp()):
                runs.add(name)
                self._keep(f"runs/{name}", "unfinished")
                for artifact in self.artifacts.values():  # The URI of the data root may have changed.
                    if f"/{artifact.name}/" in f"/{record.weights}":
                        artifact.reasons.append(f"run {name} began with its weights")
        for name in runs | {name for name, artifact in self.select("runs") if artifact.reasons}:
            if origin := self._records.get(name):
                for path in (f"shards/{origin.fingerprint}", origin.raw):
                    self._keep(path, f"run {name} was trained on it")
                continue
            self._knows_images = False
            for artifact in self.artifacts.values():
                if artifact.kind in _DATA_FOLDERS:
                    artifact.reasons.append(f"run {name} has no record of its data")

    def _is_recent(self, seconds: float) -> bool:
        return self._now - seconds < MAX_RUN_DAYS * _DAY_SECONDS

    def _keep_versions(self) -> None:
        """Keep current, recent, signed and registered versions of models, and their data."""
        published = {record.name: record for record in PublishedRecord.read_all(self._root)}
        bundles: dict[str, bundle.Bundle] = {}
        for name in published_models.model_names(self._root):
            versions, _ = published_models.load_versions(self._root, name)
            bundles |= {f"{name}/{version}": exported for version, exported in versions.items()}
            if current := published_models.read_current(self._root, name):
                self._keep(f"models/{name}/{current.version}", "the current version")
                earlier = [version for version in versions if version != current.version]
                for version in earlier[-self._keep_count :]:
                    self._keep(f"models/{name}/{version}", f"one of the newest {self._keep_count}")
        for path, artifact in self.select("models"):
            exported, shown = bundles.get(path), path.replace("/", "@")
            if exported is None:
                if bundle.CHECKSUMS in artifact.files:  # Otherwise a copy or a prune was interrupted.
                    artifact.reasons.append("damaged: `kubedet model list` shows the reason")
                continue
            if bundle.SIGNATURE in artifact.files:
                artifact.reasons.append("signed")
            if shown in published and published[shown].registry:
                artifact.reasons.append(f"registered at {published[shown].registry}")
            if artifact.reasons:
                shards = exported.metadata.trained_on.shards
                self._keep(f"shards/{shards}", f"{shown} was trained on it")

    def _keep_searches(self) -> None:
        """Keep the records of searches, and the shards of those whose trial runs are kept."""
        for path, artifact in self.select("tuning"):
            study, _, part = path.partition("/")
            if part in ("trials", "locks"):
                artifact.reasons.append("the record of a search")
            elif part == "runs" and artifact.reasons:
                try:
                    tree = storage.read_json(storage.join(self._root, "tuning", study, "study.json"))
                    self._keep(f"shards/{tree['shards'].rstrip('/').rpartition('/')[2]}", f"search {study}")
                except MissingError:
                    continue
                except (StorageError, LookupError, TypeError):
                    self._keep_all("shards", f"the shards of the search {study} are unknown")

    def _keep_raw_tables(self) -> None:
        """Keep the raw tables of kept shards."""
        from trainer.data import shard_folder  # numpy and pyarrow.

        for name, shards in self.select("shards"):
            if shards.reasons and shard_folder.INDEX in shards.files:
                try:
                    index = shard_folder.read_index(shards.uri)
                    self._keep(f"raw/{index.raw_fingerprint}", f"shards/{name} was made from it")
                except MissingError:
                    continue  # Another process has deleted it.
                except (StorageError, DataError):
                    self._keep_all("raw", f"the raw tables of shards/{name} are unknown")

    def _keep_images(self) -> None:
        """Keep the images of kept raw tables, except old images that are in no table."""
        from trainer.data import raw_folder, raw_manifest  # numpy and pyarrow.

        needed: dict[str, set[int]] = defaultdict(set)  # Digests of the images of kept tables, by source.
        for name, raw in self.select("raw"):
            if not raw.reasons:
                continue
            try:
                uri = raw_folder.read_manifest(raw.uri, raw_manifest.PLAN).images
                images = f"images/{uri.rstrip('/').rpartition('/')[2]}"
                self._keep(images, f"raw/{name} has its images")
                if raw_manifest.MANIFEST in raw.files:
                    table = raw_folder.read_image_table(raw_folder.read_manifest(raw.uri))
                    needed[images].update(table["place"].tolist())
                else:
                    self._knows_images = False  # The images are being downloaded.
            except (StorageError, DataError):
                self._keep_all("images", f"the images of raw/{name} are unknown")
                self._knows_images = False
        if self._knows_images:
            for name in needed.keys() & self.artifacts.keys():
                self._add_unused_images(self.artifacts[name], needed[name])

    def _add_unused_images(self, images: Artifact, needed: set[int]) -> None:
        """Add an artifact with the old images of a kept source that are in no kept raw table."""
        unused = Artifact(f"{images.name} (old images that nothing needs)", images.uri)
        for name, state in storage.scan(images.uri):
            digest = image_keys.path_digest(name)
            is_old = state.modified is not None and self._now - state.modified >= self._young_seconds
            if is_old and re.fullmatch("[0-9a-f]{16}", digest) and int(digest, 16) not in needed:
                unused.files.add(name)
                unused.size += state.size
        if unused.files:
            self.artifacts[unused.name] = unused

    def _keep_all(self, kind: str, reason: str) -> None:
        for _, artifact in self.select(kind):
            artifact.reasons.append(reason)


def prune(data_root: str, keep: int, days: float = DAYS, *, now: float | None = None) -> Pruning:
    """Delete the artifacts that `Pruning` does not keep; stop if one of them was used again meanwhile."""
    pruning = Pruning(data_root, keep, days, now=now)
    order = list(_DEPTHS)
    deleted = sorted(pruning.deleted, key=lambda artifact: order.index(artifact.kind))
    raw_tables = max((raw.modified or 0.0 for _, raw in pruning.select("raw")), default=0.0)
    with ThreadPoolExecutor(_THREADS) as threads:
        for number, artifact in enumerate(deleted):
            markers = [storage.join(artifact.uri, name) for name in _MARKERS.get(artifact.kind, ())]
            used = _newest_time(storage.state(marker) for marker in markers) > (artifact.modified or 0.0) + 1
            if artifact.kind == "images":
                raw_folder = storage.join(data_root, "raw")
                used = _newest_time(state for _, state in storage.scan(raw_folder)) > raw_tables + 1
            if used:
                for rest in deleted[number:]:
                    rest.reasons.append("used again meanwhile")
                break
            for marker in markers:
                storage.delete(marker)
            listed = artifact.files or storage.list_files(artifact.uri)
            uris = [storage.join(artifact.uri, name) if name else artifact.uri for name in listed]
            list(threads.map(storage.delete, uris))
            if storage.is_local(artifact.uri):
                _remove_folders(storage.local_path(artifact.uri))
    return pruning


def _newest_time(states: Iterable[storage.FileState | None]) -> float:
    return max((state.modified or 0.0 for state in states if state), default=0.0)


def _remove_folders(folder: Path) -> None:
    with suppress(OSError):  # Another process may remove them too.
        for path in [*sorted(folder.rglob("*"), reverse=True), folder]:
            with suppress(OSError):  # It is not empty.
                path.rmdir()


def prune_after_step(data_root: str, keep: int) -> None:
    """Prune at the end of a data step. Errors are only logged."""
    try:
        logger.info("deleted %s", prune(data_root, keep).summary)
    except KubedetError as error:
        logger.warning("nothing was deleted: %s", error)
