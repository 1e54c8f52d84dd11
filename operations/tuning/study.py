"""The study of a search: chooses the values of trials and stores their results.

On a disk or a volume it is Optuna's journal, shared by any number of processes. In a bucket a trial's values
follow from the study's seed and the trial's number, and its result is a JSON object.
"""

import fcntl
import secrets
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import optuna
from optuna import distributions
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.pruners import SuccessiveHalvingPruner
from optuna.samplers import RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, TrialState

from operations.tuning import ENDED
from operations.tuning.space import Choices, Space, to_json
from trainer import storage
from trainer.base import typed_json
from trainer.base.errors import ConfigError
from trainer.model import recipes
from trainer.storage import Form, records

RUNNING, COMPLETE, PRUNED, FAILED = "running", "complete", "pruned", "failed"
_NAMES = {
    TrialState.RUNNING: RUNNING, TrialState.COMPLETE: COMPLETE, TrialState.PRUNED: PRUNED,
    TrialState.FAIL: FAILED,
}  # fmt: skip
_VERSION = 2
_STARTUP = 5  # Maximum number of random trials before TPE.
_NUMBER = "number"
"""User attribute of Optuna's trials: our number. Optuna numbers trials in the order in which they start."""
_TRIAL = Form("trial", 1, remedy="delete it, and run the same command again: it trains that trial again")


@dataclass(frozen=True)
class Search:
    """What is searched."""

    recipe: str
    overrides: Mapping[str, Any]  # Of the recipe, the same in every trial.
    space: Space
    shards: str  # URI of the shards that all trials train on.

    @property
    def metric(self) -> str:
        """The metric that it maximizes."""
        return recipes.load(self.recipe, dict(self.overrides)).evaluation.metric


@dataclass
class Trial:
    """A trial."""

    number: int
    params: dict[str, Any]
    state: str = RUNNING
    value: float | None = None  # The metric, larger is better; of a pruned trial at its last validation.
    validations: list[float] = field(default_factory=list)
    lock: int | None = None  # File descriptor of its lock; None if there is none.

    def __str__(self) -> str:
        value = "" if self.value is None else f" {self.value:.4f}"
        params = [
            f"{key}={each:.3g}" if isinstance(each, float) else f"{key}={each}"
            for key, each in self.params.items()
        ]
        return f"trial {self.number}: {self.state}{value}  {', '.join(params)}"


class Study:
    """The study in a folder, which is created if it does not exist, of a number of `trials`."""

    def __init__(self, uri: str, search: Search, trials: int) -> None:
        self.uri, self.search = uri, search
        self.data_root, _, self.name = uri.rstrip("/").rpartition("/tuning/")
        about = {**vars(search), "space": to_json(search.space)}
        begun = {"kind": "search", "version": _VERSION, "seed": secrets.randbits(32), **about}
        place = storage.join(uri, "study.json")
        if not storage.create(place, records.encode(begun)):
            begun = storage.read_json(place)
            other = [name for name, value in about.items() if begun.get(name) != value]
            other += ["version of kubedet"] if begun.get("version") != _VERSION else []
            if other:
                raise ConfigError(
                    f"{uri} contains a search with another {', '.join(other)}",
                    fix="give this one another --name; best.yaml of the other one can still be used",
                )
        self._seed = int(begun["seed"])
        self._distributions: dict[str, distributions.BaseDistribution] = {}
        for key, one in search.space.items():
            kind: distributions.BaseDistribution
            if isinstance(one, Choices):
                kind = distributions.CategoricalDistribution(one.choices)
            elif isinstance(one.low, int) and isinstance(one.high, int):
                step = int(one.step or 1)
                kind = distributions.IntDistribution(one.low, one.high, log=one.log, step=step)
            else:
                low, high = float(one.low), float(one.high)
                kind = distributions.FloatDistribution(low, high, log=one.log, step=one.step)
            self._distributions[key] = kind
        self._mutex = threading.Lock()
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._journal: optuna.Study | None = None
        if storage.is_local(uri):
            path = storage.join(storage.absolute(uri), "optuna.log")
            startup = min(_STARTUP, max(1, trials // 3))
            self._journal = optuna.create_study(
                storage=JournalStorage(JournalFileBackend(path, lock_obj=JournalFileOpenLock(path))),
                study_name="search", load_if_exists=True, direction="maximize",
                sampler=TPESampler(constant_liar=True, n_startup_trials=startup),
                pruner=SuccessiveHalvingPruner(min_resource=1, reduction_factor=2),
            )  # fmt: skip
        if sum(trial.state != RUNNING for trial in self.trials()) < trials:
            storage.delete(storage.join(uri, ENDED))  # A search that goes on with more trials.

    def begin(self, number: int, stack: ExitStack) -> Trial | None:
        """Return a trial; None if another process trains it.

        It is locked until `stack` is closed, except in a bucket.
        """
        if self._journal is None:
            if storage.exists(self._place(number)):
                return self._read(number)
            study = optuna.create_study(sampler=RandomSampler(seed=(self._seed + number) % 2**32))
            return Trial(number, study.ask(self._distributions).params)
        path = Path(storage.absolute(self.uri), "locks", f"{number:05d}")
        path.parent.mkdir(exist_ok=True)
        lock = stack.enter_context(path.open("w")).fileno()
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        except OSError:  # A volume without locks: each trial has its own pod.
            pass
        with self._mutex:
            if number not in (known := _by_number(self._journal)):
                self._journal.ask(self._distributions).set_user_attr(_NUMBER, number)
                known = _by_number(self._journal)
            return replace(_as_trial(known[number]), lock=lock)

    def report(self, trial: Trial, value: float) -> bool:
        """Record the next validation of a trial; return whether it should be pruned."""
        trial.validations.append(value)
        if self._journal is None:
            return False
        with self._mutex:
            live = self._live(self._journal, trial)
            live.report(value, len(trial.validations))
            return live.should_prune()

    def end(self, trial: Trial) -> None:
        """Record how a trial ended."""
        if self._journal is None:
            result = {key: value for key, value in asdict(trial).items() if key != "lock"}
            storage.write_json(self._place(trial.number), {"kind": _TRIAL.kind, "version": 1, **result})
            return
        # Of a pruned trial Optuna takes the last validation.
        value = None if trial.state == PRUNED else trial.value
        with self._mutex:
            state = next(state for state, name in _NAMES.items() if name == trial.state)
            self._journal.tell(self._live(self._journal, trial), value, state)

    def trials(self) -> list[Trial]:
        """Return the known trials by number; in a bucket only those that have ended."""
        if self._journal is None:
            names = storage.list_files(storage.join(self.uri, "trials"))
            return [self._read(int(name.removesuffix(".json"))) for name in sorted(names)]
        with self._mutex:
            return [_as_trial(known) for _, known in sorted(_by_number(self._journal).items())]

    def best(self) -> Trial | None:
        """Return the best complete trial; None if there is none."""
        done = [trial for trial in self.trials() if trial.state == COMPLETE]
        return max(done, key=lambda trial: trial.value or 0.0, default=None)

    def importances(self) -> dict[str, float]:
        """Return the importance of each key, shares of 1 in descending order.

        {} in a bucket, with fewer than four complete trials, or if all are equal.
        """
        done = [trial.value for trial in self.trials() if trial.state == COMPLETE]
        if self._journal is None or len(done) < 4 or len(set(done)) < 2:
            return {}
        return dict(get_param_importances(self._journal, evaluator=PedAnovaImportanceEvaluator()))

    def _live(self, journal: optuna.Study, trial: Trial) -> optuna.Trial:
        return optuna.Trial(journal, _by_number(journal)[trial.number]._trial_id)

    def _read(self, number: int) -> Trial:
        uri = self._place(number)
        tree = storage.read_json(uri, _TRIAL)
        fields = {key: tree[key] for key in tree.keys() - {"kind", "version"}}
        return typed_json.load(Trial, fields, uri, _TRIAL.remedy)

    def _place(self, number: int) -> str:
        return storage.join(self.uri, "trials", f"{number:05d}.json")


def _by_number(journal: optuna.Study) -> dict[int, FrozenTrial]:
    trials = journal.get_trials(deepcopy=False)
    return {each.user_attrs[_NUMBER]: each for each in trials if _NUMBER in each.user_attrs}


def _as_trial(known: FrozenTrial) -> Trial:
    validations = [value for _, value in sorted(known.intermediate_values.items())]
    number, state = known.user_attrs[_NUMBER], _NAMES[known.state]
    return Trial(number, dict(known.params), state, known.value, validations)
