"""Sends a run's metrics to trackers of experiments; the training is neither stopped nor slowed by them.

A tracker that fails is told of once, and tried again now and then with what has come since; what it never
takes is in metrics.jsonl all the same.
"""

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from typing import Any, Literal, Protocol

from trainer import storage
from trainer.base.errors import DamagedError, DataError, KubedetError
from trainer.config.schema import Config

State = Literal["finished", "stopped", "failed"]
"""How a run ended: stopped is to be gone on with."""

RUN_IDS = "trackers.json"
"""File of a run's folder: the run's id at each tracker, so that a resumed run goes on in the same one."""
_FORM = storage.Form("trackers", 1, {"ids": {"*": str}})

AGAIN_SECONDS = 60.0
"""How long a tracker that failed is left alone."""
END_SECONDS: dict[State, float] = {"finished": 60.0, "stopped": 5.0, "failed": 5.0}
"""How long the end of a training waits for trackers, at most: one that was stopped has little time left."""
MOST_ROWS = 100_000
"""Rows that are kept for a tracker that does not answer; then the oldest go."""

_MODULES = {
    "mlflow": ("trainer.trackers.mlflow_tracker", "MlflowTracker"),
    "wandb": ("trainer.trackers.wandb_tracker", "WandbTracker"),
}
_MLFLOW_SET = ("MLFLOW_RUN_ID", "MLFLOW_TRACKING_URI")
"""Variables with which MLflow is configured: Kubeflow Pipelines sets both in the pods of steps."""
_LOG = logging.getLogger("trackers")


@dataclass(frozen=True)
class TrackedRun:
    """What trackers are told of a run when it begins."""

    name: str
    """For people."""
    output: str
    """URI of its folder."""
    parameters: Mapping[str, Any]
    """The configuration, by dotted keys."""
    tags: Mapping[str, str]


@dataclass(frozen=True)
class Row:
    """Metrics at one step."""

    kind: str
    """"train" or "val"."""
    step: int
    values: Mapping[str, float]
    """Metrics by the names that TensorBoard shows too, e.g. val/AP."""
    time: float
    """Seconds since 1970."""


class Tracker(Protocol):
    """One tracker. Its methods are called by one thread, one after the other, and may raise anything."""

    def start(self, run: TrackedRun, run_id: str) -> str:
        """Begin a run, or go on with the one of that id; returns its id. Called again after it failed."""
        ...

    def write(self, rows: Sequence[Row]) -> None:
        """Take rows. After an error the same rows come again."""
        ...

    def finish(self, state: State, summary: Mapping[str, Any]) -> None:
        """End the run, with the figures of its best weights."""
        ...


def names_of(config: Config) -> list[str]:
    """Return the trackers that the configuration or the environment asks for."""
    names: list[str] = list(dict.fromkeys(config.train.trackers))
    if "mlflow" not in names and any(os.environ.get(name) for name in _MLFLOW_SET):
        names.append("mlflow")
    return names


def open_tracking(config: Config, output: str, fingerprint: str, *, resumed: bool) -> "Tracking":
    """Return what sends a run's metrics to all trackers that are configured; to none as a rule.

    Args:
        config: train.trackers names them; MLflow is one also where its variables are set.
        output: URI of the run's folder.
        fingerprint: of the shards.
        resumed: whether the run goes on: then it goes on in the same run of the trackers.
    """
    trackers = {}
    for name in names_of(config):
        module, kind = _MODULES[name]
        try:
            trackers[name] = getattr(import_module(module), kind)()
        except ImportError as error:
            _LOG.warning(
                "nothing is sent to %s: %s; install it with pip install 'kubedet[%s]'", name, error, name
            )
    run = TrackedRun(
        name=_name_of(output),
        output=output,
        parameters=dict(_flat(asdict(config))),
        tags={"recipe": config.recipe, "shards": fingerprint, "output": output},
    )
    return Tracking(trackers, run, resumed=resumed)


class Tracking:
    """Sends rows to trackers in threads of their own. Without trackers it does nothing."""

    def __init__(
        self, trackers: Mapping[str, Tracker], run: TrackedRun | None = None, *, resumed: bool = False
    ) -> None:
        """Begin the run at each tracker, or go on with it."""
        self._senders: list[_Sender] = []
        if run and trackers:
            ids = _RunIds(run.output, resumed)
            self._senders = [_Sender(name, tracker, run, ids) for name, tracker in trackers.items()]

    def add(self, kind: str, row: Mapping[str, Any]) -> None:
        """Take a row of metrics; row["step"] is the optimiser steps done."""
        if not self._senders:
            return
        values = {
            f"{kind}/{name.removeprefix('coco/')}": float(value)
            for name, value in row.items()
            if name != "step" and isinstance(value, int | float)
        }
        for sender in self._senders:
            sender.put(Row(kind, row["step"], values, time.time()))

    def finish(self, state: State, summary: Mapping[str, Any] | None = None) -> None:
        """End the run at the trackers, waiting for END_SECONDS at most. Further calls do nothing."""
        senders, self._senders = self._senders, []
        for sender in senders:
            sender.end(state, summary or {})
        end = time.monotonic() + END_SECONDS[state]
        for sender in senders:
            sender.wait(end - time.monotonic())


class _RunIds:
    """The ids of a run at its trackers, kept in its folder."""

    def __init__(self, output: str, resumed: bool) -> None:
        self._uri, self._lock = storage.join(output, RUN_IDS), threading.Lock()
        self._resumed = resumed
        self._ids: dict[str, str] | None = None

    def read(self, name: str) -> str:
        with self._lock:
            return self._all().get(name, "")

    def write(self, name: str, run_id: str) -> None:
        with self._lock:
            ids = self._all()
            if ids.get(name) != run_id:
                ids[name] = run_id
                storage.write_json(self._uri, {"kind": "trackers", "version": 1, "ids": ids})

    def _all(self) -> dict[str, str]:
        if self._ids is None:
            self._ids = self._kept() if self._resumed and storage.exists(self._uri) else {}
        return self._ids

    def _kept(self) -> dict[str, str]:
        """Return the ids that an earlier process wrote; none where they cannot be told."""
        try:
            ids: dict[str, str] = storage.read_json(self._uri, _FORM)["ids"]
        except (DamagedError, DataError) as error:
            _LOG.warning("%s; the trackers get a new run", error.message)
            return {}
        return ids


class _Sender:
    """A thread that sends rows to one tracker."""

    def __init__(self, name: str, tracker: Tracker, run: TrackedRun, ids: _RunIds) -> None:
        self._name, self._tracker, self._run, self._ids = name, tracker, run, ids
        self._queue: queue.SimpleQueue[Row | tuple[State, Mapping[str, Any]]] = queue.SimpleQueue()
        self._waiting: deque[Row] = deque(maxlen=MOST_ROWS)
        self._started, self._failed, self._next_try = False, False, 0.0
        # A daemon: a server that does not answer keeps no process from its end.
        self._thread = threading.Thread(target=self._work, name=f"track-{name}", daemon=True)
        self._thread.start()

    def put(self, row: Row) -> None:
        self._queue.put(row)

    def end(self, state: State, summary: Mapping[str, Any]) -> None:
        self._queue.put((state, summary))

    def wait(self, seconds: float) -> None:
        self._thread.join(max(0.0, seconds))
        if self._thread.is_alive():
            _LOG.warning("%s still has not taken everything: not waiting for it any longer", self._name)

    def _work(self) -> None:
        while True:
            item = self._queue.get()
            if isinstance(item, Row):
                self._waiting.append(item)
                if self._queue.empty() and time.monotonic() >= self._next_try:
                    self._attempt(self._send)
            else:
                if self._attempt(self._send):
                    self._attempt(partial(self._tracker.finish, *item))
                return

    def _send(self) -> None:
        if not self._started:
            run_id = self._tracker.start(self._run, self._ids.read(self._name))
            self._started = True
            self._ids.write(self._name, run_id)
        if self._waiting:
            rows = list(self._waiting)
            self._tracker.write(rows)
            for _ in rows:
                self._waiting.popleft()

    def _attempt(self, action: Callable[[], None]) -> bool:
        """Do something with the tracker; what goes wrong is told once."""
        try:
            action()
        except Exception as error:  # Whatever a client of theirs raises: no training ends for it.
            if not self._failed:
                reason = error.message if isinstance(error, KubedetError) else str(error)
                _LOG.warning(
                    "%s does not take metrics (%s): the training goes on, and it is tried again now and then",
                    self._name, (reason.strip() or type(error).__name__).splitlines()[0][:300],
                )  # fmt: skip
            self._failed = True
            self._next_try = time.monotonic() + AGAIN_SECONDS
            return False
        if self._failed:
            _LOG.info("%s takes metrics again", self._name)
            self._failed = False
        return True


def _name_of(output: str) -> str:
    """The run's name: its folder's, without the part of the training."""
    parts = [part for part in output.rstrip("/").split("/") if part]
    return parts[-2] if len(parts) > 1 and parts[-1] == "train" else parts[-1]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    leaves: list[tuple[str, Any]] = []
    for name, value in tree.items():
        if isinstance(value, Mapping):
            leaves += _flat(value, f"{prefix}{name}.")
        else:
            leaves.append((prefix + name, value))
    return leaves
