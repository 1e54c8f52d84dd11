"""The study of a search: a small object for each trial, of which every process makes the same Optuna study.

`<data_root>/tuning/NAME/study.json` says what is searched, `trials/00000.json` and on what became of each
trial. There is no database, and a folder and an object store serve alike. A trial has its number and its
values from the moment it is written; whoever goes on with it trains with these, so that it counts once,
however often it is begun.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from pipelines.tuning.spaces import Space
from trainer import recipes, storage
from trainer.errors import ConfigError, DamagedError
from trainer.storage import records

_STARTUP = 5
"""Trials that are drawn at random before the model of the search begins, at most."""
_RUNG = "completed_rung_"
"""How Optuna's pruner calls what it notes of a trial: others are compared with it."""
RUNNING, COMPLETE, PRUNED, FAILED = "running", "complete", "pruned", "failed"
_STATES = {
    COMPLETE: TrialState.COMPLETE, PRUNED: TrialState.PRUNED, FAILED: TrialState.FAIL
}  # fmt: skip


@dataclass(frozen=True)
class Search:
    """What is searched."""

    recipe: str
    overrides: Mapping[str, Any]
    """Of the recipe, the same in every trial."""
    space: Space
    shards: str
    """URI of the shards that all trials train on."""


@dataclass
class TrialRecord:
    """A trial as it is written."""

    number: int
    params: dict[str, Any]
    attempts: int = 1
    """How often its training was begun."""
    state: str = RUNNING
    value: float | None = None
    validations: list[float] = field(default_factory=list)
    rungs: dict[str, float] = field(default_factory=dict)


class Study:
    """The study of a data root, and Optuna's of it in this process's memory."""

    def __init__(self, uri: str, search: Search, trials: int) -> None:
        """Open the study, or begin it.

        Args:
            uri: its folder.
            search: what is searched.
            trials: how many there are to be: a third of them, five at most, are drawn at random first.

        Raises:
            ConfigError: there is a study of something else.
            StorageError: it cannot be read or written.
        """
        self.uri, self.search = uri, search
        self.distributions = {key: _distribution(one) for key, one in search.space.items()}
        _open(storage.join(uri, "study.json"), search)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.records = _read(uri)
        startup = min(_STARTUP, max(1, trials // 3))
        self.optuna = optuna.create_study(
            direction="maximize",
            # Another seed for each beginning: the same one would draw the first trials once more.
            sampler=optuna.samplers.TPESampler(
                seed=len(self.records), constant_liar=True, n_startup_trials=startup
            ),
            pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2),
        )  # fmt: skip
        self.unfinished = [record for record in self.records if record.state == RUNNING]
        for record in self.records:
            if record.state == RUNNING:
                self.optuna.enqueue_trial(record.params)
            else:
                self.optuna.add_trial(self._known(record))

    def _known(self, record: TrialRecord) -> FrozenTrial:
        validations = dict(enumerate(record.validations, start=1))
        return create_trial(
            state=_STATES[record.state], value=record.value, params=record.params,
            distributions=self.distributions, intermediate_values=validations,
            system_attrs=dict(record.rungs),
        )  # fmt: skip

    def ask(self) -> tuple[Trial, TrialRecord]:
        """Take up an unfinished trial, or draw a new one; it is written before it is returned.

        Raises:
            ConfigError: another process has begun a trial of that number.
            StorageError: it cannot be written.
        """
        trial = self.optuna.ask(self.distributions)
        if self.unfinished:
            record = self.unfinished.pop(0)
            record.attempts += 1
            record.validations, record.rungs = [], {}
            self.write(record)
            return trial, record
        record = TrialRecord(trial.number, trial.params)
        self.records.append(record)
        if not storage.create(self._place(record), records.encode(asdict(record))):
            raise ConfigError(
                f"another process has begun trial {record.number} in {self.uri}",
                fix="wait until it has ended, or give this search another --name",
            )
        return trial, record

    def report(self, trial: Trial, record: TrialRecord, value: float) -> bool:
        """Note the next validation of a trial; tells whether it is behind the others, and should end.

        Args:
            trial: Optuna's.
            record: of the trial.
            value: of the metric, the more the better.
        """
        record.validations.append(value)
        trial.report(value, len(record.validations))
        behind = trial.should_prune()
        noted = self.optuna.get_trials(deepcopy=False)[record.number].system_attrs
        record.rungs = {key: number for key, number in noted.items() if key.startswith(_RUNG)}
        self.write(record)
        return behind

    def tell(self, trial: Trial, record: TrialRecord, state: str, value: float | None = None) -> None:
        """Note how a trial ended; `value` is that of a complete one."""
        if state == PRUNED:
            value = record.validations[-1]
        of_complete = value if state == COMPLETE else None
        self.optuna.tell(trial, of_complete, state=_STATES[state])
        record.state, record.value = state, value
        self.write(record)

    def write(self, record: TrialRecord) -> None:
        """Write what is known of a trial."""
        storage.write_json(self._place(record), asdict(record))

    def _place(self, record: TrialRecord) -> str:
        return storage.join(self.uri, "trials", f"{record.number:05d}.json")

    def best(self) -> TrialRecord | None:
        """Return the best of the trials that were trained to their end; None if there is none."""
        done = [record for record in self.records if record.state == COMPLETE and record.value is not None]
        return max(done, key=lambda record: record.value or 0.0, default=None)

    def importances(self) -> dict[str, float]:
        """Return how much each key matters for being among the best, the largest first.

        Returns:
            Shares that sum to 1; {} while too few trials tell.
        """
        done = [record for record in self.records if record.state == COMPLETE]
        if len(done) < 4 or len({record.value for record in done}) < 2:
            return {}
        return dict(get_param_importances(self.optuna, evaluator=PedAnovaImportanceEvaluator()))


def _open(place: str, search: Search) -> None:
    about = asdict(search)
    if storage.create(place, records.encode(about)):
        return
    before = storage.read_json(place)
    other = [name for name, value in about.items() if before.get(name) != value]
    if other:
        raise ConfigError(
            f"{storage.parent(place)} holds a search with another {', '.join(other)}",
            fix="give this one another --name",
        )


def _read(uri: str) -> list[TrialRecord]:
    folder = storage.join(uri, "trials")
    trials = []
    for name in sorted(storage.list_files(folder)):
        tree = storage.read_json(storage.join(folder, name))
        known = {key: value for key, value in tree.items() if key in TrialRecord.__dataclass_fields__}
        trials.append(TrialRecord(**known))
    if [record.number for record in trials] != list(range(len(trials))):
        raise DamagedError(
            f"{folder} does not hold every trial from the first to the last",
            fix="give this search another --name",
        )
    return trials


def _distribution(one: Mapping[str, Any]) -> BaseDistribution:
    if "choices" in one:
        return CategoricalDistribution(one["choices"])
    low, high, log = one["low"], one["high"], bool(one.get("log", False))
    if isinstance(low, int) and isinstance(high, int):
        return IntDistribution(low, high, log=log, step=one.get("step", 1))
    return FloatDistribution(float(low), float(high), log=log, step=one.get("step"))


def recipe_file(search: Search, best: TrialRecord) -> str:
    """Return the best trial's configuration as a file that `--recipe` takes."""
    return recipes.file_text(search.recipe, {**search.overrides, **best.params})
