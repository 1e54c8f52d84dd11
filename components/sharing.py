"""The pods of a run share the download and the sharding of its data.

The step `prepare` leads: it divides the work into parts, does them one after the other, and joins the
results. Steps `assist` do parts at the same time. The leader never depends on them: it does each part that
no assistant has begun, and takes over those of an assistant that failed. A part may be done twice, because
finished images and shards are reused. The result does not depend on the number of pods.

    <data_root>/sharing/<run id>/work.json                         what the leader needs done now
    <data_root>/sharing/<run id>/<token>/leader/                   lease of the leader's attempt
    <data_root>/sharing/<run id>/<token>/<phase>/<part>/           lease of the pod that does a part
    <data_root>/sharing/<run id>/<token>/<phase>/finished/<part>   an empty file
"""

import logging
import secrets
import socket
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from components import environment, in_use
from trainer import storage
from trainer.base import typed_json
from trainer.base.errors import ConfigError, KubedetError, MissingError, StorageError
from trainer.config.schema import DataConfig
from trainer.config.types import Overrides
from trainer.data import download, shards
from trainer.data.raw_folder import RawManifest
from trainer.launching import leases
from trainer.model import recipes

logger = logging.getLogger(__name__)

MAX_PODS = 256  # Most pods and parts: images are stored in 256 folders, each of which belongs to one part.
FETCH, WRITE = "fetch", "write"  # Phases: fetch images, then write shards.

PATIENCE = 300.0
"""Seconds for which an assistant waits for a leader that has not begun, or that died and is started again."""

_ENDED = "ended"
_PARTS_PER_POD = 2  # More than one, because pods start at different times and are not equally fast.
_POLL_SECONDS = 1.0
_KEEP_SECONDS = 24 * 3600.0  # Age at which files of earlier runs are deleted.
_FORM = storage.Form("sharing", 1)


@dataclass(frozen=True)
class Work:
    """Work that the leader needs done now."""

    token: str  # Of the leader's attempt.
    phase: str  # FETCH, WRITE, _ENDED, or empty before the first.
    parts: int
    manifest: RawManifest | None = None  # Input of the phase, see `Team.do`.
    kind: str = _FORM.kind
    version: int = _FORM.version


def check(pods: int) -> None:
    """Raise ConfigError for a number of pods that is not from 1 to MAX_PODS."""
    if not 1 <= pods <= MAX_PODS:
        raise ConfigError(f"partitions {pods} must be from 1 to {MAX_PODS}", fix="choose another number")


class Team:
    """The pods that prepare the data of a run, as one of them sees them; `pods` is their number."""

    def __init__(self, data_root: str, config: DataConfig, pods: int = MAX_PODS) -> None:
        self._data_root, self._config = data_root, config
        self.parts = 1 if pods == 1 else min(MAX_PODS, _PARTS_PER_POD * pods)
        self.token = secrets.token_hex(4)
        self._folder = "" if pods == 1 else storage.join(data_root, "sharing", environment.run_id())
        self._watches: dict[str, leases.Watch] = defaultdict(leases.Watch)

    def announce(self, phase: str, manifest: RawManifest | None = None) -> Work:
        """Publish what the assistants should do now."""
        work = Work(self.token, phase, self.parts, manifest)
        body = vars(work) | {"manifest": manifest.to_json() if manifest else None}
        storage.write_json(storage.join(self._folder, "work.json"), body)
        return work

    def announced(self) -> Work | None:
        """Return what the leader needs done now; None if no leader has begun."""
        with suppress(MissingError):
            uri = storage.join(self._folder, "work.json")
            return typed_json.load(Work, storage.read_json(uri, _FORM), uri, _FORM.remedy)
        return None

    def unfinished(self, work: Work, *, unclaimed: bool = False) -> list[int]:
        """Return the parts that are not finished, or only those that no pod has begun."""
        names = storage.list_files(storage.join(self._folder, work.token, work.phase))
        out = {name.removeprefix("finished/") for name in names if name.startswith("finished/")}
        if unclaimed:
            out |= {name.partition("/")[0] for name in names}
        return [part for part in range(work.parts) if str(part) not in out]

    def do_part(self, work: Work, part: int) -> bool:
        """Do a part of the work; return False if another pod is doing it."""
        phase = storage.join(self._folder, work.token, work.phase)
        uri, finished = storage.join(phase, str(part)), storage.join(phase, "finished", str(part))
        holder = socket.gethostname()
        with suppress(leases.HeldError), leases.hold(uri, holder, patience=0, watch=self._watches[uri]):
            if not storage.exists(finished):
                self._work(work, part)
                storage.create(finished, b"")
            return True
        return False

    def do(self, phase: str, manifest: RawManifest) -> int:
        """Do all parts of a phase, by the manifest before it, with the assistants; return their number."""
        in_use.renew(self._data_root)
        if self.parts == 1:
            self._work(Work(self.token, phase, 1, manifest), 0)
            return 1
        work = self.announce(phase, manifest)
        while parts := self.unfinished(work, unclaimed=True):
            self.do_part(work, parts[0])
        # Parts of other pods. Those of a pod that failed are free at once, of one that died after a while.
        while parts := self.unfinished(work):
            if not any(self.do_part(work, part) for part in parts):
                time.sleep(_POLL_SECONDS)
        return self.parts

    def leader(self, token: str) -> str:
        """Return the URI of the lease of a leader's attempt."""
        return storage.join(self._folder, token, "leader")

    def _work(self, work: Work, part: int) -> None:
        assert work.manifest is not None
        if work.phase == FETCH:
            download.fetch_partition(work.manifest, self._config, part, work.parts)
        else:
            shards.shard_partition(work.manifest, self._data_root, self._config, part, work.parts)


@contextmanager
def lead(data_root: str, config: DataConfig, pods: int) -> Iterator[Team]:
    """Lead the pods (1 to MAX_PODS, this one included) that prepare the data of this run in the block."""
    team = Team(data_root, config, pods if environment.run_id() else 1)
    if pods > 1:
        folder = storage.join(data_root, "sharing")
        for name, state in storage.list_states(folder, recursive=True).items():
            if state.modified is not None and time.time() - state.modified > _KEEP_SECONDS:
                storage.delete(storage.join(folder, name))
    if team.parts == 1:
        yield team
        return
    again = False
    with leases.hold(team.leader(team.token), socket.gethostname(), patience=0):
        team.announce("")
        try:
            yield team
        except KubedetError as error:
            again = error.transient  # The step is tried again, and may still need the assistants.
            raise
        finally:
            if not again:
                with suppress(StorageError):
                    team.announce(_ENDED)


def assist(data_root: str, recipe: str, overrides: Overrides, patience: float = PATIENCE) -> None:
    """Do parts of the work of the pod that leads this run, until that has all data; see `PATIENCE`."""
    if not environment.run_id():
        logger.info("there is no pod to assist: this process belongs to no run")
        return
    team = Team(data_root, recipes.load_here(recipe, overrides).data)
    watch, seen = leases.Watch(), time.monotonic()
    before: Work | None = None
    while True:
        work = team.announced()
        if work and work.phase == _ENDED:
            logger.info("all data is prepared")
            return
        if work and work != before and work.phase:
            # From the other end than the leader.
            while team.announced() == work and (parts := team.unfinished(work, unclaimed=True)):
                team.do_part(work, parts[-1])
            before, seen = work, time.monotonic()
        elif work and not watch.is_free(team.leader(work.token)):
            seen = time.monotonic()
        elif time.monotonic() - seen > patience:
            logger.warning("no step `prepare` of this run has been at work for %.0f s: ending", patience)
            return
        time.sleep(_POLL_SECONDS)
