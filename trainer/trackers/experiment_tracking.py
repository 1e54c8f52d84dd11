"""Sends a run's metrics to experiment trackers, without interrupting or slowing down training.

If a tracker fails, the failure is logged once, and the missed rows are sent later.
"""

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import import_module
from typing import Any, Literal, Protocol

from pydantic import dataclasses as models

from trainer import storage
from trainer.base.errors import KubedetError, install_command
from trainer.base.json_files import STRICT
from trainer.config.parsing import flatten
from trainer.config.schema import Config

State = Literal["finished", "stopped", "failed"]  # how a run ended; a stopped run can be resumed

RUN_IDS = "trackers.json"  # file in the run folder with its id at each tracker, for resuming


@models.dataclass(config=STRICT, frozen=True)
class _RunIds:
    """Content of RUN_IDS."""

    ids: dict[str, str] = field(default_factory=dict)  # By the tracker's name.
    kind: Literal["trackers"] = "trackers"
    version: Literal[1] = 1


RETRY_SECONDS = 60.0  # pause after a tracker failed
END_SECONDS: dict[State, float] = {"finished": 60.0, "stopped": 5.0, "failed": 5.0}
"""Maximum time that the end of a training run waits for trackers."""
_MAX_ROWS = 100_000
"""Maximum number of rows to keep for a tracker that does not respond; the oldest rows are dropped."""

_TRACKERS = {
    "mlflow": ("trainer.trackers.mlflow_tracker", "MlflowTracker"),
    "wandb": ("trainer.trackers.wandb_tracker", "WandbTracker"),
}
_MLFLOW_VARIABLES = ("MLFLOW_RUN_ID", "MLFLOW_TRACKING_URI")
"""Environment variables that enable MLflow. Kubeflow Pipelines sets both in the pods of steps."""
_LOG = logging.getLogger("trackers")


@dataclass(frozen=True)
class TrackedRun:
    """Description of a run for trackers."""

    name: str
    output: str  # URI of the run folder
    parameters: Mapping[str, Any]  # the configuration, by dotted keys
    tags: Mapping[str, str]


@dataclass(frozen=True)
class Row:
    """Metrics at one step."""

    step: int
    values: Mapping[str, float]  # metrics by TensorBoard name, e.g. val/AP
    time: float  # seconds since the epoch


class Tracker(Protocol):
    """An experiment tracker. All methods are called from one thread, and may raise any error."""

    def start(self, run: TrackedRun, run_id: str) -> str:
        """Start a run, or resume the run `run_id`, and return its id. Called again after a failure."""

    def write(self, rows: Sequence[Row]) -> None:
        """Write rows. Called again with the same rows after a failure."""

    def finish(self, state: State, summary: Mapping[str, Any]) -> None:
        """End the run, with the metrics of its best weights."""


def enabled_trackers(config: Config) -> list[str]:
    """Return the trackers that the configuration or the environment enables."""
    names: list[str] = list(dict.fromkeys(config.train.trackers))
    if "mlflow" not in names and any(os.environ.get(name) for name in _MLFLOW_VARIABLES):
        names.append("mlflow")
    return names


def open_tracking(config: Config, output: str, fingerprint: str, *, resumed: bool) -> "Tracking":
    """Return an object that sends a run's metrics to all enabled trackers.

    `fingerprint` identifies the shards; `resumed` is whether to resume the run at the trackers too.
    """
    trackers = {}
    for name in enabled_trackers(config):
        module, kind = _TRACKERS[name]
        try:
            trackers[name] = getattr(import_module(module), kind)()
        except ImportError as error:
            _LOG.warning("nothing is sent to %s: %s; %s", name, error, install_command(name))
    folders = [part for part in output.split("/") if part]
    run = TrackedRun(
        # The run folder contains `train`.
        name=folders[-2] if len(folders) > 1 and folders[-1] == "train" else folders[-1],
        output=output,
        parameters=flatten(asdict(config)),
        tags={"recipe": config.recipe, "shards": fingerprint, "output": output},
    )
    return Tracking(trackers, run, resumed=resumed)


class Tracking:
    """Sends rows to trackers, with one thread per tracker. Without trackers it does nothing."""

    def __init__(
        self, trackers: Mapping[str, Tracker], run: TrackedRun | None = None, *, resumed: bool = False
    ) -> None:
        """Start or resume the run at each tracker."""
        self._senders: list[_Sender] = []
        if not run or not trackers:
            return
        uri, lock = storage.join(run.output, RUN_IDS), threading.Lock()
        ids: dict[str, str] = {}
        try:
            if resumed and storage.exists(uri):
                ids = storage.read_model(uri, _RunIds, "delete it").ids
        except KubedetError as error:
            _LOG.warning("%s; starting new runs at the trackers", error.message)

        def save_run_id(name: str, run_id: str) -> None:
            with lock:
                if ids.get(name) != run_id:
                    ids[name] = run_id
                    storage.write_json(uri, asdict(_RunIds(ids)))

        self._senders = [
            _Sender(name, tracker, run, ids.get(name, ""), save_run_id) for name, tracker in trackers.items()
        ]

    def add(self, kind: str, row: Mapping[str, Any]) -> None:
        """Send a row of metrics; `kind` is "train" or "val", row["step"] is the optimizer step."""
        if not self._senders:
            return
        values = {
            f"{kind}/{name.removeprefix('coco/')}": float(value)
            for name, value in row.items()
            if name != "step" and isinstance(value, int | float)
        }
        for sender in self._senders:
            sender.queue.put(Row(row["step"], values, time.time()))

    def finish(self, state: State, summary: Mapping[str, Any] | None = None) -> None:
        """End the run at the trackers, waiting at most END_SECONDS. Further calls do nothing."""
        senders, self._senders = self._senders, []
        for sender in senders:
            sender.queue.put((state, summary or {}))
        end = time.monotonic() + END_SECONDS[state]
        for sender in senders:
            sender.wait(end - time.monotonic())


class _Sender:
    """A thread that sends rows to one tracker."""

    def __init__(
        self, name: str, tracker: Tracker, run: TrackedRun, run_id: str, save_id: Callable[[str, str], None]
    ) -> None:
        self.queue: queue.SimpleQueue[Row | tuple[State, Mapping[str, Any]]] = queue.SimpleQueue()
        self._name, self._tracker, self._run, self._run_id = name, tracker, run, run_id
        self._on_start: Callable[[str, str], None] | None = save_id  # None after the start.
        self._waiting: deque[Row] = deque(maxlen=_MAX_ROWS)
        self._failed, self._next_try = False, 0.0
        self._thread = threading.Thread(target=self._work, name=f"track-{name}", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> None:
        self._thread.join(max(0.0, seconds))
        if self._thread.is_alive():
            _LOG.warning("%s did not respond in time and has not received all metrics", self._name)

    def _work(self) -> None:
        while isinstance(item := self.queue.get(), Row):
            self._waiting.append(item)
            if self.queue.empty() and time.monotonic() >= self._next_try:
                self._attempt(self._send)
        if self._attempt(self._send):
            self._attempt(partial(self._tracker.finish, *item))

    def _send(self) -> None:
        if on_start := self._on_start:
            run_id = self._tracker.start(self._run, self._run_id)
            self._on_start = None
            on_start(self._name, run_id)
        if self._waiting:
            self._tracker.write(list(self._waiting))
            self._waiting.clear()

    def _attempt(self, action: Callable[[], None]) -> bool:
        """Call the tracker; log only the first of consecutive failures."""
        try:
            action()
        except Exception as error:  # Clients may raise any error.
            if not self._failed:
                reason = error.message if isinstance(error, KubedetError) else str(error)
                _LOG.warning(
                    "cannot send metrics to %s (%s): training continues, and sends them later",
                    self._name,
                    (reason.strip() or type(error).__name__).splitlines()[0][:300],
                )
            self._failed = True
            self._next_try = time.monotonic() + RETRY_SECONDS
            return False
        self._failed = False
        return True
