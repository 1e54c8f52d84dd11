"""The trials of a search: trainings on the same shards, some at a time on this machine.

A trial that falls behind the others at a validation is asked to stop as a pod is, by SIGTERM: the trainer
knows nothing of searches. A search that was stopped or killed goes on with the trials that it had begun, from
their own checkpoints.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from components import starting_weights
from components.launchers.guarded_process import GuardedProcess
from components.tuning.study import COMPLETE, FAILED, PRUNED, Search, Study, TrialRecord
from trainer import storage
from trainer.base.errors import EXIT_RETRY, Interrupted, TrainingError
from trainer.base.worker_pool import threads_of_process
from trainer.config import parsing
from trainer.data.shard_index import data_root_of
from trainer.launching.stop_signals import stop_request
from trainer.model import recipes
from trainer.trackers.training_log import read_rows

_POLL = 0.5
"""Seconds between looks at the trainings."""
_LOOK = 5.0
"""Seconds between looks at the metrics of a training that writes them to a server."""
_GRACE = 30.0
"""Seconds that a training which is stopped may take to save its state."""


class Training(Protocol):
    """The training of a trial, while it runs and afterwards."""

    def poll(self) -> int | None:
        """Return its exit code; None while it runs."""

    def validations(self) -> list[float]:
        """Return the metric at each validation so far."""

    def result(self) -> float | None:
        """Return the metric of its best weights; None where it has none."""

    def stop(self) -> None:
        """Ask it to save its state and end."""

    def wait(self) -> int:
        """Return its exit code when it has ended."""


Start = Callable[[TrialRecord, ExitStack], Training]
"""Begins the training of a trial, or goes on with it."""


@dataclass
class _Running:
    record: TrialRecord
    training: Training
    own: ExitStack
    behind: bool = False


def train(
    study: Study, numbers: Sequence[int], parallel: int, start: Start, shown: Callable[[str], None] = print
) -> None:
    """Train some trials until all of them have ended, whoever trains them; those that have count.

    Other processes may train trials of the same study: theirs are waited for, and taken up where they are
    lost.

    Args:
        study: of the search.
        numbers: numbers of the trials.
        parallel: how many train here at the same time.
        start: begins a trial's training.
        shown: called with a line for each trial that ends, and where others are waited for.

    Raises:
        Interrupted: stopped by a signal; trainings have saved their state, and the same call goes on.
        StorageError: the study cannot be reached.
    """
    with stop_request() as stop, ExitStack() as stack:
        running: list[_Running] = []
        waits = False
        while not stop.requested:
            while len(running) < parallel and (one := _begun(study, numbers, start, stack)):
                running.append(one)
            if not running and all(map(study.ended, numbers)):
                return
            if not running and not waits:
                waits = True
                shown(f"waiting for trials of another process; if it was killed, {study.lapse:.0f} s")
            time.sleep(_POLL)
            running = [one for one in running if not _ended(study, one, shown)]
        for one in running:
            one.training.stop()
        for one in running:
            one.training.wait()
        raise Interrupted(
            "the search was stopped; its trainings have saved their state",
            fix="run the same command again and it goes on",
        )


def _begun(study: Study, numbers: Sequence[int], start: Start, stack: ExitStack) -> _Running | None:
    """Take up a trial that is free, and start its training."""
    own = ExitStack()
    record = study.take(numbers, own)
    if record is None:
        return None
    stack.enter_context(own)
    return _Running(record, start(record, own), own)


def best(study: Study) -> TrialRecord:
    """Return the best trial.

    Raises:
        TrainingError: none came to a result.
    """
    study.read()
    if trial := study.best():
        return trial
    raise TrainingError(
        f"none of {len(study.records)} trials came to a result",
        fix="read the trials' logs, and try again under another --name",
    )


def _ended(study: Study, one: _Running, shown: Callable[[str], None]) -> bool:
    """Note new validations of a trial, and end it where it is behind; tells whether it is over."""
    code = one.training.poll()  # First: what a training that has ended wrote is then read whole.
    for value in one.training.validations()[len(one.record.validations) :]:
        if study.report(one.record, value) and code is None and not one.behind:
            one.behind = True
            one.training.stop()
    if code is None:
        return False
    result = one.training.result() if code == 0 else None
    if result is not None:
        study.tell(one.record, COMPLETE, result)
    elif one.behind:
        study.tell(one.record, PRUNED)
    elif code == EXIT_RETRY:
        raise Interrupted(
            f"trial {one.record.number} was stopped", fix="run the same command again and it goes on"
        )
    else:
        study.tell(one.record, FAILED)
    one.own.close()
    shown(describe(one.record))
    return True


def describe(record: TrialRecord) -> str:
    """Return a line about a trial."""
    value = "" if record.value is None else f" {record.value:.4f}"
    params = ", ".join(f"{key}={value_text(value)}" for key, value in record.params.items())
    return f"trial {record.number}: {record.state}{value}  {params}"


def value_text(value: object) -> str:
    """Return a value as short as it is read."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


class LocalTraining:
    """A training in processes of this machine, in a folder of its own."""

    def __init__(
        self, search: Search, record: TrialRecord, folder: str, stack: ExitStack, *, processes: int = 1,
        parallel: int = 1, log: Path | None = None,
    ) -> None:  # fmt: skip
        """Start it, or go on with it.

        Args:
            search: what is searched.
            record: of the trial.
            folder: URI that it has to itself; a checkpoint there is gone on from.
            stack: which ends it.
            processes: that train, one for each GPU.
            parallel: how many trainings share the machine.
            log: file to which it writes what it says; None is this process's stdout.
        """
        config = recipes.load(search.recipe, _values(search, record))
        self._metric, self._output = config.evaluation.metric, storage.join(folder, "train")
        self._rows: list[dict[str, Any]] = []
        self._next_look = 0.0
        path = storage.join(folder, "config.json")
        parsing.write(path, config)
        command = [
            sys.executable, "-m", "trainer", "launch", "--nproc", str(processes), "--",
            "train", "--config", path, "--shards", search.shards, "--output", self._output,
        ]  # fmt: skip
        env = {"OMP_NUM_THREADS": str(threads_of_process(processes * parallel)), **os.environ}
        with log.open("ab") if log else nullcontext() as said:
            self._process = stack.enter_context(
                GuardedProcess(
                    command, env=env, grace_seconds=_GRACE,
                    stdout=said.fileno() if said else None, stderr=subprocess.STDOUT,
                )
            )  # fmt: skip

    def poll(self) -> int | None:
        code = self._process.poll()
        if code is not None:
            self._next_look = 0.0  # What it wrote last is to be read.
        return code

    def validations(self) -> list[float]:
        if time.monotonic() >= self._next_look:
            self._rows = read_rows(self._output)
            self._next_look = time.monotonic() + (0 if storage.is_local(self._output) else _LOOK)
        return [row[self._metric] for row in self._rows if row["kind"] == "val" and self._metric in row]

    def result(self) -> float | None:
        report = storage.join(self._output, "result.json")
        value: float | None = storage.read_json(report)["metrics"].get(self._metric)
        return value

    def stop(self) -> None:
        self._process.stop()

    def wait(self) -> int:
        return self._process.wait()


def _values(search: Search, record: TrialRecord) -> dict[str, Any]:
    """Return what a trial's recipe is changed by: what follows from its weights as in any other run of it."""
    given = {**search.overrides, **record.params}
    return starting_weights.chosen(search.recipe, given, data_root_of(search.shards)) | given
