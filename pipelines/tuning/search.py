"""A search on this machine: its trials are trainings on the same shards, some at a time.

A trial that falls behind the others at a validation is asked to stop as a pod is, by SIGTERM: the trainer
knows nothing of searches. A search that was stopped or killed goes on with the trials that it had begun, from
their own checkpoints.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from optuna.trial import Trial

from components.launchers.guarded_process import GuardedProcess
from pipelines.tuning.study import COMPLETE, FAILED, PRUNED, Search, Study, TrialRecord
from trainer import configuration, recipes, storage
from trainer.errors import EXIT_RETRY, Interrupted, TrainingError
from trainer.stop_signals import stop_request
from trainer.training_log import read_rows

_POLL = 0.5
"""Seconds between looks at the trainings."""
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
    trial: Trial
    record: TrialRecord
    training: Training
    behind: bool = False


def run(study: Study, trials: int, parallel: int, start: Start, shown: Callable[[str], None] = print) -> None:
    """Train trials until there are as many as were asked for; those of earlier calls count.

    Args:
        study: of the search.
        trials: how many there are to be at the end.
        parallel: how many train at the same time.
        start: begins a trial's training.
        shown: called with a line for each trial that ends.

    Raises:
        Interrupted: stopped by a signal; trainings have saved their state, and the same call goes on.
        TrainingError: no trial came to a result.
    """
    with stop_request() as stop, ExitStack() as stack:
        running: list[_Running] = []
        while not stop.requested:
            while len(running) < parallel and (study.unfinished or len(study.records) < trials):
                trial, record = study.ask()
                running.append(_Running(trial, record, start(record, stack)))
            if not running:
                break
            time.sleep(_POLL)
            running = [one for one in running if not _ended(study, one, shown)]
        for one in running:
            one.training.stop()
        for one in running:
            one.training.wait()
        if stop.requested:
            raise Interrupted(
                "the search was stopped; its trainings have saved their state",
                fix="run the same command again and it goes on",
            )
    if study.best() is None:
        raise TrainingError(
            f"none of {len(study.records)} trials came to a result",
            fix="read the trials' log.txt, and try again under another --name",
        )


def _ended(study: Study, one: _Running, shown: Callable[[str], None]) -> bool:
    """Note new validations of a trial, and end it where it is behind; tells whether it is over."""
    code = one.training.poll()  # First: what a training that has ended wrote is then read whole.
    for value in one.training.validations()[len(one.record.validations) :]:
        if study.report(one.trial, one.record, value) and code is None and not one.behind:
            one.behind = True
            one.training.stop()
    if code is None:
        return False
    result = one.training.result() if code == 0 else None
    if result is not None:
        study.tell(one.trial, one.record, COMPLETE, result)
    elif one.behind:
        study.tell(one.trial, one.record, PRUNED)
    elif code == EXIT_RETRY:
        raise Interrupted(
            f"trial {one.record.number} was stopped", fix="run the same command again and it goes on"
        )
    else:
        study.tell(one.trial, one.record, FAILED)
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
        self, search: Search, record: TrialRecord, folder: Path, parallel: int, stack: ExitStack
    ) -> None:
        """Start it, or go on with it.

        Args:
            search: what is searched.
            record: of the trial.
            folder: that it has to itself; a checkpoint in it is gone on from.
            parallel: how many trainings share the machine.
            stack: which ends it.
        """
        config = recipes.load(search.recipe, {**search.overrides, **record.params})
        self._metric, self._output = config.evaluation.metric, str(folder / "train")
        path = folder / "config.json"
        configuration.write(str(path), config)
        command = [
            sys.executable, "-m", "trainer", "launch", "--nproc", "1", "--",
            "train", "--config", str(path), "--shards", search.shards, "--output", self._output,
        ]  # fmt: skip
        cores = max(1, len(os.sched_getaffinity(0)) // parallel)
        with (folder / "log.txt").open("ab") as log:
            self._process = stack.enter_context(
                GuardedProcess(
                    command, env={"OMP_NUM_THREADS": str(cores), **os.environ}, grace_seconds=_GRACE,
                    stdout=log.fileno(), stderr=subprocess.STDOUT,
                )
            )  # fmt: skip

    def poll(self) -> int | None:
        return self._process.poll()

    def validations(self) -> list[float]:
        rows = read_rows(self._output)
        return [row[self._metric] for row in rows if row["kind"] == "val" and self._metric in row]

    def result(self) -> float | None:
        value: float | None = storage.read_json(f"{self._output}/result.json")["metrics"].get(self._metric)
        return value

    def stop(self) -> None:
        self._process.stop()

    def wait(self) -> int:
        return self._process.wait()
