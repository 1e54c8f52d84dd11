"""Meters what a process, and those that it starts, use from some point on, and keeps it in a small record.

The record is written when its place is known, every minute from then on, and at the end: what a process
used that is killed is known but for its last minute. A store that does not take it costs a warning, never the
work.
"""

import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from trainer import storage
from trainer.base import traffic
from trainer.base.errors import KubedetError
from trainer.base.safe_text import whole_number
from trainer.base.temporary_folders import TemporaryFolder
from trainer.launching.usage.record import Record

_LOG = logging.getLogger("usage")

FOLDER = "KUBEDET_USAGE"
"""Environment variable of a training's nodes: URI of the folder that receives their records."""

DEVICES = Path("/dev")

_INTERVAL_SECONDS = 60.0
"""Time between two writes of the record."""
_PATIENCE = 15.0
"""Seconds that the end of the work may wait for the record to be written."""


def visible_gpus(devices: Path = DEVICES, environment: Mapping[str, str] = os.environ) -> list[str] | None:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; None if unknown.

    This reads the device files, because importing PyTorch takes seconds. A container has those of its GPUs.
    """
    files = [path for path in devices.glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal()]
    if not files:
        # AMD's GPUs and those of a Windows host share one file, however many there are.
        return None if any((devices / name).exists() for name in ("kfd", "dxg")) else []
    if (chosen := environment.get("CUDA_VISIBLE_DEVICES")) is None:
        return [str(number) for number in range(len(files))]
    names = []
    for name in map(str.strip, chosen.split(",")):
        known = name.startswith(("GPU-", "MIG-")) or (name.isdecimal() and int(name) < len(files))
        if not known:  # CUDA ignores everything from the first invalid name on.
            break
        names.append(name)
    return names


class Meter:
    """Meters from when it is made until `end`.

    Args:
        step: whose work it is.
        every: seconds between two writes of the record.
    """

    def __init__(self, step: str, *, every: float = _INTERVAL_SECONDS) -> None:
        self._step, self._every = step, every
        self._began, self._start = datetime.now(UTC), time.monotonic()
        self._folder = TemporaryFolder()
        traffic.count_in(self._folder.path)
        self._wake, self._is_over, self._has_warned = threading.Event(), False, False
        self._run, self.uri, self._rank, self._nodes = "", "", 0, 1
        self._gpus: int | None = 0
        self._thread = threading.Thread(target=self._keep_record, name="usage", daemon=True)

    def keep(self, folder: str, run: str, *, processes: int = 0, nodes: int = 1, rank: int = 0) -> None:
        """Keep the record in a folder from now on.

        Args:
            folder: its URI.
            run: the run's id.
            processes: that compute on a GPU each, where there are GPUs.
            nodes: see `Record.nodes`.
            rank: see `Record.rank`.
        """
        if self.uri:
            return
        visible = visible_gpus() if processes else []
        self._gpus = None if visible is None else min(processes, len(visible))
        self._run, self._nodes, self._rank = run, nodes, rank
        name = f"{self._step}-{self._began:%Y%m%dT%H%M%S}-{rank}-{secrets.token_hex(4)}.json"
        self.uri = storage.join(folder, name)
        self._thread.start()

    def record(self, *, ended: bool = False) -> Record:
        """Return what was used so far."""
        read, written = traffic.total(self._folder.path)
        return Record(
            self._run, self._step, self._rank, self._began.isoformat(timespec="seconds"), ended,
            round(time.monotonic() - self._start, 2), self._nodes, self._gpus, read, written,
        )  # fmt: skip

    def end(self) -> None:
        """Write the record for the last time, and meter no more."""
        self._is_over = True
        self._wake.set()
        if self.uri:
            self._thread.join(_PATIENCE)
            if self._thread.is_alive():
                _LOG.warning("%s is not written: the store is too slow", self.uri)
        traffic.count_in(None)
        self._folder.close()

    def _keep_record(self) -> None:
        while not self._is_over:
            self._write(ended=False)
            self._wake.wait(self._every)
        self._write(ended=True)

    def _write(self, *, ended: bool) -> None:
        try:
            storage.write_bytes(self.uri, self.record(ended=ended).encoded())
        except (KubedetError, OSError) as error:
            if not self._has_warned:
                _LOG.warning("what this step uses cannot be kept in %s: %s", self.uri, error)
            self._has_warned = True


def begin(step: str) -> Meter | None:
    """Begin to meter a step's work; None, with a warning, where there is no room even for that."""
    try:
        return Meter(step)
    except OSError as error:
        _LOG.warning("what this step uses is not metered: %s", error)
        return None


@contextmanager
def of_node(processes: int) -> Iterator[None]:
    """Meter this node of a training while the block runs, where the environment names a folder for it.

    Args:
        processes: of the training on this node.
    """
    folder = os.environ.get(FOLDER, "")
    meter = begin("train") if folder else None
    if meter is None:
        yield
        return
    rank = whole_number(os.environ.get("PET_NODE_RANK", "")) or 0
    meter.keep(folder, folder.rstrip("/").rpartition("/")[2], processes=processes, rank=rank)
    try:
        yield
    finally:
        meter.end()
