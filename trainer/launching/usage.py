"""Usage records: duration, GPUs, and bytes from and to servers of a process and its children.

A record is written every minute and at the end. A store that cannot be written costs only a warning.
"""

import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainer import storage
from trainer.base import json_files, traffic
from trainer.base.errors import KubedetError
from trainer.base.safe_text import whole_number
from trainer.base.temporary_folders import TemporaryFolder

FOLDER = "KUBEDET_USAGE"  # environment variable of a training's nodes: URI of the folder for their records
_DEVICES = Path("/dev")
_RECORD_INTERVAL = 60.0
_END_SECONDS = 15.0  # longest time that the end of the work waits for the last record
_LOG = logging.getLogger("usage")


FORM = storage.Form(
    "usage", 1,
    {
        "run": str, "step": str, "rank": int, "began": str, "ended": bool, "seconds": float, "nodes": int,
        "read": int, "written": int,
    },
    remedy="delete it: the other records of the run remain",
)  # fmt: skip


@dataclass(frozen=True)
class Record:
    """Usage of one process and its children."""

    run: str
    step: str
    rank: int  # number of the node, in a step with several
    began: str  # start in UTC, as ISO 8601
    ended: bool  # whether it ended; the record of a killed process is up to a minute old
    seconds: float
    nodes: int  # 1, or 0 for a process that only waited for machines with other records
    gpus: int | None  # number of GPUs; None if unknown
    read: int  # bytes received from servers
    written: int  # bytes sent to servers

    def encoded(self) -> bytes:
        """Return the record as JSON with its hash."""
        return json_files.encode({"kind": FORM.kind, "version": FORM.version, **asdict(self)})

    @classmethod
    def of(cls, fields: dict[str, Any]) -> "Record":
        """Return a record from parsed JSON; keys of later versions are ignored."""
        known: dict[str, Any] = {name: fields.get(name) for name in cls.__dataclass_fields__}
        return cls(**known)


def visible_gpus(devices: Path = _DEVICES, environment: Mapping[str, str] = os.environ) -> list[str] | None:
    """Return the GPUs of this process, named as in CUDA_VISIBLE_DEVICES; None if unknown.

    It reads the device files, because importing PyTorch takes seconds.
    """
    files = [path for path in devices.glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal()]
    if not files:
        # All AMD GPUs share one file, as do those of a Windows host.
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
    """Measures the usage of a step from its construction until `end`; writes `every` so many seconds."""

    def __init__(self, step: str, *, every: float = _RECORD_INTERVAL) -> None:
        self._step, self._every = step, every
        self._began, self._start = datetime.now(UTC), time.monotonic()
        self._folder = TemporaryFolder()
        traffic.count_in(self._folder.path)
        self._wake, self._is_over, self._has_warned = threading.Event(), False, False
        self._run, self.uri, self._rank, self._nodes = "", "", 0, 1
        self._gpus: int | None = 0
        self._thread = threading.Thread(target=self._keep_record, name="usage", daemon=True)

    def keep(self, folder: str, run: str, *, processes: int = 0, nodes: int = 1, rank: int = 0) -> None:
        """Write the record into a folder from now on; each of the `processes` uses a GPU, if any."""
        if self.uri:
            return
        visible = visible_gpus() if processes else []
        self._gpus = None if visible is None else min(processes, len(visible))
        self._run, self._nodes, self._rank = run, nodes, rank
        name = f"{self._step}-{self._began:%Y%m%dT%H%M%S}-{rank}-{secrets.token_hex(4)}.json"
        self.uri = storage.join(folder, name)
        self._thread.start()

    def record(self, *, ended: bool = False) -> Record:
        """Return the usage so far."""
        read, written = traffic.total(self._folder.path)
        return Record(
            self._run, self._step, self._rank, self._began.isoformat(timespec="seconds"), ended,
            round(time.monotonic() - self._start, 2), self._nodes, self._gpus, read, written,
        )  # fmt: skip

    def end(self) -> None:
        """Write the last record."""
        self._is_over = True
        self._wake.set()
        if self.uri:
            self._thread.join(_END_SECONDS)
            if self._thread.is_alive():
                _LOG.warning("%s is not written: the store is too slow", self.uri)
        traffic.count_in(None)
        self._folder.close()

    def _keep_record(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_over
            try:
                storage.write_bytes(self.uri, self.record(ended=is_last).encoded())
            except (KubedetError, OSError) as error:
                if not self._has_warned:
                    _LOG.warning("the usage of this step cannot be written to %s: %s", self.uri, error)
                self._has_warned = True
            if not is_last:
                self._wake.wait(self._every)


def begin(step: str) -> Meter | None:
    """Start a meter; None, with a warning, if there is no temporary folder."""
    try:
        return Meter(step)
    except OSError as error:
        _LOG.warning("the usage of this step is not measured: %s", error)
        return None


@contextmanager
def of_node(processes: int) -> Iterator[None]:
    """Measure this node of a training while the block runs, if FOLDER is set."""
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
