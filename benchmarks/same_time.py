"""What two recipes learn in the same time: trained side by side, each on its own CPU core.

    python -m benchmarks.same_time --output compared          # dfine_small against small, on the sample
    python -m benchmarks.same_time --source voc:PATH --image-size 320 --seconds 1200 --output compared
    python -m benchmarks.same_time --second small --second-set "train.lr=1e-3" --output compared

A trial of `--trial` seconds decides how many epochs fit into `--seconds`, so that each learning rate schedule
ends in time. Then both train at once from random weights, one thread each, with one final validation, and are
evaluated on the test split. `ratio` is the validation AP of the second over that of the first. Shards, runs,
evaluations and `results.json` stay in `--output`. `of_a_core` is the CPU share that each training got.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import arguments, report, run
from trainer import storage
from trainer.base.errors import ConfigError, TrainingError
from trainer.config.parsing import parse_overrides, to_json
from trainer.config.schema import Config
from trainer.data.download import download
from trainer.data.shards import shard
from trainer.model import recipes
from trainer.trackers.training_log import read_rows

_ENDLESS = 100_000
"""Epochs of a trial, which is stopped."""


@dataclass(frozen=True)
class Outcome:
    """The result of one recipe."""

    recipe: str
    changes: str
    epochs: int
    steps: int
    images_seen: int
    seconds: float
    """Wall time of the training, including its validation."""
    of_a_core: float
    """CPU time over wall time of the training process."""
    val: dict[str, float]
    test: dict[str, float]
    """Metrics of the splits; empty if there is no test split."""


class Side:
    """One of the two recipes with its core and folder."""

    def __init__(self, recipe: str, changes: str, core: int, folder: Path, common: dict[str, Any]) -> None:
        self.recipe, self.changes, self._core, self.folder = recipe, changes, core, folder
        self._overrides = {**common, **parse_overrides(changes.split(), "--first-set, --second-set")}
        folder.mkdir()
        self.config = self._config({})

    def _config(self, more: dict[str, Any]) -> Config:
        return recipes.load(self.recipe, {**self._overrides, **more})

    def start(self, shards: str, output: str, **more: Any) -> subprocess.Popen[bytes]:
        """Start a training on this side's core; its output goes to a log file."""
        path = self.folder / f"{output}.json"
        path.write_text(to_json(self._config({key.replace("__", "."): value for key, value in more.items()})))
        words = ["train", "--config", str(path), "--shards", shards, "--output", str(self.folder / output)]
        return self._run(output, words)

    def evaluate(self, shards: str, name: str) -> subprocess.Popen[bytes]:
        """Start the evaluation of the trained model."""
        words = ["evaluate", "--checkpoint", str(self.folder / "run" / "best.pt"), "--shards", shards]
        words += ["--output", str(self.folder / name), "--config", str(self.folder / "run.json")]
        return self._run(name, words)

    def _run(self, name: str, words: Sequence[str]) -> subprocess.Popen[bytes]:
        with _on(self._core), (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "trainer", *words], stdout=log, stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip


def main() -> None:
    """Try, train, evaluate and tabulate."""
    options = arguments(
        __doc__, source="sample:images=400,seed=3,size=320", first="small", second="dfine_small",
        first_set="", second_set="", image_size=320, seconds=900, trial=60, output="compared",
    )  # fmt: skip
    folder, cores = Path(options.output).absolute(), sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigError("this process may use one core only", fix="give it two: each side has its own")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"--output {folder} is not empty", fix="name another folder, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    common = {"loader.image_size": options.image_size, "loader.workers": 1}
    sides = [
        Side(options.first, options.first_set, cores[0], folder / "first", common),
        Side(options.second, options.second_set, cores[1], folder / "second", common),
    ]
    data = sides[0].config.data
    shards = shard(download(options.source, str(folder), data), str(folder), data).uri
    rates = _trial(sides, shards, options.trial)
    train = storage.read_json(storage.join(shards, "index.json"))["splits"]["train"]["samples"]
    epochs = [max(1, int(options.seconds * rate / train)) for rate in rates]
    outcomes = _compare(sides, shards, epochs)
    text = json.dumps([asdict(one) for one in outcomes], indent=2)
    (folder / "results.json").write_text(text + "\n")
    print(text)
    first, second = outcomes
    figures: dict[str, Any] = {}
    for name, one in (("first", first), ("second", second)):
        figures |= dict(_flat(name, asdict(one)))
    if not first.val.get("AP"):
        raise TrainingError(
            f"{first.recipe} has learnt nothing in so short a time", fix="give it more --seconds"
        )
    report("same_time", second.val["AP"] / first.val["AP"], figures, options)


def _flat(name: str, values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(f"{name}_{key}", value)
        else:
            yield f"{name}_{key}", value


def _trial(sides: Sequence[Side], shards: str, seconds: float) -> list[float]:
    """Images a second of each side, side by side, from the first step that both logged on."""
    endless = {"train__epochs": _ENDLESS, "train__log_every": 1, "train__validate_every": _ENDLESS}
    begun = [side.start(shards, "trial", **endless) for side in sides]
    began = [time.monotonic()] * len(sides)
    while any(time.monotonic() - start < seconds for start in began):
        time.sleep(0.2)
        for number, (side, process) in enumerate(zip(sides, begun, strict=True)):
            if process.poll() is not None:
                raise TrainingError(
                    f"the trial of {side.recipe} ended", fix=f"read {side.folder / 'trial.log'}"
                )
            if len(_logged(side)) < 2:  # It still starts.
                began[number] = time.monotonic()
    rows = [_logged(side) for side in sides]
    for process in begun:
        process.send_signal(signal.SIGTERM)
    for process in begun:
        process.wait()
    # What is logged is the mean since the start.
    return [each[-1]["images_per_second"] for each in rows]


def _logged(side: Side) -> list[dict[str, Any]]:
    return [row for row in read_rows(str(side.folder / "trial")) if row["kind"] == "train"]


def _compare(sides: Sequence[Side], shards: str, epochs: Sequence[int]) -> list[Outcome]:
    """Train both at the same time, then evaluate both."""
    started = time.monotonic()
    trainings = [
        side.start(shards, "run", train__epochs=count, train__validate_every=count)
        for side, count in zip(sides, epochs, strict=True)
    ]
    spent = _wait(trainings, sides, "run", started)
    splits = storage.read_json(storage.join(shards, "index.json"))["splits"]
    scored = bool(splits.get("test", {}).get("samples"))
    if scored:
        _wait([side.evaluate(shards, "evaluation") for side in sides], sides, "evaluation", time.monotonic())
    outcomes = []
    for side, count, share in zip(sides, epochs, spent, strict=True):
        result = storage.read_json(str(side.folder / "run" / "result.json"))
        test = (
            storage.read_json(str(side.folder / "evaluation" / "metrics.json"))["metrics"] if scored else {}
        )
        seen = round(result["images_per_second"] * result["seconds"])
        val, test = _chosen(result["metrics"]), _chosen(test)
        counts = (count, result["steps"], seen, result["seconds"])
        outcomes.append(Outcome(side.recipe, side.changes, *counts, share, val, test))
    return outcomes


def _chosen(metrics: dict[str, float]) -> dict[str, float]:
    names = ("AP", "AP50", "AP75")
    return {name: metrics[f"coco/{name}"] for name in names if f"coco/{name}" in metrics}


def _wait(
    processes: Sequence[subprocess.Popen[bytes]], sides: Sequence[Side], name: str, started: float
) -> list[float]:
    """Wait for all; the part of a core that each had. One that fails ends the others.

    Raises:
        TrainingError: naming the file that says why.
    """
    shares: dict[int, float] = {}
    try:
        while len(shares) < len(processes):
            time.sleep(0.2)
            for number, (process, side) in enumerate(zip(processes, sides, strict=True)):
                if number in shares:
                    continue
                pid, status, usage = os.wait4(process.pid, os.WNOHANG)
                if not pid:
                    continue
                process.returncode = os.waitstatus_to_exitcode(status)
                shares[number] = (usage.ru_utime + usage.ru_stime) / (time.monotonic() - started)
                if process.returncode:
                    words = f"{name} of {side.recipe} ended with {process.returncode}"
                    raise TrainingError(words, fix=f"read {side.folder / name}.log")
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
                process.wait()
    return [shares[number] for number in range(len(processes))]


@contextmanager
def _on(core: int) -> Iterator[None]:
    """Let what is started inside run on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


if __name__ == "__main__":
    sys.exit(run(main))
