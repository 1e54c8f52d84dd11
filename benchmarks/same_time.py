"""What two recipes learn in the same time: trained side by side, each on a processor core of its own.

    python -m benchmarks.same_time --output compared          # dfine_small against small, on the sample
    python -m benchmarks.same_time --source voc:PATH --image-size 320 --seconds 1200 --output compared
    python -m benchmarks.same_time --second small --second-set "train.lr=1e-3" --output compared

Both first train for `--trial` seconds, from which follows how many epochs fit into `--seconds`: so each
learning rate comes down in the time that there is. Then both train at the same time, from random weights,
one thread each, with one validation, at the end, and are evaluated on the test split. `ratio` is the AP of
the second over that of the first, on validation. All of it stays in `--output`: shards, runs, evaluations,
`results.json` and `table.md`. On a machine with other work `of a core` says what each had of its own.
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
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.common import arguments, device_name, report, run
from trainer import storage
from trainer.base.errors import ConfigError, TrainingError
from trainer.config.parsing import parse_overrides, to_json
from trainer.config.schema import Config
from trainer.data.download import download
from trainer.data.shards import shard
from trainer.model import recipes
from trainer.trackers.training_log import read_rows

_ENDLESS = 100_000
"""Epochs of a trial: its learning rate hardly moves, and it is stopped."""
_LATE = 0.1
"""Share of the time by which two trainings may end apart before it is told."""


@dataclass(frozen=True)
class Outcome:
    """What came of one recipe."""

    recipe: str
    changes: str
    epochs: int
    steps: int
    images_seen: int
    seconds: float
    """Of the training by the clock, its validation included."""
    of_a_core: float
    """Processor time of the training's process, start and end included, over its time by the clock."""
    val: dict[str, float]
    """Metrics on the validation split."""
    test: dict[str, float]
    """The same on the test split, or empty where there is none."""


class Side:
    """One of both: its recipe, its core and its folder."""

    def __init__(self, recipe: str, changes: str, core: int, folder: Path, common: dict[str, Any]) -> None:
        self.recipe, self.changes, self._core, self.folder = recipe, changes, core, folder
        self._overrides = {**common, **parse_overrides(changes.split(), "--first-set, --second-set")}
        folder.mkdir()
        self.config = self._config({})

    def _config(self, more: dict[str, Any]) -> Config:
        return recipes.load(self.recipe, {**self._overrides, **more})

    def start(self, shards: str, output: str, **more: Any) -> subprocess.Popen[bytes]:
        """Start a training on this side's core; its words go to a file beside its folder."""
        path = self.folder / f"{output}.json"
        path.write_text(to_json(self._config({key.replace("__", "."): value for key, value in more.items()})))
        words = ["train", "--config", str(path), "--shards", shards, "--output", str(self.folder / output)]
        return self._run(output, words)

    def evaluate(self, shards: str, name: str) -> subprocess.Popen[bytes]:
        """Start the evaluation of what was trained."""
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
    loads = [os.getloadavg()[0]]
    rates = _trial(sides, shards, options.trial)
    train = storage.read_json(storage.join(shards, "index.json"))["splits"]["train"]["samples"]
    epochs = [max(1, int(options.seconds * rate / train)) for rate in rates]
    outcomes = _compare(sides, shards, epochs)
    loads.append(os.getloadavg()[0])
    _write(
        folder,
        options.source,
        options.image_size,
        options.seconds,
        outcomes,
        loads,
        device_name(options.device),
    )
    _tell(outcomes, options)


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


def _write(
    folder: Path, source: str, size: int, seconds: int, outcomes: Sequence[Outcome], loads: Sequence[float],
    machine: str,
) -> None:  # fmt: skip
    """Write results.json and table.md."""
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    described = {
        "date": date, "machine": machine, "load": [round(load, 2) for load in loads], "source": source,
        "image_size": size, "seconds": seconds, "outcomes": [asdict(one) for one in outcomes],
        "command": " ".join(["python", "-m", "benchmarks.same_time", *sys.argv[1:]]),
    }  # fmt: skip
    (folder / "results.json").write_text(json.dumps(described, indent=2) + "\n")
    lines = [
        f"{date}, {machine}, a core for each, a load of {loads[0]:.1f} before and {loads[1]:.1f} after: "
        f"`{source}` at {size} px, {seconds} s",
        "",
        "| recipe | images seen | epochs | seconds | of a core | val: AP, AP50, AP75 | test: the same |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in outcomes:
        name = f"`{one.recipe}`" + (f" `{one.changes}`" if one.changes else "")
        scores = (", ".join(f"{value:.3f}" for value in each.values()) or "-" for each in (one.val, one.test))
        lines.append(
            f"| {name} | {one.images_seen} | {one.epochs} | {one.seconds:.0f} | {one.of_a_core:.2f} | "
            + " | ".join(scores) + " |"
        )  # fmt: skip
    (folder / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def _tell(outcomes: Sequence[Outcome], options: Any) -> None:
    """Say what was unequal, and print the result."""
    first, second = outcomes
    if abs(first.seconds - second.seconds) > _LATE * max(first.seconds, second.seconds):
        print(
            f"not the same time: {first.seconds:.0f} and {second.seconds:.0f} s; a longer --trial, or "
            "more --seconds, brings them together"
        )
    figures: dict[str, Any] = {}
    for name, one in (("first", first), ("second", second)):
        figures |= {
            f"{name}_{key}": value for key, value in asdict(one).items() if not isinstance(value, dict)
        }
        figures |= {f"{name}_val_{key}": value for key, value in one.val.items()}
        figures |= {f"{name}_test_{key}": value for key, value in one.test.items()}
    if not first.val.get("AP"):
        raise TrainingError(
            f"{first.recipe} has learnt nothing in so short a time", fix="give it more --seconds"
        )
    report("same_time", second.val["AP"] / first.val["AP"], figures, options)


if __name__ == "__main__":
    sys.exit(run(main))
