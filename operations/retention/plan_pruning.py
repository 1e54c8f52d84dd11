"""What of a data root is needed, and why: nothing here writes or deletes.

Whatever cannot be judged is kept, and says so.
"""

import time
from collections import defaultdict
from datetime import datetime

import numpy as np

from components import in_use
from components.records import PublishedRecord
from operations import lineage
from operations.retention import GRACE, UNENDED, pins
from operations.retention.inventory import Thing, inventory, read_listed
from operations.tuning import ENDED
from trainer import storage
from trainer.base.errors import DataError, StorageError
from trainer.data import image_keys, raw_folder
from trainer.data.raw_folder import RawManifest
from trainer.export import bundle, published_models


def judge(
    data_root: str, keep: int, grace: float = GRACE, now: float | None = None, runs: str = ""
) -> dict[str, Thing]:
    """Return what the data root holds by name, each with the reasons to keep it.

    Args:
        data_root: URI under which data are kept.
        keep: how many of the newest runs are kept, and how many versions `model rollback` can go back.
        grace: seconds, see `GRACE`.
        now: seconds since 1970; None asks the clock.
        runs: see `inventory`.

    Raises:
        StorageError: it cannot be read, or a record in it is damaged.
        DataError: a record in it is of a newer version.
    """
    return _Judge(data_root, keep, grace, time.time() if now is None else now, runs).things


_DATA = ("raw/", "shards/", "images/", "versions/")

_UNENDED = "it has not ended"


class _Judge:
    """Looks at runs, then at versions, then at the data of those that are kept."""

    def __init__(self, data_root: str, keep: int, grace: float, now: float, runs: str) -> None:
        self._root, self._keep_last, self._grace, self._now = data_root, keep, grace, now
        # Notes and records first: what is written after them is younger than `grace`.
        self.records = {record.run: record for record in lineage.runs(data_root, strict=True)}
        self.things = inventory(data_root, runs)
        self._keep_used()
        for name in pins.pinned(data_root):
            self._keep(name, "pinned")
        for thing in self.things.values():
            if thing.modified is None:
                thing.keep("its store does not tell its age")
            elif now - thing.modified < grace:
                thing.keep("written a short time ago")
        self._judge_runs()
        versions = self._judge_versions()
        self._judge_data(versions)
        self._judge_sources()

    def _keep(self, name: str, reason: str) -> None:
        if name in self.things:
            self.things[name].keep(reason)

    def _of(self, kind: str) -> dict[str, Thing]:
        """Return the things of a kind by their name below its folder."""
        all_things = self.things.items()
        return {name.partition("/")[2]: thing for name, thing in all_things if name.startswith(f"{kind}/")}

    def _keep_used(self) -> None:
        """Keep what runs that begin need."""
        for run, use in in_use.notes(self._root).items():
            if use.is_late(self._now):
                continue
            for thing in self.things.values():
                needs_all = use.names is None and thing.name.startswith(_DATA)
                if needs_all or thing.has(use.weights) or thing.name in (use.names or ()):
                    thing.keep(f"the run {run} begins")

    def _judge_runs(self) -> None:
        runs = self._of("runs")
        published = {record.run for record in PublishedRecord.read_all(self._root)}
        newest = sorted(runs, key=lambda name: self._age_key(name, runs[name]), reverse=True)
        for name, run in runs.items():
            if run.place != storage.join(self._root, "runs", name) and not self._is_recorded(name, run):
                run.keep("no record of the data root tells that it is a run")
            if name in newest[: self._keep_last]:
                run.keep(f"one of the newest {self._keep_last} runs")
            young = run.modified is not None and self._now - run.modified < UNENDED
            if young and not _ended(run, name in published):
                run.keep(_UNENDED)

    def _is_recorded(self, name: str, run: Thing) -> bool:
        record = self.records.get(name)
        return record is not None and record.folder(self._root) == storage.absolute(run.place)

    def _age_key(self, name: str, run: Thing) -> tuple[str, float]:
        """Order runs by their beginning; those without a record are the oldest."""
        record = self.records.get(name)
        return record.started if record else "", run.modified or 0.0

    def _judge_versions(self) -> list[lineage.Version]:
        """Judge the models' versions; return those that are kept."""
        known = {item.shown: item for item in lineage.versions(self._root)}
        goals = self._goals()
        kept = []
        for place, thing in self._of("models").items():
            shown = place.replace("/", "@")
            item = known.get(shown)
            if shown in goals:
                thing.keep(goals[shown])
            if item is None:
                if bundle.CHECKSUMS in thing.files:
                    thing.keep("it is damaged: `kubedet model list` says how")
                continue  # Without it, it is what a copy or a pruning that was killed has left.
            if bundle.SIGNATURE in thing.files:
                thing.keep("signed")
            if item.registry:
                thing.keep(f"registered at {item.registry}")
            if run := self.things.get(f"runs/{item.run}"):
                for reason in run.why[:1]:
                    thing.keep(f"made by {item.run}: {reason}")
            if thing.why:
                kept.append(item)
        return kept

    def _goals(self) -> dict[str, str]:
        """Return the versions that are current, or that a rollback goes to."""
        goals: dict[str, str] = {}
        for name in published_models.names(self._root):
            current = published_models.current(self._root, name) or {}
            # A history grows by a version a night; one can be gone back to, whatever `keep` is.
            history = current.get("history", [])[-max(self._keep_last, 1) :]
            goals |= {f"{name}@{each}": "`model rollback` goes to it" for each in history}
            goals |= {f"{name}@{current['version']}": "the current version"} if current else {}
        return goals

    def _judge_data(self, versions: list[lineage.Version]) -> None:
        """Judge runs of kept versions, then what kept runs and versions are made of."""
        for item in versions:
            self._keep(f"runs/{item.run}", f"{item.shown} was made by it")
            self._keep(f"shards/{item.shards}", f"{item.shown} was trained on it")
        # Before any of them keeps another: whoever only lent its weights needs its own data no more.
        kept = [name for name, run in self._of("runs").items() if run.why]
        for name in kept:
            if name in self.records:
                self._keep_origin(name)
                continue
            for thing in self.things.values():
                if thing.name.startswith(_DATA):
                    thing.keep(f"no record tells what run {name} was made of")
        for name, record in self.records.items():
            unseen = f"runs/{name}" not in self.things
            if unseen and self._now - datetime.fromisoformat(record.started).timestamp() < UNENDED:
                self._keep_origin(name)  # Its folder may be elsewhere.
        self._judge_studies()

    def _keep_origin(self, name: str) -> None:
        """Keep what a run was made of: its data, and the run or version whose weights it began with."""
        record = self.records[name]
        # By its fingerprint: the root may have had another address when the record was written.
        for place in (f"shards/{record.fingerprint}", record.raw):
            self._keep(place, f"run {name} has it")
        run = self.things.get(f"runs/{name}")
        for lender in self.things.values():
            # One that has ended has its own by now.
            if lender.has(record.weights) and (run is None or _UNENDED in run.why):
                lender.keep(f"run {name} began with its weights")

    def _judge_studies(self) -> None:
        """Keep records of searches, and of those that were gone on with lately trainings and shards."""
        folder = storage.join(self._root, "tuning")
        newest: dict[str, float] = defaultdict(float)
        for path, state in storage.scan(folder):
            study = path.partition("/")[0]
            newest[study] = max(newest[study], self._now if state.modified is None else state.modified)
        for study, modified in newest.items():
            place = storage.join(folder, study, "study.json")
            for part in ("trials", "locks"):
                self._keep(f"tuning/{study}/{part}", "the record of a search")
            has_ended = storage.exists(storage.join(folder, study, ENDED))
            if self._now - modified < UNENDED and not has_ended:
                self._keep(f"tuning/{study}/runs", "its search has not ended")
            if self._now - modified < UNENDED and storage.exists(place):
                shards = read_listed(place).get("shards", "").rstrip("/").rpartition("/")[2]
                self._keep(f"shards/{shards}", f"the search {study} trains on it")

    def _judge_sources(self) -> None:
        """Judge raw tables of kept shards, then images and data versions of kept raw tables."""
        for name, shards in self._of("shards").items():
            if shards.why and "index.json" in shards.files:
                index = read_listed(storage.join(shards.place, "index.json"))
                self._keep(f"raw/{index.get('raw_fingerprint', '')}", f"shards/{name} was made of it")
        referred: dict[str, list[np.ndarray]] = defaultdict(list)
        unknown = False
        for name, raw in self._of("raw").items():
            if not raw.why:
                continue
            try:
                plan = raw_folder.read_plan(raw.place)
                images = plan.images.rstrip("/").rpartition("/")[2]
                referred[images].append(_digests(plan))
            except (StorageError, DataError):
                unknown = True
                for thing in self._of("images").values():
                    thing.keep(f"raw/{name} does not tell which images it has")
                continue
            self._keep(f"images/{images}", f"raw/{name} has its images")
        if not unknown:
            for images, digests in referred.items():
                self._find_spare(images, np.unique(np.concatenate(digests)))
        for version in self._of("versions").values():
            raw_name = read_listed(version.place).get("raw", "")
            if self.things.get(raw_name, version).why:
                version.keep(f"{raw_name} is kept")

    def _find_spare(self, images: str, referred: np.ndarray) -> None:
        """Note which images of a source no kept tables refer to.

        Args:
            images: the source's name.
            referred: sorted digests of the places of those that are referred to, uint64.
        """
        thing = self.things.get(f"images/{images}")
        # A run that begins, or an unmeasured age, keeps all of them.
        if thing is None or thing.modified is None or not _kept_for_tables_alone(thing):
            return
        for name, state in storage.scan(thing.place):
            digest = image_keys.place_digest(name.rpartition("/")[2])
            if len(digest) != 16 or state.modified is None or self._now - state.modified < self._grace:
                continue
            place = np.uint64(int(digest, 16))
            at = int(np.searchsorted(referred, place))
            if at == len(referred) or referred[at] != place:
                thing.spare[name] = state.size


def _kept_for_tables_alone(thing: Thing) -> bool:
    return all(reason.startswith(("raw/", "written a short")) for reason in thing.why)


def _ended(run: Thing, published: bool) -> bool:
    """Whether a run is over: its model published, or held back."""
    if published:
        return True
    if not {"train/result.json", "evaluation/gate.json"} <= set(run.files):
        return False
    return not read_listed(storage.join(run.place, "evaluation", "gate.json")).get("passed", True)


def _digests(plan: RawManifest) -> np.ndarray:
    """Return the digests of the places of all images that raw tables list, uint64."""
    columns = ["key", "file_name", "origin", "version"]
    digests: list[int] = []
    for split in plan.splits:
        table = plan.table(split)
        for block in range(table.blocks):
            rows = table.columns(block, columns)
            described = zip(*(rows[name] for name in columns), strict=True)
            digests += [int(image_keys.place_digest(image_keys.place(*row)), 16) for row in described]
    return np.array(digests, np.uint64)
