"""Retention: what of a data root is needed and why, and how the rest is freed.

    <data_root>/retention/lock/   lease (`trainer.launching.leases`): held to free space, and to start using
                                  data that may be freed
    <data_root>/retention/pins/   an empty file for each artifact that somebody wants kept, by its name
    <data_root>/retention/uses/   what runs that begin need, until their own records tell it

An artifact is a run, a version of a model, shards, raw tables, a name of data, all images of a source, or the
trainings of a search's trials. It has the name of its folder or file below the data root, such as
`runs/20261121-4f0c`. An interrupted prune never leaves partial data that looks complete.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from components import environment, in_use
from components.records import PublishedRecord
from operations import lineage
from operations.tuning.space import ENDED
from trainer import storage
from trainer.base.errors import ConfigError, DataError, KubedetError, MissingError, StorageError
from trainer.data import image_keys
from trainer.export import bundle, published_models
from trainer.launching import leases

if TYPE_CHECKING:
    import numpy as np

    from trainer.data.raw_folder import RawManifest

logger = logging.getLogger(__name__)

GRACE = 24 * 3600.0  # Seconds for which whatever was written is kept.
MAX_RUN_SECONDS = 30 * 24 * 3600.0
"""Seconds for which a run without an end counts as running: so long may retries begin."""
_DEPTH = {"models": 2, "runs": 1, "tuning": 2, "shards": 1, "raw": 1, "versions": 1, "images": 1}
"""Kinds of artifacts with the depth of their names. They are deleted before those that they refer to."""
MARKERS = {"models": (bundle.CHECKSUMS,), "raw": ("manifest.json", "plan.json"), "shards": ("index.json",)}
"""Files that mark a folder as complete."""
_LAST = {"runs": ("evaluation/gate.json", "train/result.json")}
"""Files by which the rest of a folder is recognized as deletable."""
_THREADS = 32
_DELETIONS_PER_LEASE_CHECK = 512
_LEASE_WAIT_SECONDS = 2 * leases.EXPIRY_SECONDS
"""Seconds to wait for another pruning: as long as it takes to notice that it died."""
_DATA = ("raw", "shards", "images", "versions")
_UNFINISHED = "it has not ended"
_RECENT = "written a short time ago"


@dataclass
class Artifact:
    """A part of a data root that is kept or deleted as a whole."""

    name: str  # Of its folder or file, relative to the data root.
    place: str  # Its URI.
    size: int = 0  # Bytes.
    modified: float | None = 0.0
    """Time of its newest file, in seconds since 1970; None if the store does not say."""
    files: list[str] = field(default_factory=list)
    """Names relative to its folder; [""] if it is a file itself; [] for images, which may be millions."""
    why: list[str] = field(default_factory=list)  # Reasons to keep it.
    spare: dict[str, int] = field(default_factory=dict)
    """Of kept images: those that nothing kept refers to, and their bytes."""

    def keep(self, reason: str) -> None:
        """Record a reason to keep it, once."""
        if reason not in self.why:
            self.why.append(reason)

    @property
    def kind(self) -> str:
        """The folder of the data root that it is in."""
        return self.name.partition("/")[0]

    @property
    def freed(self) -> int:
        """Bytes to be deleted."""
        return sum(self.spare.values()) if self.why else self.size

    def has(self, uri: str) -> bool:
        """Whether it contains a file, given its URI, which may have another root on another machine."""
        return f"/{self.name}/" in f"/{uri}" or uri.startswith(f"{self.place}/")

    def see(self, name: str, state: storage.FileState) -> None:
        """Add one of its files."""
        self.size += state.size
        known = state.modified is not None and self.modified is not None
        self.modified = max(self.modified or 0.0, state.modified or 0.0) if known else None
        if self.kind != "images":
            self.files.append(name)


def read_listed(uri: str) -> dict[str, Any]:
    """Return a record that was listed; {} if another process has deleted it since."""
    try:
        return dict(storage.read_json(uri))
    except MissingError:
        return {}


def inventory(data_root: str, runs: str = "") -> dict[str, Artifact]:
    """Return the artifacts by name; `runs` is the URI of another folder with runs."""
    artifacts: dict[str, Artifact] = {}
    for kind, depth in _DEPTH.items():
        for name, state in storage.scan(storage.join(data_root, kind)):
            parts = name.split("/")
            if kind != "versions" and len(parts) <= depth:
                continue  # A model's `current`, or a file of nobody's.
            key = "/".join([kind, *parts[:depth]])
            artifact = artifacts.setdefault(key, Artifact(key, storage.join(data_root, key)))
            artifact.see("/".join(parts[depth:]), state)
    for name, state in storage.scan(runs) if runs else ():
        first, _, rest = name.partition("/")
        if not rest:
            continue
        place = storage.join(runs, first)
        artifact = artifacts.setdefault(f"runs/{first}", Artifact(f"runs/{first}", place))
        if artifact.place == place:
            artifact.see(rest, state)
        else:
            artifact.keep(f"{runs} has a run of that name too")
    return artifacts


def pin(data_root: str, name: str, runs: str = "") -> str:
    """Pin an artifact, given by its name or that of its run; return its name."""
    with leases.hold(leases.of_data_root(data_root), "a pin", patience=600.0):
        everything = inventory(data_root, runs)
        whole = name if name in everything else f"runs/{name}"
        if whole not in everything:
            raise ConfigError(
                f"there is no {name} in {data_root}",
                fix="pass a run, or an artifact as listed by `kubedet data prune --keep 1 --dry-run`",
            )
        storage.create(storage.join(data_root, "retention", "pins", whole), b"")
    return whole


def unpin(data_root: str, name: str) -> str:
    """Unpin an artifact; return its name."""
    known = pinned(data_root)
    whole = name if name in known else f"runs/{name}"
    if whole not in known:
        raise ConfigError(f"{name} is not pinned", fix=f"pinned: {', '.join(sorted(known)) or 'nothing'}")
    storage.delete(storage.join(data_root, "retention", "pins", whole))
    return whole


def pinned(data_root: str) -> frozenset[str]:
    """Return the names of the artifacts that are pinned."""
    return frozenset(storage.list_files(storage.join(data_root, "retention", "pins")))


def check(keep: int) -> None:
    """Raise ConfigError for a number of runs that cannot be kept."""
    if keep < 1:
        raise ConfigError(
            f"the newest {keep} runs cannot be kept", fix="use 1 or more: --keep N, or --prune N for a run"
        )


class Plan:
    """Decides which artifacts are needed, and why: checks runs, then versions, then data, without deleting
    any.

    An artifact that cannot be judged is kept, with the reason. `keep` is the number of newest runs, and of
    versions for `model rollback`; `grace` in seconds, see `GRACE`; `now` in seconds since 1970, None asks the
    clock; `runs` see `inventory`.
    """

    def __init__(
        self, data_root: str, keep: int, *, grace: float = GRACE, runs: str = "", now: float | None = None
    ) -> None:
        check(keep)
        now = time.time() if now is None else now
        self._root, self._keep_last, self._grace, self._now = data_root, keep, grace, now
        # Notes and records first: what is written after them is younger than `grace`.
        self._records = {record.run: record for record in lineage.runs(data_root, strict=True)}
        self.artifacts = inventory(data_root, runs)
        for run, use in in_use.notes(data_root).items():
            for artifact in self.artifacts.values() if not use.is_late(now) else ():
                needs_all = use.names is None and artifact.kind in _DATA
                if needs_all or artifact.has(use.weights) or artifact.name in (use.names or ()):
                    artifact.keep(f"the run {run} begins")
        for name in pinned(data_root):
            self._keep(name, "pinned")
        for artifact in self.artifacts.values():
            if artifact.modified is None:
                artifact.keep("its age is unknown")
            elif now - artifact.modified < grace:
                artifact.keep(_RECENT)
        self._judge_runs()
        self._judge_data(self._judge_versions())
        self._judge_studies()
        self._judge_sources()

    @property
    def freed(self) -> list[Artifact]:
        """Artifacts that are deleted completely."""
        return [artifact for artifact in self.artifacts.values() if not artifact.why]

    @property
    def size(self) -> int:
        """Deleted bytes."""
        return sum(artifact.freed for artifact in self.artifacts.values())

    @property
    def summary(self) -> str:
        """Summary of what is deleted, in one line."""
        kinds = [artifact.kind for artifact in self.freed]
        spare = sum(len(artifact.spare) for artifact in self.artifacts.values() if artifact.why)
        words = [f"{kinds.count(kind)} of {kind}" for kind in _DEPTH if kind in kinds]
        words += [f"{spare:,} unused images"] if spare else []
        return f"{', '.join(words) or 'nothing'}: {self.size / 1e6:,.1f} MB"

    def _keep(self, name: str, reason: str) -> None:
        if name in self.artifacts:
            self.artifacts[name].keep(reason)

    def _of(self, kind: str) -> dict[str, Artifact]:
        """Return the artifacts of a kind by their name below its folder."""
        return {name.partition("/")[2]: each for name, each in self.artifacts.items() if each.kind == kind}

    def _is_recent(self, seconds: float | None) -> bool:
        return seconds is not None and self._now - seconds < MAX_RUN_SECONDS

    def _judge_runs(self) -> None:
        runs = self._of("runs")
        published = {record.run for record in PublishedRecord.read_all(self._root)}
        began = {name: record.started for name, record in self._records.items()}
        # Those without a record are the oldest.
        newest = sorted(
            runs, key=lambda name: (began.get(name, ""), runs[name].modified or 0.0), reverse=True
        )
        for name, run in runs.items():
            record = self._records.get(name)
            is_recorded = record is not None and record.folder(self._root) == storage.absolute(run.place)
            if run.place != storage.join(self._root, "runs", name) and not is_recorded:
                run.keep("no record of the data root says that it is a run")
            if name in newest[: self._keep_last]:
                run.keep(f"one of the newest {self._keep_last} runs")
            decision = {}
            if {"train/result.json", "evaluation/gate.json"} <= set(run.files):
                decision = read_listed(storage.join(run.place, "evaluation", "gate.json"))
            if self._is_recent(run.modified) and name not in published and decision.get("passed", True):
                run.keep(_UNFINISHED)

    def _judge_versions(self) -> list[lineage.Version]:
        known = {item.shown: item for item in lineage.versions(self._root)}
        for name in published_models.names(self._root):
            current = published_models.current(self._root, name)
            # At least one earlier version can be restored, whatever `keep` is.
            for version in (current.history if current else [])[-max(self._keep_last, 1) :]:
                self._keep(f"models/{name}/{version}", "`model rollback` goes to it")
            if current:
                self._keep(f"models/{name}/{current.version}", "the current version")
        kept = []
        for place, artifact in self._of("models").items():
            item = known.get(place.replace("/", "@"))
            if item is None:
                if bundle.CHECKSUMS in artifact.files:
                    artifact.keep("it is damaged: `kubedet model list` says how")
                continue  # Without it, it is left over from an interrupted copy or pruning.
            if bundle.SIGNATURE in artifact.files:
                artifact.keep("signed")
            if item.registry:
                artifact.keep(f"registered at {item.registry}")
            if (run := self.artifacts.get(f"runs/{item.run}")) and run.why:
                artifact.keep(f"made by {item.run}: {run.why[0]}")
            if artifact.why:
                kept.append(item)
        return kept

    def _judge_data(self, versions: list[lineage.Version]) -> None:
        """Judge runs of kept versions, then the data of kept runs and versions."""
        for item in versions:
            self._keep(f"runs/{item.run}", f"{item.shown} was made by it")
            self._keep(f"shards/{item.shards}", f"{item.shown} was trained on it")
        # Before any of them keeps another: a run that only lent its weights does not need its data.
        for name in [name for name, run in self._of("runs").items() if run.why]:
            if name in self._records:
                self._keep_origin(name)
                continue
            for artifact in self.artifacts.values():
                if artifact.kind in _DATA:
                    artifact.keep(f"run {name} has no record of its data")
        for name, record in self._records.items():
            if f"runs/{name}" in self.artifacts:
                continue
            if self._is_recent(datetime.fromisoformat(record.started).timestamp()):
                self._keep_origin(name)  # Its folder may be elsewhere.

    def _keep_origin(self, name: str) -> None:
        """Keep the data of a run, and the run or version whose weights it began with."""
        record = self._records[name]
        # By its fingerprint: the root may have had another address when the record was written.
        for place in (f"shards/{record.fingerprint}", record.raw):
            self._keep(place, f"run {name} has it")
        run = self.artifacts.get(f"runs/{name}")
        if run is None or _UNFINISHED in run.why:  # One that has ended has weights of its own.
            for lender in self.artifacts.values():
                if lender.has(record.weights):
                    lender.keep(f"run {name} began with its weights")

    def _judge_studies(self) -> None:
        """Keep records of searches, and trainings and shards of recent ones."""
        folder = storage.join(self._root, "tuning")
        newest: dict[str, float] = defaultdict(float)
        for path, state in storage.scan(folder):
            study = path.partition("/")[0]
            newest[study] = max(newest[study], self._now if state.modified is None else state.modified)
        for study, modified in newest.items():
            for part in ("trials", "locks"):
                self._keep(f"tuning/{study}/{part}", "the record of a search")
            if not self._is_recent(modified):
                continue
            if not storage.exists(storage.join(folder, study, ENDED)):
                self._keep(f"tuning/{study}/runs", "its search has not ended")
            searched = read_listed(storage.join(folder, study, "study.json"))
            shards = searched.get("shards", "").rstrip("/").rpartition("/")[2]
            self._keep(f"shards/{shards}", f"the search {study} trains on it")

    def _judge_sources(self) -> None:
        """Judge raw tables of kept shards, then images and data versions of kept raw tables."""
        import numpy as np

        from trainer.data import raw_folder

        for name, shards in self._of("shards").items():
            if shards.why and "index.json" in shards.files:
                index = read_listed(storage.join(shards.place, "index.json"))
                self._keep(f"raw/{index.get('raw_fingerprint', '')}", f"shards/{name} was made of it")
        referred: dict[str, list[np.ndarray]] = defaultdict(list)
        are_known = True
        for name, raw in self._of("raw").items():
            if not raw.why:
                continue
            try:
                plan = raw_folder.read_manifest(raw.place, raw_folder.PLAN)
                images = plan.images.rstrip("/").rpartition("/")[2]
                referred[images].append(_digests(plan))
                self._keep(f"images/{images}", f"raw/{name} has its images")
            except (StorageError, DataError):
                are_known = False
                for artifact in self._of("images").values():
                    artifact.keep(f"the images of raw/{name} are unknown")
        for images, digests in referred.items() if are_known else ():
            self._find_spare(images, np.unique(np.concatenate(digests)))
        for version in self._of("versions").values():
            raw_name = read_listed(version.place).get("raw", "")
            if self.artifacts.get(raw_name, version).why:
                version.keep(f"{raw_name} is kept")

    def _find_spare(self, images: str, referred: "np.ndarray") -> None:
        """Note the images of a source, by its name, that are not `referred` to (sorted digests, uint64)."""
        artifact = self.artifacts.get(f"images/{images}")
        # A run that begins, or an unmeasured age, keeps all of them.
        if artifact is None or artifact.modified is None:
            return
        if not all(reason.startswith(("raw/", _RECENT)) for reason in artifact.why):
            return
        for name, state in storage.scan(artifact.place):
            digest = image_keys.place_digest(name.rpartition("/")[2])
            if len(digest) != 16 or state.modified is None or self._now - state.modified < self._grace:
                continue
            place = referred.dtype.type(int(digest, 16))
            at = int(referred.searchsorted(place))
            if at == len(referred) or referred[at] != place:
                artifact.spare[name] = state.size


def _digests(plan: "RawManifest") -> "np.ndarray":
    """Return the digests of the places of all images in raw tables, uint64."""
    import numpy as np

    columns = ["key", "file_name", "origin", "version"]
    digests: list[int] = []
    for split in plan.splits:
        table = plan.table(split)
        for block in range(table.blocks):
            rows = table.batch(block, columns).to_pydict()
            described = zip(*(rows[name] for name in columns), strict=True)
            digests += [int(image_keys.place_digest(image_keys.place(*row)), 16) for row in described]
    return np.array(digests, np.uint64)


def prune(
    data_root: str, keep: int, *, grace: float = GRACE, runs: str = "", now: float | None = None
) -> Plan:
    """Delete what nothing needs; see `Plan`. The next call continues an interrupted one."""
    check(keep)  # Before others are waited for.
    order = list(_DEPTH)
    holder = f"a pruning ({environment.run_id() or 'by hand'})"
    with leases.hold(leases.of_data_root(data_root), holder, patience=_LEASE_WAIT_SECONDS) as lease:
        pruned = Plan(data_root, keep, grace=grace, runs=runs, now=now)
        with ThreadPoolExecutor(_THREADS) as threads:
            for artifact in sorted(pruned.artifacts.values(), key=lambda each: order.index(each.kind)):
                for names in _in_order(artifact):
                    for begin in range(0, len(names), _DELETIONS_PER_LEASE_CHECK):
                        lease.check()
                        uris = [
                            storage.join(artifact.place, name) if name else artifact.place
                            for name in names[begin : begin + _DELETIONS_PER_LEASE_CHECK]
                        ]
                        list(threads.map(storage.delete, uris))
        for artifact in pruned.freed:
            if storage.is_local(artifact.place):
                folder = storage.local_path(artifact.place)
                for path in [*sorted(folder.rglob("*"), reverse=True), folder]:
                    with suppress(OSError):  # It is not empty.
                        path.rmdir()
        for run, use in in_use.notes(data_root).items():
            if use.is_late(time.time() if now is None else now):
                storage.delete(in_use.place(data_root, run))
    return pruned


def _in_order(artifact: Artifact) -> Iterator[list[str]]:
    """Yield files to delete of an artifact, by their names in it, each list before the next."""
    if artifact.why:
        yield list(artifact.spare)
        return
    # Of images there may be millions: they are listed when it is their turn.
    files = artifact.files or storage.list_files(artifact.place)
    first, last = (ends.get(artifact.kind, ()) for ends in (MARKERS, _LAST))
    for names in (first, set(files) - {*first, *last}, last):
        yield [name for name in names if name in files]


def prune_after(data_root: str, keep: int) -> None:
    """Prune at the end of a step of the data. A problem is only logged."""
    try:
        logger.info("freed %s", prune(data_root, keep).summary)
    except KubedetError as error:
        logger.warning("nothing was freed: %s", error)
