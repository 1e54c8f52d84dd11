"""Deletes what nothing needs. An interrupted prune never leaves partial data that looks complete."""

import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from components import environment, in_use
from operations.retention import GRACE, plan_pruning
from operations.retention.inventory import Artifact
from trainer import storage
from trainer.base.errors import ConfigError, KubedetError
from trainer.export import bundle
from trainer.launching import leases
from trainer.storage import local

logger = logging.getLogger(__name__)

_ORDER = ("models", "runs", "tuning", "shards", "raw", "versions", "images")
"""Artifacts are deleted before those that they refer to."""
MARKERS = {"models": (bundle.CHECKSUMS,), "raw": ("manifest.json", "plan.json"), "shards": ("index.json",)}
"""Files that mark a folder as complete."""
_LAST = {"runs": ("evaluation/gate.json", "train/result.json")}
"""Files by which the rest of a folder is recognized as deletable."""
_AT_ONCE = 32
_BATCH = 512
_PATIENCE = 2 * leases.LAPSE
"""Seconds to wait for another pruning: as long as it takes to notice that it died."""


@dataclass(frozen=True)
class Pruned:
    """The artifacts that a pruning found."""

    artifacts: dict[str, Artifact]
    """All, by name."""

    @property
    def freed(self) -> list[Artifact]:
        """Those that were deleted as a whole."""
        return [artifact for artifact in self.artifacts.values() if not artifact.why]

    @property
    def size(self) -> int:
        """Deleted bytes."""
        return sum(artifact.freed for artifact in self.artifacts.values())

    @property
    def summary(self) -> str:
        """What was deleted, in a line."""
        kinds = [artifact.kind for artifact in self.freed]
        spare = sum(len(artifact.spare) for artifact in self.artifacts.values() if artifact.why)
        words = [f"{kinds.count(kind)} of {kind}" for kind in _ORDER if kind in kinds]
        words += [f"{spare:,} unused images"] if spare else []
        return f"{', '.join(words) or 'nothing'}: {self.size / 1e6:,.1f} MB"


def check(keep: int) -> None:
    """Raise ConfigError for a number of runs that cannot be kept."""
    if keep < 1:
        raise ConfigError(
            f"the newest {keep} runs cannot be kept", fix="give 1 or more: --keep N, or --prune N of a run"
        )


def plan(
    data_root: str, keep: int, *, grace: float = GRACE, runs: str = "", now: float | None = None
) -> Pruned:
    """Return what `prune` would delete, and why the rest is kept.

    The arguments are those of `plan_pruning.judge`.
    """
    check(keep)
    return Pruned(plan_pruning.judge(data_root, keep, grace, now, runs))


def prune(
    data_root: str, keep: int, *, grace: float = GRACE, runs: str = "", now: float | None = None
) -> Pruned:
    """Delete what nothing needs; see `plan`. The next call continues an interrupted one."""
    check(keep)
    holder = f"a pruning ({environment.run_id() or 'by hand'})"
    with leases.hold(leases.of_data_root(data_root), holder, patience=_PATIENCE) as lease:
        pruned = plan(data_root, keep, grace=grace, runs=runs, now=now)
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            for artifact in sorted(pruned.artifacts.values(), key=lambda each: _ORDER.index(each.kind)):
                for names in _in_order(artifact):
                    for begin in range(0, len(names), _BATCH):
                        lease.check()
                        uris = [storage.join(artifact.place, name) if name else artifact.place
                                for name in names[begin : begin + _BATCH]]  # fmt: skip
                        list(threads.map(storage.delete, uris))
        for artifact in pruned.freed:
            if storage.is_local(artifact.place):
                local.remove_empty(artifact.place)
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
    """Prune at the end of a step of the data; 0 keeps all. A problem is only logged."""
    if not keep:
        return
    try:
        logger.info("freed %s", prune(data_root, keep).summary)
    except KubedetError as error:
        logger.warning("nothing was freed: %s", error)
