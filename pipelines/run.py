"""`kubedet run`: the pipeline on this machine, its record, and the report at its end."""

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TextIO

from pydantic import dataclasses as models

from components.hooks import FAILED, HELD_BACK, NOTHING_NEW, PASSED, Outcome
from operations import notifications
from pipelines import display
from pipelines.display import RunProgress
from pipelines.local import LocalRun, Results
from pipelines.parameters import Values, check_all
from trainer import storage
from trainer.base.errors import (
    EXIT_FAILURE,
    EXIT_RETRY,
    ConfigError,
    DamagedError,
    FormatError,
    Interrupted,
    KubedetError,
    StorageError,
    TrainingError,
    check_name,
)
from trainer.base.json_files import STRICT
from trainer.base.log import format_duration
from trainer.base.safe_text import redact
from trainer.base.temporary_folders import temporary_folder
from trainer.base.worker_pool import available_cores
from trainer.config.parsing import format_override
from trainer.evaluation.gate import check_rules, split_rules
from trainer.model import recipes
from trainer.steps import records, retrain_condition, starting_weights
from trainer.storage import outputs

_PACKAGES = ("kubedet", "torch", "torchvision", "pycocotools", "onnx", "onnxruntime")
_OUTPUT_FILES = (
    "summary.json", "log.txt", "config.json", "manifests", "train", "evaluation", "model",
)  # fmt: skip
"""The files and folders that a run writes into its folder."""


@dataclass(frozen=True)
class Options:
    """The options of `kubedet run`."""

    name: str  # Name of the run and of its folder.
    source: str = "sample"
    recipe: str = "debug"
    overrides: Mapping[str, object] = field(default_factory=dict)
    gate: str = ""
    min_new_images: int = 0
    warm_start: str = ""
    nproc: int = 2
    data_root: str = "./data_root"
    output: str = "./runs"

    @classmethod
    def make(cls, name: str, recipe: str, overrides: Mapping[str, object], **settings: Any) -> "Options":
        """Return the options of a run; the recipe may be a file, and None and "" select the defaults."""
        recipe, of_file = recipes.read_recipe(recipe)
        # On a machine without GPUs, do not import torch, which takes seconds.
        if settings["nproc"] is None and any(Path("/dev").glob("nvidia[0-9]*")):
            import torch

            settings["nproc"] = torch.cuda.device_count() or None
        settings = {key: value for key, value in settings.items() if value not in (None, "")}
        title = name or f"{recipe}-{datetime.now():%Y%m%d-%H%M%S}"
        return cls(title, recipe=recipe, overrides={**of_file, **overrides}, **settings)

    @property
    def folder(self) -> Path:
        """The absolute path of the run folder."""
        return Path(self.output).absolute() / self.name

    def command(self) -> str:
        """Return the command line that starts or continues this run."""
        words = ["kubedet", "run", "--name", self.name]
        for item in fields(self)[1:]:
            value = getattr(self, item.name)
            if item.name != "overrides" and value != item.default:
                words += [f"--{item.name.replace('_', '-')}", str(value)]
        for key, value in self.overrides.items():
            words += ["--set", format_override(key, value)]
        return shlex.join(words)

    def arguments(self) -> Values:
        """Return the parameters of the run."""
        values = {item.name: getattr(self, item.name) for item in fields(self)[1:]}
        return values | {"data_root": storage.absolute(self.data_root), "output": str(self.folder)}


@models.dataclass(config=STRICT)
class RunRecord:
    """The content of `summary.json` in a run folder; the file omits empty fields."""

    name: str
    arguments: Values  # The pipeline's parameters.
    status: str = "running"  # running, succeeded, failed or interrupted.
    started: str = ""
    ended: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    machine: Values = field(default_factory=dict)
    steps: list[Values] = field(default_factory=list)
    training: Values = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    data_warnings: list[str] = field(default_factory=list)
    gate: Values = field(default_factory=dict)
    nothing_new_since: str = ""
    """The model version since which the source has not changed, if training was therefore skipped."""
    paths: dict[str, str] = field(default_factory=dict)
    error: Values = field(default_factory=dict)  # step, message and exit_code, unless the run succeeded.
    kind: Literal["run"] = "run"
    version: Literal[1] = 1

    def write(self, folder: Path) -> None:
        """Write the record into the run folder."""
        tree = {key: value for key, value in asdict(self).items() if value}
        storage.write_json(str(folder / "summary.json"), tree, indent=2)

    def end(self, progress: RunProgress, *, stopped: bool = False, crash: str = "") -> None:
        """Record the steps and the error, if any; `crash` is an exception in this process."""
        failed = progress.failed
        done = {step.name for step in progress.steps.values() if step.state == "done"}
        # A run without an export is complete if the gate failed.
        held_back = self.gate and not self.gate["passed"]
        optional = (
            set(progress.steps) - {"download"} if progress.since else {"export"} if held_back else set()
        )
        succeeded = failed is None and not crash and set(progress.steps) - done <= optional
        interrupted = not succeeded and (stopped or (failed is not None and failed.state == "stopped"))
        self.status = "succeeded" if succeeded else "interrupted" if interrupted else "failed"
        self.ended, self.nothing_new_since = records.utc_timestamp(), progress.since
        self.steps = [
            {
                "name": step.name,
                "status": step.state,
                "seconds": round(step.seconds, 2),
                "reused": step.reused,
            }
            for step in progress.steps.values()
        ]
        if succeeded:
            return
        message, code = crash or ("stopped" if interrupted else "the run ended before a step began"), 0
        if failed is not None:
            message = failed.message or "its process ended without a message (killed, or out of memory)"
            code = failed.exit_code
        self.error = {
            "step": failed.name if failed else "",
            "message": redact(message),
            "exit_code": EXIT_RETRY if interrupted else code or EXIT_FAILURE,
        }

    def read_results(self, progress: RunProgress, folder: Path) -> None:
        """Read the results of the finished steps; files of an earlier run are not read."""
        done = {step.name for step in progress.steps.values() if step.state == "done"}
        if "train" in done:
            self.training = storage.read_json(str(folder / "train" / "result.json"))
        if "evaluate" in done:
            metrics = storage.read_json(str(folder / "evaluation" / "metrics.json"))
            self.metrics, self.data_warnings = metrics["metrics"], metrics.get("data_warnings", [])
            self.gate = storage.read_json(str(folder / "evaluation" / "gate.json"))
        outputs = {
            "checkpoint": ("train", "train/best.pt"),
            "tensorboard": ("train", "train/tensorboard"),
            "metrics": ("evaluate", "evaluation/metrics.json"),
            "report": ("evaluate", "evaluation/report.html"),
            "model": ("export", "model"),
            "summary": ("", "summary.json"),
            "log": ("", "log.txt"),
        }
        self.paths = {
            name: str(folder / path) for name, (step, path) in outputs.items() if not step or step in done
        }


def check_options(options: Options) -> None:
    """Raise an error if a run cannot work, before anything is started or written."""
    if not find_spec("torch"):  # The steps need torch: report that now, not after minutes.
        raise ModuleNotFoundError(name="torch")
    from trainer.data import sources

    def check_processes() -> None:
        if options.nproc < 1:
            raise ConfigError(f"nproc must be 1 or more, not {options.nproc}", fix="use 1")

    def check_recipe() -> None:
        config = recipes.load_with_packages(options.recipe, {**options.overrides})
        check_rules([] if options.gate else config.evaluation.gate)

    check_all(
        partial(check_name, options.name, "name"),
        check_processes,
        partial(retrain_condition.check_min_new_images, options.min_new_images),
        partial(starting_weights.check_warm_start, options.warm_start),
        partial(sources.parse, options.source),
        partial(storage.check_uri, options.data_root),
        check_recipe,
        partial(check_rules, split_rules(options.gate)),
    )


def print_report(record: RunRecord, folder: Path) -> None:
    """Print the results of a run."""
    if record.nothing_new_since:
        print(f"\nnothing new since {record.nothing_new_since}: nothing was trained")
    if record.metrics:
        metrics = json.loads((folder / "evaluation" / "metrics.json").read_text())
        table = (folder / "evaluation" / "table.txt").read_text()
        print(f"\n{metrics['images']} images of the {metrics['split']} split\n\n{table.rstrip()}")
    for warning in record.data_warnings:
        print(f"\nwarning: data: {warning}")
    training, gate = record.training, record.gate
    if training or gate:
        print()
    if training.get("images_per_second"):
        before = training.get("resumed_from") or 0
        text = (
            f"training: {training['steps'] - before} steps in {format_duration(training['seconds'])}, "
            f"{training['images_per_second']:.1f} images/s on {training['processes']} processes"
        )
        print(text + (f"; {training['steps']} steps including earlier attempts" if before else ""))
    if gate:
        print(f"gate: {'passed' if gate['passed'] else 'failed, no model was exported'}")
        print("".join(f"  {line}\n" for line in gate["reason"].splitlines()), end="")
    took = datetime.fromisoformat(record.ended) - datetime.fromisoformat(record.started)
    print(f"\nrun {record.name}: {record.status} in {format_duration(took.total_seconds())}")
    width = max(map(len, record.paths), default=0)
    for name, path in record.paths.items():
        print(f"  {name:<{width}}  {_abbreviate(path)}")
    if "model" in record.paths:
        model = shlex.quote(_abbreviate(record.paths["model"]))
        print("\nto try the model")
        print(f"  on images     kubedet predict {model} IMAGES... -o DIR")
        print(f"  in a browser  kubedet serve {model}")
    sys.stdout.flush()


def failure_error(record: RunRecord, progress: RunProgress, options: Options) -> KubedetError | None:
    """Return the error of a run that failed or was stopped; None if it succeeded."""
    error, step = record.error, progress.failed
    if record.status == "interrupted":
        place = f" in step {error['step']}" if error["step"] else ""
        return Interrupted(f"the run was stopped{place}", fix=f"to continue: {options.command()}")
    if not error:
        return None
    message, _, fix = error["message"].partition("\n  fix: ")
    lines = [f"step {step.name}: {message}" if step else message]
    if step and not step.message and (last := step.lines):
        lines += ["the last lines of its log:", *(f"  {line}" for line in last)]
    failed = TrainingError("\n".join(lines), fix=fix or f"read {options.folder / 'log.txt'}")
    failed.exit_code = int(error["exit_code"])
    return failed


def _abbreviate(path: str) -> str:
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


def run(options: Options) -> RunRecord:
    """Run the pipeline and report; raise the error of a run that failed or was stopped."""
    record, progress = execute(options)
    print_report(record, options.folder)
    if error := failure_error(record, progress, options):
        raise error
    return record


def execute(options: Options) -> tuple[RunRecord, RunProgress]:
    """Run the pipeline and show its progress, unless it has already finished with the same parameters.

    The record contains the error of a failed step.
    """
    check_options(options)
    folder = options.folder
    with _lock_folder(folder) as lock:
        outputs.claim(str(folder), _OUTPUT_FILES)
        earlier = _check_unchanged(folder, options)
        if earlier and _is_finished(earlier, options):
            print(f"run {options.name} has finished; to train again, choose another --name", flush=True)
            return earlier, RunProgress(folder / "progress.jsonl")
        storage.remove_stale(str(folder))
        versions = {"python": platform.python_version()}  # Versions that affect the results.
        for package in _PACKAGES:
            with suppress(PackageNotFoundError):  # An extra that is not installed.
                versions[package] = version(package)
        root = Path(__file__).parents[1]
        if (root / ".git").exists():
            command = ["git", "-C", str(root), "rev-parse", "HEAD"]
            with suppress(OSError, subprocess.CalledProcessError):
                commit = subprocess.run(command, check=True, capture_output=True, text=True)
                versions["commit"] = commit.stdout.strip()
        cores = available_cores()
        record = RunRecord(
            options.name,
            options.arguments(),
            started=records.utc_timestamp(),
            versions=versions,
            machine={"cores": cores, "system": platform.platform()},
        )
        record.write(folder)
        print(f"run {options.name}: recipe {options.recipe}, source {options.source}", flush=True)
        if options.nproc > cores:
            print(f"warning: {options.nproc} training processes share {cores} cores", file=sys.stderr)
        with temporary_folder() as temporary:
            progress = RunProgress(temporary / "progress.jsonl")
            stopped, crash = False, ""
            try:
                stopped = _run_steps(options, progress, temporary, lock)
            except BaseException as error:  # For example, stdout was closed.
                crash = repr(error)
                raise
            finally:  # The record must not stay at "running".
                progress.finish()
                record.read_results(progress, folder)
                record.end(progress, stopped=stopped, crash=crash)
                record.write(folder)
                if record.status == "failed":
                    message = record.error["message"]
                    notifications.notify(Outcome(FAILED, record.name, message))
        return record, progress


def _run_steps(options: Options, progress: RunProgress, temporary: Path, lock: TextIO) -> bool:
    """Run the steps, show their progress, and notify of the outcome; return whether the run was stopped."""
    folder, results = options.folder, Results()
    (folder / "manifests").mkdir(exist_ok=True)
    with (
        display.choose_display(progress) as shown,
        LocalRun(folder, progress, shown, temporary, lock) as local_run,
    ):
        results = local_run.run(options.arguments())
        progress.since = results.nothing_new.since if results.nothing_new else ""
        progress.finish()
    if outcome := _decided_outcome(options.name, results):
        notifications.notify(outcome, str(folder))
    return local_run.stopped


def _decided_outcome(run: str, results: Results) -> Outcome | None:
    """Return the outcome that the steps decided; None if the run failed or was stopped."""
    scores, bundle, ended = results.scores, results.bundle, results.nothing_new
    if ended:
        reason = f"{NOTHING_NEW} since {ended.since}: {ended.found}"
        return Outcome(NOTHING_NEW, run, reason, ended.model, ended.model_version)
    if scores and not scores.passed:
        return Outcome(HELD_BACK, run, scores.reason, scores.model, metrics=scores.defined_metrics)
    if scores and bundle:
        version = bundle.model_version
        return Outcome(PASSED, run, scores.reason, bundle.name, version, scores.defined_metrics)
    return None


def _lock_folder(folder: Path) -> TextIO:
    """Create and lock the run folder; closing the returned file releases the lock."""
    import fcntl

    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("a")
    except OSError as error:
        raise StorageError(
            f"cannot write the run folder {folder}: {error.strerror}", fix="choose another --output"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise ConfigError(
            f"a run named {folder.name!r} is in progress in {folder}",
            fix="wait until it ends, stop it, or choose another --name",
        ) from None
    return lock


def _is_finished(earlier: RunRecord, options: Options) -> bool:
    """Return whether a run has succeeded with the same parameters and its results exist."""
    if earlier.status != "succeeded" or earlier.nothing_new_since:
        return False
    same = earlier.arguments == json.loads(json.dumps(options.arguments()))
    return same and bool(earlier.paths) and all(map(os.path.exists, earlier.paths.values()))


def _check_unchanged(folder: Path, options: Options) -> RunRecord | None:
    """Return the record of an earlier run with the same name, if it has trained.

    Raises ConfigError if its settings differ, because then its checkpoint cannot be used.
    """
    path = folder / "summary.json"
    if not path.exists() or not (folder / "train").exists():
        return None  # A run that failed before training can be repeated with corrected settings.
    try:
        earlier = storage.read_model(str(path), RunRecord, "delete it")
    except (DamagedError, FormatError) as error:
        # The settings are also compared with those in the checkpoints.
        print(f"warning: {error.message}; the file is replaced", file=sys.stderr, flush=True)
        return None
    before = earlier.arguments
    changed = [
        f"  {key}: was {json.dumps(before[key])}, now {json.dumps(value)}"
        for key, value in options.arguments().items()
        if key in ("source", "recipe", "overrides", "nproc") and key in before and before[key] != value
    ]
    if changed:
        raise ConfigError(
            f"the run {folder.name!r} was started with other settings:\n" + "\n".join(changed),
            fix=f"choose another --name, use the same settings to continue, or delete {folder}",
        )
    return earlier
