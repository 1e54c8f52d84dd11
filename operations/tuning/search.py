"""Trains the trials of a search, some at a time, and publishes the results."""

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
from typing import Any

from matplotlib.ticker import MaxNLocator

from components import starting_weights, usage
from components.launchers.guarded_process import GuardedProcess
from operations.tuning import ENDED, study_name
from operations.tuning.space import parse
from operations.tuning.study import COMPLETE, FAILED, PRUNED, RUNNING, Search, Study, Trial
from trainer import storage
from trainer.base.errors import EXIT_RETRY, Interrupted, TrainingError
from trainer.base.worker_pool import threads_of_process
from trainer.config import parsing
from trainer.data.shard_index import data_root_of
from trainer.launching.stop_signals import StopRequest, stop_request
from trainer.model import recipes
from trainer.report.figures import SERIES, as_plot, bars, figure, render
from trainer.trackers.training_log import read_rows

PAGE, BEST = "tuning.html", "best.yaml"
_POLL_SECONDS = 0.5
_BUCKET_SECONDS = 5.0  # Time between two reads of a training's validations from a bucket.
_GRACE_SECONDS = 30.0  # Time for a stopped training to save its state.

Start = Callable[[Trial, ExitStack], "LocalTraining"]
"""Starts or resumes the training of a trial; closing the stack ends it."""


def train(
    study: Study, numbers: Sequence[int], parallel: int, start: Start, shown: Callable[[str], None] = print
) -> None:
    """Train trials, `parallel` at a time, until all have ended; wait for those that other processes train.

    `shown` receives a line for each trial that ends here.
    """
    drawing = Lock()  # `shown` draws a page.
    with stop_request() as stop, ThreadPoolExecutor(parallel) as threads:

        def train_one(number: int) -> bool:
            """Train a trial unless it has ended; return False if another process trains it."""
            with ExitStack() as stack:
                trial = study.begin(number, stack)
                if trial and trial.state == RUNNING:
                    _follow(study, trial, start(trial, stack), stop)
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
            list(threads.map(partial(work, waits=waits), numbers))
    if stop.requested:
        raise _stopped("the search")


def _follow(study: Study, trial: Trial, training: "LocalTraining", stop: StopRequest) -> None:
    """Report validations, stop a training that is behind, and record how the trial ended."""
    is_behind = asked = False
    code, next_read = None, 0.0
    while code is None:
        time.sleep(_POLL_SECONDS)
        code = training.poll()  # First: the files of an ended training are then complete.
        if code is not None or time.monotonic() >= next_read:
            for value in training.validations()[len(trial.validations) :]:
                is_behind |= study.report(trial, value)
            next_read = time.monotonic() + (0.0 if storage.is_local(study.uri) else _BUCKET_SECONDS)
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
    text, best = "", study.best()
    if best:
        text = recipes.file_text(study.search.recipe, {**study.search.overrides, **best.params})
    html = page(study.name, study.search.metric, study.trials(), study.importances(), text)
    for place in (study.uri, *folders):
        storage.write_bytes(storage.join(place, PAGE), html.encode())
        if text:
            storage.write_bytes(storage.join(place, BEST), text.encode())


def finish(study: Study, *folders: str) -> Trial:
    """Publish a search whose trials have all ended, and return the best of them."""
    publish(study, *folders)
    storage.write_json(storage.join(study.uri, ENDED), {"kind": "search ended", "version": 1})
    if best := study.best():
        return best
    raise TrainingError(
        f"none of {len(study.trials())} trials succeeded",
        fix="read the trials' logs, and try again with another --name",
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
    metrics = {study.search.metric: best.value, "trial": best.number}
    return {"metrics": metrics, "shown": {"uri": uris[1]}}


def page(
    name: str, metric: str, trials: Sequence[Trial], importances: Mapping[str, float], recipe: str
) -> str:
    """Return the page of a search; `recipe` is the content of best.yaml, empty if there is none."""
    history, axes = figure("trial", metric)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for color, state in zip(SERIES, (COMPLETE, PRUNED), strict=False):
        points = {each.number: each.value or 0.0 for each in trials if each.state == state}
        axes.plot(list(points), list(points.values()), "o", color=color)
        if state == COMPLETE:
            axes.step(list(points), list(accumulate(points.values(), max)), where="post", color=color)
    validations, axes = figure("validation", metric)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for trial in trials:
        color = SERIES[1] if trial.state == PRUNED else SERIES[0]
        counts = range(1, len(trial.validations) + 1)
        axes.plot(counts, trial.validations, "o-", color=color, linewidth=0.9, markersize=3)
    legend = zip(SERIES, (COMPLETE, PRUNED), strict=False)
    plots = [as_plot("History: each trial, and the best so far", history, legend),
             as_plot("Validations of each trial", validations)]  # fmt: skip
    if importances:
        drawn, _ = bars("share of what the keys explain", list(importances), list(importances.values()))
        plots.append(as_plot("Importance of each key", drawn))
    keys, rows = list(dict.fromkeys(key for trial in trials for key in trial.params)), []
    for trial in sorted(trials, key=lambda trial: (trial.state != COMPLETE, -(trial.value or 0.0))):
        value = "" if trial.value is None else trial.value
        cells = [trial.number, trial.state, value, *(trial.params.get(key, "") for key in keys)]
        rows.append([f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells])
    return render(
        "plots_page.html.jinja", title=f"Search {name}", remark="", recipe=recipe,
        header=["trial", "state", metric, *keys], rows=rows, plots=plots,
    )  # fmt: skip
