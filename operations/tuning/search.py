"""A search: Optuna's study of it, the trainings of its trials, some at a time, and its results.

On a disk or a volume the study is Optuna's journal, shared by any number of processes. In a bucket a trial's
values follow from the study's seed and the trial's number, and its result is a JSON object.
"""

import fcntl
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from operator import attrgetter
from pathlib import Path
from threading import Lock
from typing import Any

import optuna
from matplotlib.ticker import MaxNLocator
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.pruners import SuccessiveHalvingPruner
from optuna.samplers import RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, TrialState

from components import starting_weights, usage
from components.launchers.guarded_process import GuardedProcess
from operations.tuning import ENDED, study_name
from operations.tuning.space import Choices, Range, Space, parse, to_json
from trainer import storage
from trainer.base.errors import EXIT_RETRY, ConfigError, Interrupted, TrainingError
from trainer.base.worker_pool import threads_of_process
from trainer.config import parsing
from trainer.data.shard_index import data_root_of
from trainer.launching.stop_signals import StopRequest, stop_request
from trainer.model import recipes
from trainer.report.figures import SERIES, as_plot, bars, figure, render
from trainer.storage import Form, records
from trainer.trackers.training_log import read_rows

PAGE, BEST = "tuning.html", "best.yaml"
RUNNING, COMPLETE, PRUNED, FAILED = "running", "complete", "pruned", "fail"  # Optuna's names.
_NUMBER = "number"
"""User attribute of Optuna's trials: our number. Optuna numbers trials in the order in which they start."""
_TRIAL = Form("trial", 1, remedy="delete it, and run the same command again: it trains that trial again")
_POLL_SECONDS = 0.5
_GRACE_SECONDS = 30.0  # Time for a stopped training to save its state.


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
        params = [f"{key}={_short(each, '.3g')}" for key, each in self.params.items()]
        value = "" if self.value is None else f" {self.value:.4f}"
        return f"trial {self.number}: {self.state}{value}  {', '.join(params)}"


def _short(value: Any, form: str) -> str:
    return format(value, form) if isinstance(value, float) else str(value)


class Study:
    """The study in a folder, which is created if it does not exist, of a number of `trials`."""

    def __init__(self, uri: str, search: Search, trials: int) -> None:
        self.uri, self.search = uri, search
        self.data_root, _, self.name = uri.rstrip("/").rpartition("/tuning/")
        about = {"version": 2, **vars(search), "space": to_json(search.space)}
        begun = {"kind": "search", "seed": secrets.randbits(32), **about}
        place = storage.join(uri, "study.json")
        if not storage.create(place, records.encode(begun)):
            begun = storage.read_json(place)
            if other := [name for name, value in about.items() if begun.get(name) != value]:
                raise ConfigError(
                    f"{uri} contains a search with another {', '.join(other)}",
                    fix="give this one another --name; best.yaml of the other one can still be used",
                )
        self._seed = int(begun["seed"])
        self._distributions = {key: _distribution(one) for key, one in search.space.items()}
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.journal: optuna.Study | None = None
        if storage.is_local(uri):
            path = storage.join(storage.absolute(uri), "optuna.log")
            startup = min(5, max(1, trials // 3))  # Random trials before TPE.
            self.journal = optuna.create_study(
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
        if self.journal is None:
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
        if number not in self._known():
            self.journal.ask(self._distributions).set_user_attr(_NUMBER, number)
        trial = _as_trial(self._known()[number])
        trial.lock = lock
        return trial

    def report(self, trial: Trial, value: float) -> bool:
        """Record the next validation of a trial; return whether it should be pruned."""
        trial.validations.append(value)
        if self.journal is None:
            return False
        live = self._live(self.journal, trial)
        live.report(value, len(trial.validations))
        return live.should_prune()

    def end(self, trial: Trial) -> None:
        """Record how a trial ended."""
        if self.journal is None:
            storage.write_json(self._place(trial.number), {"kind": "trial", "version": 1, **vars(trial)})
            return
        # Of a pruned trial Optuna takes the last validation.
        value = None if trial.state == PRUNED else trial.value
        self.journal.tell(self._live(self.journal, trial), value, TrialState[trial.state.upper()])

    def trials(self) -> list[Trial]:
        """Return the known trials by number; in a bucket only those that have ended."""
        if self.journal is None:
            names = storage.list_files(storage.join(self.uri, "trials"))
            return [self._read(int(name.removesuffix(".json"))) for name in names]
        return [_as_trial(known) for _, known in sorted(self._known().items())]

    def best(self) -> Trial | None:
        """Return the best complete trial; None if there is none."""
        done = [trial for trial in self.trials() if trial.state == COMPLETE]
        return max(done, key=lambda trial: trial.value or 0.0, default=None)

    def _known(self) -> dict[int, FrozenTrial]:
        trials = self.journal.get_trials(deepcopy=False) if self.journal else []
        return {each.user_attrs[_NUMBER]: each for each in trials if _NUMBER in each.user_attrs}

    def _live(self, journal: optuna.Study, trial: Trial) -> optuna.Trial:
        return optuna.Trial(journal, self._known()[trial.number]._trial_id)

    def _read(self, number: int) -> Trial:
        tree = storage.read_json(self._place(number), _TRIAL)
        return Trial(**{key: tree[key] for key in tree.keys() - {"kind", "version"}})

    def _place(self, number: int) -> str:
        return storage.join(self.uri, "trials", f"{number:05d}.json")


def _distribution(one: Range | Choices) -> BaseDistribution:
    if isinstance(one, Choices):
        return CategoricalDistribution(one.choices)
    if isinstance(one.low, int) and isinstance(one.high, int):
        return IntDistribution(one.low, one.high, log=one.log, step=int(one.step or 1))
    return FloatDistribution(one.low, one.high, log=one.log, step=one.step)


def _as_trial(known: FrozenTrial) -> Trial:
    validations = [value for _, value in sorted(known.intermediate_values.items())]
    number, state = known.user_attrs[_NUMBER], known.state.name.lower()
    return Trial(number, dict(known.params), state, known.value, validations)


def train(
    study: Study, numbers: Sequence[int], parallel: int, start: Callable[[Trial, ExitStack], "LocalTraining"],
    shown: Callable[[str], None] = print,
) -> None:  # fmt: skip
    """Train trials, `parallel` at a time, until all have ended; wait for those that other processes train.

    `start` starts or resumes a training, which closing the stack ends. `shown` receives a line for each trial
    that ends here.
    """
    drawing = Lock()  # `shown` draws a page.
    with stop_request() as stop, ThreadPoolExecutor(parallel) as threads:

        def train_one(number: int) -> bool:
            """Train a trial unless it has ended; return False if another process trains it."""
            with ExitStack() as stack:
                trial = study.begin(number, stack)
                if trial and trial.state == RUNNING:
                    _follow(study, trial, start(trial, stack), stop)
                    if trial.state != RUNNING:
                        with drawing:
                            shown(str(trial))
            return trial is not None

        def work(number: int, waits: bool) -> None:
            try:
                while not (stop.requested or train_one(number)) and waits:
                    time.sleep(_POLL_SECONDS)
            except BaseException:
                stop.requested = True  # The other trainings save their state and end.
                raise

        for waits in (False, True):
            list(threads.map(work, numbers, repeat(waits)))
    if stop.requested:
        raise Interrupted(
            "the search was stopped; its trainings have saved their state",
            fix="run the same command to continue",
        )


def _follow(study: Study, trial: Trial, training: "LocalTraining", stop: StopRequest) -> None:
    """Report validations, stop a training that is behind, and record how the trial ended, if it did."""
    is_behind = asked = False
    code = None
    while code is None:
        time.sleep(_POLL_SECONDS)
        code = training.poll()  # First: the files of an ended training are then complete.
        if code is not None or study.journal:
            for value in training.validations()[len(trial.validations) :]:
                is_behind |= study.report(trial, value)
        if code is None and not asked and (is_behind or stop.requested):
            asked = True
            training.stop()
    trial.value = training.result() if code == 0 else None
    if trial.value is not None:
        trial.state = COMPLETE
    elif asked and is_behind:
        trial.state, trial.value = PRUNED, trial.validations[-1]
    elif code == EXIT_RETRY or stop.requested:
        stop.requested = True
        return
    else:
        trial.state = FAILED
    study.end(trial)


class LocalTraining:
    """A training on this machine, started or resumed from its checkpoint.

    It has `processes`, one per GPU, and is one of `parallel` trainings. Closing `stack` ends it. Its output
    goes to `log`, or to this process's stdout.
    """

    def __init__(
        self, search: Search, trial: Trial, folder: str, stack: ExitStack, *, processes: int = 1,
        parallel: int = 1, log: Path | None = None,
    ) -> None:  # fmt: skip
        given = {**search.overrides, **trial.params}
        values = starting_weights.chosen(search.recipe, given, data_root_of(search.shards)) | given
        config = recipes.load(search.recipe, values)
        self._metric, self._output = config.evaluation.metric, storage.join(folder, "train")
        path = storage.join(folder, "config.json")
        parsing.write(path, config)
        command = [
            sys.executable, "-m", "trainer", "launch", "--nproc", str(processes), "--",
            "train", "--config", path, "--shards", search.shards, "--output", self._output,
        ]  # fmt: skip
        env = {"OMP_NUM_THREADS": str(threads_of_process(processes * parallel)), **os.environ}
        with log.open("ab") if log else nullcontext() as output:
            self._process = stack.enter_context(
                GuardedProcess(
                    command, env=env, grace_seconds=_GRACE_SECONDS,
                    # The trial stays locked until the last process of its training has ended.
                    keep_open=() if trial.lock is None else (trial.lock,),
                    stdout=output.fileno() if output else None, stderr=subprocess.STDOUT,
                )
            )  # fmt: skip
        self.poll, self.stop = self._process.poll, self._process.stop

    def validations(self) -> list[float]:
        rows = read_rows(self._output)
        return [row[self._metric] for row in rows if row["kind"] == "val" and self._metric in row]

    def result(self) -> float | None:
        report = storage.join(self._output, "result.json")
        value: float | None = storage.read_json(report)["metrics"].get(self._metric)
        return value


def publish(study: Study, *folders: str) -> None:
    """Write the page, and the best configuration if there is one, beside the study and into other folders."""
    text = ""
    if best := study.best():
        text = recipes.file_text(study.search.recipe, {**study.search.overrides, **best.params})
    page = _page(study, text)
    for place in (study.uri, *folders):
        storage.write_bytes(storage.join(place, PAGE), page.encode())
        if text:
            storage.write_bytes(storage.join(place, BEST), text.encode())


def finish(study: Study, *folders: str) -> Trial:
    """Publish a search whose trials have all ended, and return the best of them."""
    publish(study, *folders)
    storage.write_json(storage.join(study.uri, ENDED), {"kind": "search ended", "version": 1})
    if best := study.best():
        return best
    raise TrainingError(
        "no trial of the search succeeded", fix="read the trials' logs, and try again with another --name"
    )


Request = tuple[dict[str, Any], str, str, dict[str, Any], str, str, int]
"""The shards' manifest, name, recipe, overrides, space as YAML, data root and number of trials."""


def open_study(request: Request) -> Study:
    """Open the study of a search in a cluster; see `Study` for errors."""
    data, name, recipe, overrides, space, data_root, trials = request
    config = recipes.load(recipe, overrides)
    # Kubeflow turns 4 into 4.0, and users read the file.
    typed = {key: attrgetter(key)(config) if isinstance(value, float) else value
             for key, value in overrides.items()}  # fmt: skip
    search = Search(recipe, typed, parse(space, recipe, typed, "the space"), data["uri"])
    return Study(storage.join(data_root, "tuning", study_name(name, recipe)), search, trials)


def train_trial(request: Request, number: str, gpus: int) -> str:
    """Train a trial of a search in a pod with `gpus` GPUs; return a line about it."""
    study = open_study(request)
    usage.keep(study.data_root, processes=gpus)

    def start(trial: Trial, stack: ExitStack) -> LocalTraining:
        folder = storage.join(study.uri, "runs", f"{trial.number:05d}")
        return LocalTraining(study.search, trial, folder, stack, processes=max(gpus, 1))

    train(study, [int(number)], 1, start)
    publish(study)
    return next(str(trial) for trial in study.trials() if trial.number == int(number))


def choose(request: Request, ended: list[str], paths: tuple[str, str]) -> dict[str, dict[str, Any]]:
    """Write the page and the best configuration of a search, also into two local files, `paths`."""
    study = open_study(request)
    usage.keep(study.data_root)
    print("\n".join(ended), flush=True)
    best = finish(study)
    uris = [storage.join(study.uri, file) for file in (PAGE, BEST)]
    for path, uri in zip(paths, uris, strict=True):
        Path(path).write_bytes(storage.read_bytes(uri))
    print(f"best: {best}\npage: {uris[0]}")
    return {"metrics": {study.search.metric: best.value, "trial": best.number}, "shown": {"uri": uris[1]}}


def _page(study: Study, recipe: str) -> str:
    """Return the page of a search; `recipe` is the content of best.yaml, empty if there is none."""
    metric, trials = study.search.metric, study.trials()
    history, line = figure("trial", metric)
    validations, curves = figure("validation", metric)
    for axes in (line, curves):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for color, state in zip(SERIES, (COMPLETE, PRUNED), strict=False):
        of_state = [trial for trial in trials if trial.state == state]
        numbers, values = [each.number for each in of_state], [each.value or 0.0 for each in of_state]
        line.plot(numbers, values, "o", color=color)
        if state == COMPLETE:
            line.step(numbers, list(accumulate(values, max)), where="post", color=color)
    for trial in trials:
        color = SERIES[1] if trial.state == PRUNED else SERIES[0]
        counts = range(1, len(trial.validations) + 1)
        curves.plot(counts, trial.validations, "o-", color=color, linewidth=0.9, markersize=3)
    legend = zip(SERIES, (COMPLETE, PRUNED), strict=False)
    plots = [as_plot("History: each trial, and the best so far", history, legend),
             as_plot("Validations of each trial", validations)]  # fmt: skip
    done = [trial.value for trial in trials if trial.state == COMPLETE]
    if study.journal and len(done) > 3 and len(set(done)) > 1:
        shares = get_param_importances(study.journal, evaluator=PedAnovaImportanceEvaluator())
        drawn, _ = bars("share of what the keys explain", list(shares), list(shares.values()))
        plots.append(as_plot("Importance of each key", drawn))
    keys, rows = list(study.search.space), []
    for trial in sorted(trials, key=lambda trial: (trial.state != COMPLETE, -(trial.value or 0.0))):
        value = "" if trial.value is None else trial.value
        cells = [trial.number, trial.state, value, *(trial.params.get(key, "") for key in keys)]
        rows.append([_short(cell, ".4g") for cell in cells])
    return render(
        "plots_page.html.jinja", title=f"Search {study.name}", remark="", recipe=recipe,
        header=["trial", "state", metric, *keys], rows=rows, plots=plots,
    )  # fmt: skip
