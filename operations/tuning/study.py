"""The study of a search: draws the values of trials, compares them, and keeps their results.

On a disk or a volume it is a study in Optuna's journal, which any number of processes share. A bucket has no
such file: there the values of a trial follow from the study's seed and the trial's number, and a trial that
has ended is a JSON object. A trial keeps its number and values however often its training is begun.
"""

import fcntl
import secrets
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
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
from optuna.pruners import MedianPruner, SuccessiveHalvingPruner
from optuna.samplers import RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, TrialState, create_trial

from operations.tuning import ENDED
from operations.tuning.space import Choices, Range, Space, to_json
from trainer import storage
from trainer.base.errors import ConfigError
from trainer.storage import Form, records

RUNNING, COMPLETE, PRUNED, FAILED = "running", "complete", "pruned", "failed"
_STATES = {
    RUNNING: TrialState.RUNNING, COMPLETE: TrialState.COMPLETE, PRUNED: TrialState.PRUNED,
    FAILED: TrialState.FAIL,
}  # fmt: skip
_NAMES = {state: name for name, state in _STATES.items()}
_VERSION = 2
_KEPT = ("number", "params", "state", "value", "validations")
"""Fields of a trial that are written."""
_STARTUP = 5
"""Trials that are drawn at random before Optuna's model begins, at most."""
_NUMBER = "number"
"""Attribute of Optuna's trials: the number here. Optuna's own follows the order of the beginnings."""
_TRIAL = Form(
    "trial", 1, {"number": int, "params": {}, "state": str, "validations": [float]},
    "delete it, and run the same command again: it trains that trial again",
)  # fmt: skip


@dataclass(frozen=True)
class Search:
    """What is searched."""

    recipe: str
    overrides: Mapping[str, Any]
    """Of the recipe, the same in every trial."""
    space: Space
    shards: str
    """URI of the shards that all trials train on."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {**vars(self), "space": to_json(self.space)}


@dataclass
class Trial:
    """A trial."""

    number: int
    params: dict[str, Any]
    state: str = RUNNING
    value: float | None = None
    """Of the metric, the more the better; of a pruned trial at its last validation."""
    validations: list[float] = field(default_factory=list)
    lock: int | None = None
    """File descriptor that keeps other processes from training it; None if nothing locks it."""

    def __str__(self) -> str:
        value = "" if self.value is None else f" {self.value:.4f}"
        params = [
            f"{key}={each:.3g}" if isinstance(each, float) else f"{key}={each}"
            for key, each in self.params.items()
        ]
        return f"trial {self.number}: {self.state}{value}  {', '.join(params)}"


class Study:
    """The study in a folder: that which is there, or a new one.

    `trials` is how many there are to be: a third of them, five at most, are drawn at random first.

    Raises:
        ConfigError: there is a study of something else, or of an older version.
        StorageError: it cannot be read or written.
    """

    def __init__(self, uri: str, search: Search, trials: int) -> None:
        self.uri, self.search = uri, search
        self._seed = _open(storage.join(uri, "study.json"), search)
        self._distributions = {key: _distribution(one) for key, one in search.space.items()}
        self._lock = threading.Lock()
        self._shared = storage.is_local(uri)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._study = optuna.create_study(direction="maximize", pruner=MedianPruner())
        if self._shared:
            path = storage.join(storage.absolute(uri), "optuna.log")
            startup = min(_STARTUP, max(1, trials // 3))
            self._study = optuna.create_study(
                storage=JournalStorage(JournalFileBackend(path, lock_obj=JournalFileOpenLock(path))),
                study_name="search", load_if_exists=True, direction="maximize",
                sampler=TPESampler(constant_liar=True, n_startup_trials=startup),
                pruner=SuccessiveHalvingPruner(min_resource=1, reduction_factor=2),
            )  # fmt: skip
        if sum(trial.state != RUNNING for trial in self.trials()) < trials:
            storage.delete(storage.join(uri, ENDED))  # A search that goes on with more trials.

    def begin(self, number: int, stack: ExitStack) -> Trial | None:
        """Return a trial, whether or not it has ended; None if another process trains it.

        No other process gets it until `stack` is closed.
        """
        lock = None
        if self._shared:
            path = Path(storage.absolute(self.uri), "locks", f"{number:05d}")
            path.parent.mkdir(exist_ok=True)
            lock = stack.enter_context(path.open("w")).fileno()
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            except OSError:  # A volume that has no locks: there each trial has one pod.
                pass
        with self._lock:
            if number not in self._known():
                if not self._shared:  # Values must not depend on which others were drawn before.
                    self._study.sampler = RandomSampler(seed=(self._seed + number) % 2**32)
                self._study.ask(self._distributions).set_user_attr(_NUMBER, number)
            return replace(_as_trial(self._known()[number]), lock=lock)

    def report(self, trial: Trial, value: float) -> bool:
        """Note the next validation of a trial; return whether it is behind the others and should end."""
        trial.validations.append(value)
        with self._lock:
            live = self._live(trial)
            live.report(value, len(trial.validations))
            return live.should_prune()

    def end(self, trial: Trial) -> None:
        """Keep how a trial ended."""
        # Of a pruned trial Optuna takes the last validation.
        value = None if trial.state == PRUNED else trial.value
        with self._lock:
            self._study.tell(self._live(trial), value, _STATES[trial.state])
        if not self._shared:
            record = {"kind": _TRIAL.kind, "version": 1} | {name: vars(trial)[name] for name in _KEPT}
            storage.write_json(self._place(trial.number), record)

    def trials(self) -> list[Trial]:
        """Return the known trials, by number."""
        with self._lock:
            return [_as_trial(known) for _, known in sorted(self._known().items())]

    def best(self) -> Trial | None:
        """Return the best trial that was trained to its end; None if there is none."""
        done = [trial for trial in self.trials() if trial.state == COMPLETE]
        return max(done, key=lambda trial: trial.value or 0.0, default=None)

    def importances(self) -> dict[str, float]:
        """Return how much each key matters for being among the best, the largest first.

        Returns:
            Shares that sum to 1; {} if there are fewer than four results, or all are the same.
        """
        done = [trial for trial in self.trials() if trial.state == COMPLETE]
        if len(done) < 4 or len({trial.value for trial in done}) < 2:
            return {}
        return dict(get_param_importances(self._study, evaluator=PedAnovaImportanceEvaluator()))

    def _known(self) -> dict[int, FrozenTrial]:
        """Return the trials of Optuna's study; of one in a bucket with those that other processes ended."""
        known = self._optunas()
        names = [] if self._shared else storage.list_files(storage.join(self.uri, "trials"))
        missing = {int(name.removesuffix(".json")) for name in names} - known.keys()
        for number in missing:
            tree = storage.read_json(self._place(number), _TRIAL)
            self._study.add_trial(
                create_trial(
                    state=_STATES[tree["state"]], value=tree["value"], params=tree["params"],
                    distributions=self._distributions, user_attrs={_NUMBER: number},
                    intermediate_values=dict(enumerate(tree["validations"], 1)),
                )
            )  # fmt: skip
        return self._optunas() if missing else known

    def _optunas(self) -> dict[int, FrozenTrial]:
        every = self._study.get_trials(deepcopy=False)
        return {each.user_attrs[_NUMBER]: each for each in every if _NUMBER in each.user_attrs}

    def _live(self, trial: Trial) -> optuna.Trial:
        return optuna.Trial(self._study, self._known()[trial.number]._trial_id)

    def _place(self, number: int) -> str:
        return storage.join(self.uri, "trials", f"{number:05d}.json")


def _as_trial(known: FrozenTrial) -> Trial:
    validations = [value for _, value in sorted(known.intermediate_values.items())]
    number, state = known.user_attrs[_NUMBER], _NAMES[known.state]
    return Trial(number, dict(known.params), state, known.value, validations)


def _open(place: str, search: Search) -> int:
    """Write what is searched, or compare it with what was written; return the study's seed."""
    about = search.to_json()
    begun = {"kind": "search", "version": _VERSION, "seed": secrets.randbits(32), **about}
    if not storage.create(place, records.encode(begun)):
        begun = storage.read_json(place)
        if begun.get("version") != _VERSION:
            raise ConfigError(
                f"{storage.parent(place)} holds a search of an older kubedet, which cannot be continued",
                fix="give this one another --name; best.yaml of the older one can still be used",
            )
        if other := [name for name, value in about.items() if begun.get(name) != value]:
            raise ConfigError(
                f"{storage.parent(place)} holds a search with another {', '.join(other)}",
                fix="give this one another --name",
            )
    return int(begun["seed"])


def _distribution(one: Range | Choices) -> BaseDistribution:
    if isinstance(one, Choices):
        return CategoricalDistribution(one.choices)
    if isinstance(one.low, int) and isinstance(one.high, int):
        return IntDistribution(one.low, one.high, log=one.log, step=int(one.step or 1))
    return FloatDistribution(float(one.low), float(one.high), log=one.log, step=one.step)
