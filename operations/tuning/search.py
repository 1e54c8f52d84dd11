"""A hyper-parameter search: its Optuna study, the parallel training of its trials, and its results.

On a disk or a volume, processes share the study through Optuna's journal. In a bucket, the values of a trial
follow from the seed of the study and the number of the trial, and its result is stored as a JSON object.
"""

import math
import os
import secrets
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryFile
from threading import Lock
from typing import IO, Any, Literal

import optuna
from optuna import distributions, pruners, samplers
from optuna.storages import JournalStorage, journal
from optuna.trial import FrozenTrial, TrialState, create_trial
from pydantic import dataclasses as models

from components.launchers.guarded_process import GuardedProcess
from operations.tuning.choice import BestTrial
from operations.tuning.space import ENDED_FILE, Choices, Range, parse_space, to_dict
from trainer import storage
from trainer.base import json_files
from trainer.base.errors import EXIT_RETRY, ConfigError, FormatError, Interrupted, TrainingError, check_name
from trainer.base.worker_pool import threads_per_process
from trainer.config import parsing
from trainer.config.schema import MINUTES
from trainer.launching.stop_signals import StopRequest, stop_request
from trainer.model import recipes
from trainer.steps import starting_weights
from trainer.steps.manifests import Shards
from trainer.trackers.training_log import read_rows

TABLE_FILE, BEST_FILE = "trials.md", "best.yaml"
_NUMBER = "number"
"""User attribute of Optuna's trials: kubedet's number. Optuna numbers trials in the order of their start."""
_TRIAL_FIX = "delete this file, and run the same command again: it repeats the trial"
_POLL_SECONDS = 0.5


@models.dataclass(config=json_files.STRICT, frozen=True)
class _TrialRecord:
    """The result of a trial, as stored by a search in a bucket."""

    number: int
    params: dict[str, Any]
    state: str  # Name of the TrialState, in lower case.
    value: float | None
    validations: list[float]
    kind: Literal["trial"] = "trial"
    version: Literal[1] = 1


class Study:
    """The search `name` in a data root, which is created if it does not exist, with a number of `trials`.

    Each trial trains `recipe` with `overrides` on the shards at the URI `shards`. A search on this machine
    stores its training runs, and copies of its results, in the folder `output`.
    """

    def __init__(
        self,
        data_root: str,
        name: str,
        recipe: str,
        overrides: dict[str, Any],
        space: str | bytes,
        shards: str,
        trials: int,
        output: str = "",
    ) -> None:
        self.name, self.recipe, self.shards = name or f"tune-{recipe}", recipe, shards
        self.data_root = data_root
        check_name(self.name, "search")
        self.uri, self.output = storage.join(data_root, "tuning", self.name), output
        self.runs_folder = storage.join(output, "trials") if output else storage.join(self.uri, "runs")
        config = recipes.load(recipe, overrides)
        self.metric = config.evaluation.metric
        # Kubeflow turns 4 into 4.0, and users read the file.
        self.overrides = {
            key: attrgetter(key)(config) if isinstance(value, float) else value
            for key, value in overrides.items()
        }
        self.space = parse_space(space, recipe, overrides, "the space")
        about: dict[str, Any] = {
            "kind": "search",
            "version": 2,
            "recipe": recipe,
            "overrides": self.overrides,
            "space": to_dict(self.space),
            "shards": shards,
        }
        begun = {**about, "seed": secrets.randbits(32)}
        place = storage.join(self.uri, "study.json")
        if not storage.create(place, json_files.encode(begun)):
            begun = storage.read_json(place)
            if other := [key for key, value in about.items() if begun.get(key) != value]:
                raise ConfigError(
                    f"{self.uri} contains a search with different {', '.join(other)}",
                    fix="choose another --name; the existing search keeps its best.yaml",
                )
        self._seed = begun["seed"]
        self._distributions = {key: _to_distribution(one) for key, one in self.space.items()}
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.journal: optuna.Study | None = None
        if storage.is_local(self.uri):
            path = storage.join(storage.absolute(self.uri), "optuna.log")
            startup = min(5, max(1, trials // 3))  # Random trials before TPE.
            self.journal = optuna.create_study(
                storage=JournalStorage(journal.JournalFileBackend(path, journal.JournalFileOpenLock(path))),
                study_name="search",
                load_if_exists=True,
                direction="maximize",
                sampler=samplers.TPESampler(constant_liar=True, n_startup_trials=startup),
                pruner=pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2),
            )

    def trials(self) -> list[FrozenTrial]:
        """Return the trials, sorted by kubedet's number; in a bucket, only those that have ended."""
        trials = []
        if self.journal:
            # A trial without a number was begun by a process that was killed immediately.
            trials = [trial for trial in self.journal.trials if _NUMBER in trial.user_attrs]
        folder = storage.join(self.uri, "trials")
        for name in () if self.journal else storage.list_files(folder):
            uri = storage.join(folder, name)
            record = storage.read_model(uri, _TrialRecord, _TRIAL_FIX)
            try:
                trial = create_trial(
                    state=TrialState[record.state.upper()],
                    value=record.value,
                    params=record.params,
                    distributions=self._distributions,
                    intermediate_values=dict(enumerate(record.validations, 1)),
                    user_attrs={_NUMBER: record.number},
                )
            except (KeyError, TypeError, ValueError) as error:
                raise FormatError(f"{uri} is not a trial of this search: {error}", fix=_TRIAL_FIX) from None
            trials.append(trial)
        for trial in trials:
            trial.number = trial.user_attrs[_NUMBER]
        return sorted(trials, key=attrgetter("number"))

    def begin_trial(self, number: int) -> optuna.Trial | None:
        """Begin a trial, or return an unfinished one; None if it has ended."""
        known = next((trial for trial in self.trials() if trial.number == number), None)
        if known and known.state.is_finished():
            return None
        if known and self.journal:
            return optuna.Trial(self.journal, known._trial_id)
        storage.delete(storage.join(self.uri, ENDED_FILE))  # More trials extend a search that has ended.
        seeded = samplers.RandomSampler(seed=(self._seed + number) % 2**32)
        study = self.journal or optuna.create_study(
            direction="maximize", sampler=seeded, pruner=pruners.NopPruner()
        )
        trial = study.ask(self._distributions)
        trial.set_user_attr(_NUMBER, number)
        return trial

    def end_trial(self, trial: optuna.Trial, state: TrialState, value: float | None = None) -> FrozenTrial:
        """Record how a trial ended; Optuna uses the last validation of a pruned trial as its value."""
        trial.study.tell(trial, value, state)
        ended = trial.study.trials[trial.number]
        ended.number = ended.user_attrs[_NUMBER]
        if self.journal is None:
            validations = list(ended.intermediate_values.values())
            record = _TrialRecord(ended.number, ended.params, state.name.lower(), value, validations)
            storage.write_json(storage.join(self.uri, "trials", f"{ended.number:05d}.json"), asdict(record))
        return ended


def _to_distribution(one: Range | Choices) -> distributions.BaseDistribution:
    if isinstance(one, Choices):
        return distributions.CategoricalDistribution(one.choices)
    if isinstance(one.low, int) and isinstance(one.high, int):
        return distributions.IntDistribution(one.low, one.high, one.log, int(one.step or 1))
    return distributions.FloatDistribution(one.low, one.high, one.log, one.step)


def describe_trial(trial: FrozenTrial) -> str:
    """Describe a trial in one line."""
    params = ", ".join(f"{key}={_abbreviate(value)}" for key, value in trial.params.items())
    return f"trial {trial.number}: {trial.state.name.lower()} {_abbreviate(trial.value)}  {params}"


def _abbreviate(value: object) -> str:
    return format(value, ".4g") if isinstance(value, float) else "" if value is None else str(value)


def train_trials(study: Study, numbers: Sequence[int], parallel: int = 1, processes: int = 1) -> None:
    """Train trials, `parallel` at a time, each with `processes`; wait for trials of other processes."""
    import fcntl  # Only available on Unix.

    locks = Path(storage.absolute(study.uri), "locks")
    if study.journal:
        locks.mkdir(exist_ok=True)
    printing = Lock()
    with stop_request() as stop, ThreadPoolExecutor(parallel) as threads:

        def train_one(number: int) -> bool:
            """Train a trial unless it has ended; return False if another process trains it."""
            with (locks / f"{number:05d}").open("w") if study.journal else TemporaryFile("w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
                except OSError:  # The volume has no locks, but each trial has its own pod.
                    pass
                try:
                    trial = None if stop.requested else study.begin_trial(number)
                    if trial and (ended := _run_trial(study, trial, stop, lock, parallel, processes)):
                        with printing:
                            print(describe_trial(ended), flush=True)
                            write_results(study)
                except BaseException:
                    stop.requested = True  # The other training runs save their state and end.
                    raise
            return True

        while not all([*threads.map(train_one, numbers)]) and not stop.requested:
            time.sleep(_POLL_SECONDS)
    if stop.requested:
        raise Interrupted("the search was stopped", fix="run the same command to continue")


def _run_trial(
    study: Study, trial: optuna.Trial, stop: StopRequest, lock: IO[str], parallel: int, processes: int
) -> FrozenTrial | None:
    """Train a trial, stop it if it falls behind, and record its end; return None if it was interrupted."""
    given = {**study.overrides, **trial.params}
    values = starting_weights.overrides_from_weights(study.recipe, given, study.data_root) | given
    folder = storage.join(study.runs_folder, f"{trial.user_attrs[_NUMBER]:05d}")
    output, config = storage.join(folder, "train"), storage.join(folder, "config.json")
    # Trials share the machine, so with a time limit their speed would affect the result.
    parsing.write(config, recipes.load(study.recipe, {MINUTES: 0.0} | values))
    command = [
        sys.executable,
        "-m",
        "trainer",
        "launch",
        "--nproc",
        str(processes),
        "--",
        "train",
        "--config",
        config,
        "--shards",
        study.shards,
        "--output",
        output,
    ]
    is_behind = False
    reported = len(trial.study.trials[trial.number].intermediate_values)
    code = None
    with (
        Path(folder, "log.txt").open("ab") if study.output else nullcontext() as log,
        GuardedProcess(
            command,
            env={"OMP_NUM_THREADS": str(threads_per_process(processes * parallel)), **os.environ},
            keep_open=(lock.fileno(),),  # Locked until all training processes have ended.
            stdout=log.fileno() if log else None,
        ) as process,
    ):
        while code is None and not is_behind and not stop.requested:  # Leaving the block stops the process.
            time.sleep(_POLL_SECONDS)
            code = process.poll()  # Poll first, so that the files of an ended process are complete.
            rows = read_rows(output) if code is not None or study.journal else []
            scores = [row[study.metric] for row in rows if row["kind"] == "val" and study.metric in row]
            for score in scores[reported:]:
                reported += 1
                trial.report(score, reported)
                is_behind |= trial.should_prune()
    if code == 0:
        value = storage.read_json(storage.join(output, "result.json"))["metrics"].get(study.metric)
        if value is None or math.isnan(value):
            return study.end_trial(trial, TrialState.FAIL)
        return study.end_trial(trial, TrialState.COMPLETE, value)
    if code is None and is_behind:
        return study.end_trial(trial, TrialState.PRUNED)
    if code == EXIT_RETRY or stop.requested:
        stop.requested = True
        return None
    return study.end_trial(trial, TrialState.FAIL)


def write_results(study: Study) -> FrozenTrial | None:
    """Write the table of trials and, if one succeeded, the best configuration; return the best trial."""
    trials = study.trials()
    trials.sort(key=lambda trial: (trial.state != TrialState.COMPLETE, -(trial.value or 0.0)))
    best = trials[0] if trials and trials[0].state == TrialState.COMPLETE else None
    rows: list[list[object]] = [["trial", "state", study.metric, *study.space]]
    rows += [
        [trial.number, trial.state.name.lower(), trial.value, *map(trial.params.get, study.space)]
        for trial in trials
    ]
    lines = [f"| {' | '.join(map(_abbreviate, row))} |" for row in rows]
    lines.insert(1, "| --- " * len(rows[0]) + "|")
    files = {TABLE_FILE: "\n".join([f"# Search {study.name}", "", *lines, ""])}
    if best:
        files[BEST_FILE] = recipes.format_recipe_file(study.recipe, {**study.overrides, **best.params})
    for folder in filter(None, (study.uri, study.output)):
        for name, text in files.items():
            storage.write_bytes(storage.join(folder, name), text.encode())
    return best


def finish(study: Study) -> FrozenTrial:
    """Publish a search whose trials have all ended, and return the best of them."""
    best = write_results(study)
    storage.write_json(storage.join(study.uri, ENDED_FILE), {"kind": "search ended", "version": 1})
    if best is None:
        raise TrainingError("no trial succeeded", fix="read the logs of the trials, then use another --name")
    folder = study.output or study.uri
    print(f"best: {describe_trial(best)}\ntrials: {storage.join(folder, TABLE_FILE)}")
    print(f"kubedet run --recipe {storage.join(folder, BEST_FILE)}")
    return best


def open_study(shards: Shards, name: str, space: str, trials: int) -> Study:
    """Open the search `name` on these shards, with their recipe and overrides."""
    recipe, overrides = shards.recipe, shards.overrides
    return Study(shards.data_root, name, recipe, overrides, space, shards.uri, trials)


def train_trial(study: Study, number: int, gpus: int) -> str:
    """Train a trial of a search in a pod with `gpus` GPUs; describe the result in one line."""
    train_trials(study, [number], processes=max(gpus, 1))
    return next(describe_trial(trial) for trial in study.trials() if trial.number == number)


def choose_best(study: Study) -> BestTrial:
    """Write the table of trials and the best configuration of a search whose trials have ended."""
    best = finish(study)
    table, configuration = (storage.join(study.uri, file) for file in (TABLE_FILE, BEST_FILE))
    return BestTrial(best.number, describe_trial(best), study.metric, best.value or 0.0, table, configuration)
