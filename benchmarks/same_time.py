"""What recipes learn from scratch in the same CPU time.

    python -m benchmarks.same_time --output compared            # small and dfine_small on the sample
    python -m benchmarks.same_time --source voc:PATH --seconds 1200 --output compared
    python -m benchmarks.same_time --sides "small; dfine_small train.lr=1e-3 @ ../older" --output compared

A side is a recipe, its overrides and, after an @, another checkout of the project. A trial measures the CPU
time of an epoch and so how many fit into `--seconds`: each learning rate schedule ends in time. Then every
side trains with every seed in one thread, with one final validation, and is evaluated on the test split.
`ratio` is the mean AP of the last side over that of the first. Shards, runs and evaluations stay in
`--output`; what is finished there is not repeated.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import arguments, report, run
from trainer import storage
from trainer.base.errors import ConfigError, TrainingError
from trainer.trackers.training_log import read_rows

_TICK = os.sysconf("SC_CLK_TCK")
_WARM_UP, _STEPS = 5, 25
"""Steps of a trial that are not measured and that are."""


@dataclass(frozen=True)
class Side:
    """A recipe with overrides, in a checkout of the project."""

    recipe: str
    overrides: tuple[str, ...]
    checkout: Path
    folder: Path

    def start(self, verb: str, *words: str, log: str) -> subprocess.Popen[bytes]:
        """Start a verb of `python -m trainer` in one thread; its output goes to a file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{log}.log").open("wb") as file:
            return subprocess.Popen(
                [sys.executable, "-m", "trainer", verb, "--recipe", self.recipe, *self._set(), *words],
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=self.checkout,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(self.checkout)},
            )

    def finish(self, verb: str, *words: str, log: str) -> float:
        """Run a verb to its end and return its CPU seconds.

        Raises:
            TrainingError: it failed; the message names its output.
        """
        process = self.start(verb, *words, log=log)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise TrainingError(
                f"{verb} ended with {process.returncode}", fix=f"read {self.folder / log}.log"
            )
        return usage.ru_utime + usage.ru_stime

    def shards(self, source: str) -> str:
        """Prepare the data as this checkout does and return the folder of the shards."""
        root = self.folder.parent / f"data-{self.checkout.name}"
        for verb, of in (("download", "raw"), ("shard", "shards")):
            if not any(root.glob(f"{of}/*")):
                first = ["--source", source] if of == "raw" else ["--raw", str(next(root.glob("raw/*")))]
                self.finish(verb, *first, "--data-root", str(root), log=verb)
        return str(next(root.glob("shards/*")))

    def epoch_seconds(self, shards: str) -> float:
        """CPU seconds of an epoch."""
        output = self.folder / "trial"
        endless = (
            "train.epochs=100000",
            "train.validate_every=100000",
            "train.minutes=0",
            "train.log_every=1",
        )
        process = self.start(
            "train", "--shards", shards, "--output", str(output), *_set(*endless), log="trial"
        )
        try:
            before, begun = self._reached(process, output, _WARM_UP)
            after, ended = self._reached(process, output, _WARM_UP + _STEPS)
        finally:
            process.kill()
            process.wait()
        return (after - before) / (ended - begun)

    def _reached(self, process: subprocess.Popen[bytes], output: Path, step: int) -> tuple[float, float]:
        """CPU seconds of the process when it has logged that step or a later one, and its epoch then."""
        while True:
            last = max(read_rows(str(output)), key=lambda row: row["step"], default={"step": 0})
            if last["step"] >= step:
                fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
                return (int(fields[11]) + int(fields[12])) / _TICK, last["epoch"]
            if process.poll() is not None:
                fix = f"read {self.folder / 'trial.log'}"
                raise TrainingError(f"the trial of {self.recipe} ended", fix=fix)
            time.sleep(0.1)

    def _set(self) -> list[str]:
        return _set(*self.overrides)


def _set(*overrides: str) -> list[str]:
    return [word for each in overrides for word in ("--set", each)]


def main() -> None:
    """Try, train, evaluate and tabulate."""
    options = arguments(
        __doc__,
        source="sample:images=400,seed=3,size=320",
        sides="small; dfine_small",
        image_size=320,
        seconds=600,
        seeds=3,
        output="compared",
    )
    folder = Path(options.output).absolute()
    rows: list[dict[str, Any]] = []
    for number, text in enumerate(options.sides.split(";")):
        words, _, checkout = text.partition("@")
        if not words.split():
            raise ConfigError(f"side {number + 1} of --sides is empty", fix="write recipes separated by ;")
        recipe, *overrides = words.split()
        common = (f"loader.image_size={options.image_size}", "loader.workers=1", *overrides)
        side = Side(recipe, common, Path(checkout.strip() or ".").absolute(), folder / f"side{number}")
        rows.append({"side": text.strip(), **results(side, options.source, options.seconds, options.seeds)})
        print(json.dumps(rows[-1]), flush=True)
    figures = {
        f"side{number}_{name}": value for number, row in enumerate(rows) for name, value in row.items()
    }
    if not rows[0]["AP"]:
        raise TrainingError(
            f"{rows[0]['side']} has learnt nothing in so short a time", fix="give it more --seconds"
        )
    report("same_time", rows[-1]["AP"] / rows[0]["AP"], figures, options)


def results(side: Side, source: str, seconds: float, seeds: int) -> dict[str, Any]:
    """Epochs; per seed CPU seconds of the training, AP and AP50 on the test split; their means."""
    shards = side.shards(source)
    plan = side.folder / "plan.json"
    if not plan.exists():
        epochs = max(1, round(seconds / side.epoch_seconds(shards)))
        plan.write_text(json.dumps({"epochs": epochs}))
    epochs = json.loads(plan.read_text())["epochs"]
    results = [_result(side, shards, epochs, seed) for seed in range(seeds)]
    columns = {name: [one[name] for one in results] for name in ("cpu_seconds", "AP", "AP50")}
    means = {name: statistics.mean(values) for name, values in columns.items()}
    return {"epochs": epochs, **means, **{f"{name}_seeds": values for name, values in columns.items()}}


def _result(side: Side, shards: str, epochs: int, seed: int) -> dict[str, float]:
    path = side.folder / f"seed{seed}.json"
    if not path.exists():
        output = side.folder / f"seed{seed}"
        once = _set(
            f"train.epochs={epochs}",
            f"train.validate_every={epochs}",
            f"train.seed={seed}",
            "train.minutes=0",
        )
        common = ["--shards", shards, *once]
        spent = side.finish("train", *common, "--output", str(output), log=f"train{seed}")
        words = ["--checkpoint", str(output / "best.pt"), *common, "--output", str(output / "evaluation")]
        side.finish("evaluate", *words, log=f"evaluate{seed}")
        metrics = storage.read_json(str(output / "evaluation" / "metrics.json"))["metrics"]
        result = {"cpu_seconds": spent, **{name: metrics[f"coco/{name}"] for name in ("AP", "AP50")}}
        path.write_text(json.dumps(result))
    result = json.loads(path.read_text())
    return result


if __name__ == "__main__":
    sys.exit(run(main))
