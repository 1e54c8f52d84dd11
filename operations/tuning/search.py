"""Trains the trials of a search, some at a time, and publishes the results.

A trial that falls behind the others at a validation is stopped by SIGTERM, as a pod is. A search that was
stopped or killed continues with the trials that it had begun, from their own checkpoints.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import accumulate
from operator import attrgetter
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from matplotlib.ticker import MaxNLocator

from components import starting_weights, usage
from components.launchers.guarded_process import GuardedProcess
from operations.tuning import ENDED, study_folder, study_name
from operations.tuning.space import parse
from operations.tuning.study import COMPLETE, FAILED, PRUNED, RUNNING, Search, Study, Trial
from trainer import storage
from trainer.base.errors import EXIT_RETRY, Interrupted, TrainingError
from trainer.base.worker_pool import threads_of_process
from trainer.config import parsing
from trainer.config.types import Overrides
from trainer.data.shard_index import data_root_of
from trainer.launching.stop_signals import StopRequest, stop_request
from trainer.model import recipes
from trainer.report.figures import SERIES, Plot, as_plot, bars, figure, render
from trainer.trackers.training_log import read_rows

PAGE, BEST = "tuning.html", "best.yaml"
"""Files beside the study."""
_POLL_SECONDS = 0.5
_METRICS_SECONDS = 5.0
"""Time between two reads of the metrics of a training that writes them to a bucket."""
_GRACE_SECONDS = 30.0
"""How long a training that is stopped may take to save its state."""
_ONE_AT_A_TIME = Lock()
"""For the callback at the end of a trial: it draws a page."""

Start = Callable[[Trial, ExitStack], "LocalTraining"]
"""Begins the training of a trial, or resumes it; closing the stack ends it."""


def train(
    study: Study, numbers: Sequence[int], parallel: int, start: Start, shown: Callable[[str], None] = print
) -> None:
    """Train trials until all of them have ended; those that ended before count.

    Other processes may train trials of a study on a disk at the same time: this one trains the rest, and then
    waits for theirs.

    `parallel` trainings run here at the same time; `start` begins a trial's training; `shown` is called with
    a line for each trial that ends here.

    Raises:
        Interrupted: stopped by a signal; trainings have saved their state, and the same call continues.
        StorageError: the study cannot be read or written.
    """
    with stop_request() as stop, ThreadPoolExecutor(parallel) as threads:

        def work(number: int, waits: bool) -> None:
            try:
                while not (stop.requested or _train(study, number, start, stop, shown)) and waits:
                    time.sleep(_POLL_SECONDS)
            except BaseException:
                stop.requested = True  # The other trainings save their state and end.
                raise

        for waits in (False, True):
            list(threads.map(partial(work, waits=waits), numbers))
    if stop.requested:
        raise _stopped("the search")


def _train(study: Study, number: int, start: Start, stop: StopRequest, shown: Callable[[str], None]) -> bool:
    """Train a trial unless it has ended; return False if another process trains it."""
    with ExitStack() as stack:
        trial = study.begin(number, stack)
        if trial and trial.state == RUNNING:
            _follow(study, trial, start(trial, stack), stop)
            with _ONE_AT_A_TIME:
                shown(str(trial))
    return trial is not None


def _follow(study: Study, trial: Trial, training: "LocalTraining", stop: StopRequest) -> None:
    is_behind = asked = False
    code = None
    while code is None:
        time.sleep(_POLL_SECONDS)
        code = training.poll()  # First: the files of an ended training are then complete.
        for value in training.validations()[len(trial.validations) :]:
            is_behind |= study.report(trial, value)
        if code is None and not asked and (is_behind or stop.requested):
            asked = True
            training.stop()
    result = training.result() if code == 0 else None
    if result is not None:
        trial.state, trial.value = COMPLETE, result
    elif asked and is_behind:
        trial.state, trial.value = PRUNED, trial.validations[-1]
    elif code == EXIT_RETRY or stop.requested:
        raise _stopped(f"trial {trial.number}")
    else:
        trial.state = FAILED
    study.end(trial)


def _stopped(subject: str) -> Interrupted:
    return Interrupted(
        f"{subject} was stopped; its training has saved its state", fix="run the same command to continue"
    )


class LocalTraining:
    """A training in processes of this machine, begun or resumed from its checkpoint.

    It trains in `processes`, one for each GPU, and shares the machine with `parallel` trainings in all;
    `stack` ends it when closed. `log` receives its output; None is this process's stdout.
    """

    def __init__(
        self, search: Search, trial: Trial, folder: str, stack: ExitStack, *, processes: int = 1,
        parallel: int = 1, log: Path | None = None,
    ) -> None:  # fmt: skip
        given = {**search.overrides, **trial.params}
        values = starting_weights.chosen(search.recipe, given, data_root_of(search.shards)) | given
        config = recipes.load(search.recipe, values)
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
        with log.open("ab") if log else nullcontext() as output:
            self._process = stack.enter_context(
                GuardedProcess(
                    command, env=env, grace_seconds=_GRACE_SECONDS,
                    # The trial stays locked until the last process of its training has ended.
                    keep_open=() if trial.lock is None else (trial.lock,),
                    stdout=output.fileno() if output else None, stderr=subprocess.STDOUT,
                )
            )  # fmt: skip
        self.stop = self._process.stop

    def poll(self) -> int | None:
        code = self._process.poll()
        if code is not None:
            self._next_look = 0.0  # The last rows must be read.
        return code

    def validations(self) -> list[float]:
        if time.monotonic() >= self._next_look:
            self._rows = read_rows(self._output)
            self._next_look = time.monotonic() + (0 if storage.is_local(self._output) else _METRICS_SECONDS)
        return [row[self._metric] for row in self._rows if row["kind"] == "val" and self._metric in row]

    def result(self) -> float | None:
        report = storage.join(self._output, "result.json")
        value: float | None = storage.read_json(report)["metrics"].get(self._metric)
        return value


def metric_of(search: Search) -> str:
    """Return the metric that a search maximizes."""
    return recipes.load(search.recipe, dict(search.overrides)).evaluation.metric


def publish(study: Study, name: str, *folders: str) -> None:
    """Write the page, and the best configuration if there is one, beside the study and into other folders."""
    search, best = study.search, study.best()
    text = recipes.file_text(search.recipe, {**search.overrides, **best.params}) if best else ""
    html = page(name, metric_of(search), study.trials(), study.importances(), text)
    for place in (study.uri, *folders):
        storage.write_bytes(storage.join(place, PAGE), html.encode())
        if text:
            storage.write_bytes(storage.join(place, BEST), text.encode())


def finish(study: Study, name: str, *folders: str) -> Trial:
    """Publish a search whose trials have all ended, and return the best of them.

    Raises:
        TrainingError: no trial came to a result.
    """
    publish(study, name, *folders)
    storage.write_json(storage.join(study.uri, ENDED), {"kind": "search ended", "version": 1})
    if best := study.best():
        return best
    raise TrainingError(
        f"none of {len(study.trials())} trials came to a result",
        fix="read the trials' logs, and try again under another --name",
    )


class Request(NamedTuple):
    """What is searched."""

    data: dict[str, Any]
    """Manifest of the shards."""
    name: str
    recipe: str
    overrides: Overrides
    space: str
    data_root: str
    trials: int

    def open(self) -> tuple[Study, str]:
        """Return the study and its name."""
        name, config = study_name(self.name, self.recipe), recipes.load(self.recipe, self.overrides)
        overrides = {  # Kubeflow makes 4.0 of 4, and people read the file.
            key: attrgetter(key)(config) if isinstance(value, float) else value
            for key, value in self.overrides.items()
        }
        given = parse(self.space, self.recipe, overrides, "the space")
        searched = Search(self.recipe, overrides, given, self.data["uri"])
        return Study(study_folder(self.data_root, name), searched, self.trials), name


def train_trial(searched: tuple[Any, ...], number: str, gpus: int) -> str:
    """Train a trial of a search in a pod with `gpus` GPUs; return a line about it.

    `searched` has the fields of a `Request`.

    Raises:
        ConfigError: the space cannot be used, or the name has a study of something else.
        Interrupted: stopped by a signal; the same call continues.
        StorageError: the data root cannot be reached.
    """
    request = Request(*searched)
    study, name = request.open()
    usage.keep(request.data_root, processes=gpus)

    def start(trial: Trial, stack: ExitStack) -> LocalTraining:
        folder = storage.join(study.uri, "runs", f"{trial.number:05d}")
        return LocalTraining(study.search, trial, folder, stack, processes=max(gpus, 1))

    train(study, [int(number)], 1, start)
    publish(study, name)
    return next(str(trial) for trial in study.trials() if trial.number == int(number))


def choose(searched: tuple[Any, ...], ended: list[str], paths: tuple[str, str]) -> dict[str, dict[str, Any]]:
    """Write the page and the best configuration of a search, also into two local files, `paths`.

    Returns:
        The artifact's `metrics`, and what is `shown` with the configuration.

    Raises:
        TrainingError: no trial came to a result.
    """
    request = Request(*searched)
    study, name = request.open()
    usage.keep(request.data_root)
    print("\n".join(ended), flush=True)
    best = finish(study, name)
    uris = [storage.join(study.uri, file) for file in (PAGE, BEST)]
    for path, uri in zip(paths, uris, strict=True):
        Path(path).write_bytes(storage.read_bytes(uri))
    print(f"best: {best}\npage: {uris[0]}")
    metrics = {metric_of(study.search): best.value, "trial": best.number}
    return {"metrics": metrics, "shown": {"uri": uris[1]}}


def page(
    name: str, metric: str, trials: Sequence[Trial], importances: Mapping[str, float], recipe: str
) -> str:
    """Return the page of a search, as HTML that needs no other file.

    `recipe` is the text of the file with the best configuration; it may be empty, as may `importances`.
    """
    plots = [_plot_history(metric, trials), _plot_validations(metric, trials)]
    if importances:
        drawn, _ = bars("share of what the keys explain", list(importances), list(importances.values()))
        plots.append(as_plot("Importance of each key", drawn))
    keys = list(dict.fromkeys(key for trial in trials for key in trial.params))
    ranked = sorted(trials, key=lambda trial: (trial.state != COMPLETE, -(trial.value or 0.0)))
    rows = [
        [str(trial.number), trial.state, *map(_cell, [trial.value, *(trial.params.get(key) for key in keys)])]
        for trial in ranked
    ]
    return render(
        "plots_page.html.jinja", title=f"Search {name}", remark="", recipe=recipe,
        header=["trial", "state", metric, *keys], rows=rows, plots=plots,
    )  # fmt: skip


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _plot_history(metric: str, trials: Sequence[Trial]) -> Plot:
    drawn, axes = figure("trial", metric)
    for color, state in zip(SERIES, (COMPLETE, PRUNED), strict=False):
        points = {each.number: each.value or 0.0 for each in trials if each.state == state}
        axes.plot(list(points), list(points.values()), "o", color=color)
        if state == COMPLETE:
            axes.step(list(points), list(accumulate(points.values(), max)), where="post", color=color)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend = zip(SERIES, (COMPLETE, PRUNED), strict=False)
    return as_plot("History: each trial, and the best so far", drawn, legend)


def _plot_validations(metric: str, trials: Sequence[Trial]) -> Plot:
    drawn, axes = figure("validation", metric)
    for trial in trials:
        color = SERIES[1] if trial.state == PRUNED else SERIES[0]
        counts = range(1, len(trial.validations) + 1)
        axes.plot(counts, trial.validations, "o-", color=color, linewidth=0.9, markersize=3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return as_plot("Validations of each trial", drawn)
