"""The study of a search: a small object for each trial, of which every process makes the same Optuna study.

`<data_root>/tuning/NAME/study.json` says what is searched, `trials/00000.json` and on what became of each
trial. There is no database, and a folder and an object store serve alike. Any number of processes may search
together: a trial belongs to whoever holds its lease (`leases/00000`), who alone trains it and writes of it,
and all read the others' before they draw values or end a trial. A trial has its number and its values from
the moment it is written; whoever goes on with it trains with these, so that it counts once, however often it
is begun.
"""

import os
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
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
from optuna.trial import FrozenTrial, TrialState, create_trial

from components.tuning import RUNNING
from components.tuning.spaces import Space
from trainer import storage
from trainer.base.errors import ConfigError
from trainer.storage import leases, records

_STARTUP = 5
"""Trials that are drawn at random before the model of the search begins, at most."""
_RUNG = "completed_rung_"
"""How Optuna's pruner calls what it notes of a trial: others are compared with it."""
_LOOKS = 12
"""How often within the time after which a lease lapses others' trials are looked at, for one to take up."""
COMPLETE, PRUNED, FAILED = "complete", "pruned", "failed"
_STATES = {
    RUNNING: TrialState.RUNNING, COMPLETE: TrialState.COMPLETE, PRUNED: TrialState.PRUNED,
    FAILED: TrialState.FAIL,
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
    """The study of a data root, as this process knows it."""

    def __init__(self, uri: str, search: Search, trials: int, lapse: float = leases.LAPSE) -> None:
        """Open the study, or begin it.

        Args:
            uri: its folder.
            search: what is searched.
            trials: how many there are to be: a third of them, five at most, are drawn at random first.
            lapse: seconds after which a trial that a lost process was working on is taken up by another; the
                same for all that search together.

        Raises:
            ConfigError: there is a study of something else.
            StorageError: it cannot be read or written.
        """
        self.uri, self.search = uri, search
        self.distributions = {key: _distribution(one) for key, one in search.space.items()}
        self._startup, self.lapse = min(_STARTUP, max(1, trials // 3)), lapse
        self._records: dict[int, TrialRecord] = {}
        self._held: dict[int, leases.Lease] = {}
        self._watches: dict[int, leases.Watch] = {}
        self._next_look = 0.0
        _open(storage.join(uri, "study.json"), search)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.read()

    @property
    def records(self) -> list[TrialRecord]:
        """The trials that were begun, by number."""
        return [self._records[number] for number in sorted(self._records)]

    def read(self) -> None:
        """Read what others have written since."""
        for name in storage.list_files(storage.join(self.uri, "trials")):
            number = int(name.removesuffix(".json"))
            if number not in self._held and not self.ended(number):
                self._records[number] = self._stored(number)

    def _stored(self, number: int) -> TrialRecord:
        tree = storage.read_json(self._place(number))
        return TrialRecord(**{key: tree[key] for key in tree.keys() & TrialRecord.__dataclass_fields__})

    def ended(self, number: int) -> bool:
        """Tell whether it is known how a trial ended."""
        return number in self._records and self._records[number].state != RUNNING

    def take(self, numbers: Iterable[int], stack: ExitStack) -> TrialRecord | None:
        """Take up a trial that nobody works on: one that was begun and has not ended, else a new one.

        It is written before it is returned.

        Args:
            numbers: numbers of trials.
            stack: when it is closed the trial is free again, unless it has ended.

        Returns:
            None where all have ended, or others work on those that have not.

        Raises:
            StorageError: the study cannot be read or written.
        """
        if time.monotonic() < self._next_look:
            return None
        self.read()
        free = [number for number in numbers if number not in self._held and not self.ended(number)]
        for number in sorted(free, key=lambda number: (number not in self._records, number)):
            try:
                return self._taken(number, stack)
            except leases.HeldError:
                continue
        self._next_look = time.monotonic() + self.lapse / _LOOKS
        return None

    def _taken(self, number: int, stack: ExitStack) -> TrialRecord | None:
        """Hold a trial and write that it is trained; raises HeldError where another does, or did."""
        holder = f"{socket.gethostname()}, process {os.getpid()}"
        watch = self._watches.setdefault(number, leases.Watch())
        place = storage.join(self.uri, "leases", f"{number:05d}")
        with ExitStack() as own:
            lease = own.enter_context(leases.hold(place, holder, patience=0, lapse=self.lapse, watch=watch))
            if storage.exists(self._place(number)):
                record = self._records[number] = self._stored(number)
                if self.ended(number):
                    raise leases.HeldError(f"trial {number} has ended")
                record.attempts += 1
                record.validations, record.rungs = [], {}
            else:
                record = self._records[number] = TrialRecord(number, self._draw(number))
            self._held[number] = lease
            own.callback(self._held.pop, number)
            self._write(record)
            stack.push(own.pop_all())
        return record

    def _draw(self, number: int) -> dict[str, Any]:
        """Return the values of a new trial."""
        # A seed for each trial: with the same one, processes that begin together would draw the same values.
        sampler = optuna.samplers.TPESampler(seed=number, constant_liar=True, n_startup_trials=self._startup)
        return self._optuna(sampler).ask(self.distributions).params

    def _optuna(self, sampler: optuna.samplers.BaseSampler | None = None) -> optuna.Study:
        """Return Optuna's study of all that is known; its trials are in the order of `records`."""
        study = optuna.create_study(
            direction="maximize", sampler=sampler or optuna.samplers.RandomSampler(),
            pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2),
        )  # fmt: skip
        study.add_trials([self._known(record) for record in self.records])
        return study

    def _known(self, record: TrialRecord) -> FrozenTrial:
        validations = dict(enumerate(record.validations, start=1))
        return create_trial(
            state=_STATES[record.state], value=record.value, params=record.params,
            distributions=self.distributions, intermediate_values=validations,
            system_attrs=dict(record.rungs),
        )  # fmt: skip

    def report(self, record: TrialRecord, value: float) -> bool:
        """Note the next validation of a trial; tells whether it is behind the others, and should end.

        Args:
            record: of the trial.
            value: of the metric, the more the better.
        """
        record.validations.append(value)
        self.read()
        study, place = self._optuna(), self.records.index(record)
        behind = study.pruner.prune(study, study.get_trials(deepcopy=False)[place])
        noted = study.get_trials(deepcopy=False)[place].system_attrs
        record.rungs = {key: number for key, number in noted.items() if key.startswith(_RUNG)}
        self._write(record)
        return behind

    def tell(self, record: TrialRecord, state: str, value: float | None = None) -> None:
        """Note how a trial ended; `value` is that of a complete one."""
        record.state, record.value = state, record.validations[-1] if state == PRUNED else value
        self._write(record)

    def _write(self, record: TrialRecord) -> None:
        """Write what is known of a trial, if it is still this process's."""
        self._held[record.number].check()
        storage.write_json(self._place(record.number), asdict(record))

    def _place(self, number: int) -> str:
        return storage.join(self.uri, "trials", f"{number:05d}.json")

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
        return dict(get_param_importances(self._optuna(), evaluator=PedAnovaImportanceEvaluator()))


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


def _distribution(one: Mapping[str, Any]) -> BaseDistribution:
    if "choices" in one:
        return CategoricalDistribution(one["choices"])
    low, high, log = one["low"], one["high"], bool(one.get("log", False))
    if isinstance(low, int) and isinstance(high, int):
        return IntDistribution(low, high, log=log, step=one.get("step", 1))
    return FloatDistribution(float(low), float(high), log=log, step=one.get("step"))
