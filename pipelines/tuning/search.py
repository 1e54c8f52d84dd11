"""A search by Optuna on this machine: its trials are trainings on the same shards, some at a time.

The study is Optuna's journal, a file that is only added to: a search that was killed goes on with the trials that it
had begun, each in its own folder and from its own checkpoint, so that none counts twice.
"""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from components.launchers.guarded_process import GuardedProcess
from pipelines.tuning.spaces import Space
from trainer import configuration, recipes, storage
from trainer.errors import EXIT_RETRY, ConfigError, Interrupted, TrainingError
from trainer.stop_signals import StopRequest, stop_request
from trainer.training_log import read_rows

_LOG = logging.getLogger("tune")
_JOURNAL = "study.log"
_ABOUT = "about"
_POLL = 1.0
_STARTUP = 5
"""Trials that are drawn at random before the model of the search begins, at most."""
_GRACE = 30.0
"""Seconds that a training which is stopped may take to save its state."""


@dataclass(frozen=True)
class Request:
    """What is searched."""

    recipe: str
    overrides: Mapping[str, Any]
    space: Space
    shards: str
    folder: Path
    """Of the study, on this machine."""
    trials: int
    parallel: int = 1
    seed: int = 0


@dataclass
class _Running:
    """A trial whose training runs."""

    trial: Trial
    process: GuardedProcess
    output: str
    reported: set[int] = field(default_factory=set)
    pruned: bool = False


def open_study(request: Request) -> optuna.Study:
    """Open the study of a folder, or begin it.

    Raises:
        ConfigError: the folder has a study of something else.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    request.folder.mkdir(parents=True, exist_ok=True)
    journal = JournalStorage(JournalFileBackend(str(request.folder / _JOURNAL)))
    startup = min(_STARTUP, max(1, request.trials // 3))
    study = optuna.create_study(
        storage=journal, study_name="kubedet", direction="maximize", load_if_exists=True,
        sampler=optuna.samplers.TPESampler(
            seed=request.seed, multivariate=True, constant_liar=request.parallel > 1, n_startup_trials=startup
        ),
        pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2),
    )  # fmt: skip
    about = {
        "recipe": request.recipe, "overrides": dict(request.overrides), "space": request.space,
        "shards": storage.absolute(request.shards),
    }  # fmt: skip
    before = study.user_attrs.get(_ABOUT)
    if before is None:
        study.set_user_attr(_ABOUT, about)
    elif before != about:
        other = ", ".join(name for name, value in about.items() if before.get(name) != value)
        raise ConfigError(
            f"{request.folder} holds a search with another {other}", fix="give this one another --name"
        )
    return study


def search(request: Request, shown: Callable[[str], None] = print) -> optuna.Study:
    """Run trials until there are as many as were asked for; those of an earlier call count.

    Args:
        request: what is searched.
        shown: called with a line for each trial that ends.

    Raises:
        Interrupted: stopped by a signal; trainings have saved their state, and the same call goes on.
        TrainingError: all trials failed.
    """
    study = open_study(request)
    distributions = {key: _distribution(one) for key, one in request.space.items()}
    with stop_request() as stop, ExitStack() as stack:
        unfinished = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        # Optuna has no public way to take a trial up that another process began.
        waiting = [Trial(study, trial._trial_id) for trial in unfinished]
        running: list[_Running] = []
        while True:
            while len(running) < request.parallel and not stop.requested:
                if not waiting and len(study.get_trials(deepcopy=False)) >= request.trials:
                    break
                trial = waiting.pop() if waiting else study.ask(distributions)
                running.append(_start(request, trial, stack))
            if not running or stop.requested:
                break
            time.sleep(_POLL)
            running = [one for one in running if not _ended(study, one, request, shown)]
        if stop.requested:
            _stop(running, stop)
    if not any(trial.value is not None for trial in study.get_trials(deepcopy=False)):
        raise TrainingError(
            f"none of {len(study.trials)} trials came to a result",
            fix=f"read {request.folder}/trials/0/log.txt, and try again under another --name",
        )
    return study


def _distribution(one: Mapping[str, Any]) -> BaseDistribution:
    if "choices" in one:
        return CategoricalDistribution(one["choices"])
    low, high, log = one["low"], one["high"], bool(one.get("log", False))
    if isinstance(low, int) and isinstance(high, int):
        return IntDistribution(low, high, log=log, step=one.get("step", 1))
    return FloatDistribution(float(low), float(high), log=log, step=one.get("step"))


def _start(request: Request, trial: Trial, stack: ExitStack) -> _Running:
    """Start the training of a trial, or go on with it."""
    folder = request.folder / "trials" / str(trial.number)
    folder.mkdir(parents=True, exist_ok=True)
    config = recipes.load(request.recipe, {**request.overrides, **trial.params})
    path = folder / "config.json"
    storage.write_bytes(str(path), configuration.to_json(config).encode())
    output = str(folder / "train")
    command = [
        sys.executable, "-m", "trainer", "launch", "--nproc", "1", "--",
        "train", "--config", str(path), "--shards", request.shards, "--output", output,
    ]  # fmt: skip
    cores = max(1, (os.cpu_count() or 1) // request.parallel)
    environment = {"OMP_NUM_THREADS": str(cores), **os.environ}
    with (folder / "log.txt").open("ab") as log:
        process = stack.enter_context(
            GuardedProcess(
                command, env=environment, grace_seconds=_GRACE, stdout=log.fileno(), stderr=subprocess.STDOUT
            )
        )
    reported = set(trial.storage.get_trial(trial._trial_id).intermediate_values)
    return _Running(trial, process, output, reported)


def _ended(
    study: optuna.Study, one: _Running, request: Request, shown: Callable[[str], None]
) -> bool:
    """Report new validations of a trial, end it where it is behind; tells whether it is over."""
    metric = recipes.load(request.recipe, dict(request.overrides)).evaluation.metric
    code = one.process.poll()
    for row in read_rows(one.output):
        step = int(row["step"])
        if row["kind"] == "val" and step not in one.reported:
            one.trial.report(row[metric], step)
            one.reported.add(step)
    if code is None and one.reported and not one.pruned and one.trial.should_prune():
        one.pruned = True
        one.process.stop()
    if code is None:
        return False
    result = Path(one.output) / "result.json"
    if code == 0 and result.exists():
        value = storage.read_json(str(result))["metrics"].get(metric)
        state = TrialState.COMPLETE if value is not None else TrialState.FAIL
        study.tell(one.trial, value, state=state)
    elif one.pruned:
        study.tell(one.trial, state=TrialState.PRUNED)
    elif code == EXIT_RETRY:
        raise Interrupted(f"trial {one.trial.number} was stopped", fix="run the same command again")
    else:
        study.tell(one.trial, state=TrialState.FAIL)
    shown(describe(study.trials[one.trial.number]))
    return True


def _stop(running: list[_Running], stop: StopRequest) -> None:
    del stop
    for one in running:
        one.process.stop()
    for one in running:
        one.process.wait()
    raise Interrupted("the search was stopped; trainings have saved their state",
                      fix="run the same command again and it goes on")  # fmt: skip


def describe(trial: FrozenTrial) -> str:
    """Return a line about a trial."""
    what = {"COMPLETE": "", "PRUNED": "ended early, ", "FAIL": "failed"}.get(trial.state.name, trial.state.name)
    value = "" if trial.value is None else f"{trial.value:.4f}"
    params = ", ".join(f"{key}={value_text(value)}" for key, value in trial.params.items())
    return f"trial {trial.number}: {what}{value}  {params}"


def value_text(value: Any) -> str:
    """Return a value as short as it is read."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def importances(study: optuna.Study) -> dict[str, float]:
    """Return how much each key matters among the best trials, the largest first; {} before there are enough."""
    done = [trial for trial in study.trials if trial.state == TrialState.COMPLETE]
    if len(done) < 4 or len({trial.value for trial in done}) < 2:
        return {}
    return dict(get_param_importances(study, evaluator=PedAnovaImportanceEvaluator()))
