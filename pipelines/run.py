"""`kubedet run`: the pipeline on this machine, its record, and what is printed about it."""

import fcntl
import json
import os
import platform
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Any

from components import environment, run_plan, starting_weights
from components.launchers.guarded_process import GuardedProcess
from operations import costs, retrain_condition, tuning
from operations.costs import Costs
from pipelines import checks, display, parameters
from pipelines.display import RunProgress
from pipelines.tables import columns
from trainer import storage
from trainer.base import log
from trainer.base.errors import EXIT_FAILURE, EXIT_RETRY, ConfigError, DamagedError, FormError, StorageError
from trainer.base.log import clock
from trainer.base.safe_text import redacted
from trainer.base.temporary_folders import temporary_folder
from trainer.config.parsing import parse_value
from trainer.data import sources
from trainer.evaluation.gate import parse, split_rules
from trainer.launching.stop_signals import ENDING, handling
from trainer.model import recipes

_PACKAGES = ("kubedet", "torch", "torchvision", "kfp", "pycocotools", "onnx", "onnxruntime")
# Longer than a training launcher's own patience: it kills what does not stop, then says so.
_GRACE_SECONDS = 90.0
_TICK_SECONDS = 0.2
_STOPPING = "stopping: the running step saves what it can and ends; Ctrl-C again kills it"


@dataclass(frozen=True)
class Options:
    """What `kubedet run` was asked for."""

    name: str
    """Name of the run and of its folder."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the pipeline, of those in `parameters.LOCAL`; what is not named has its default there."""
    verbose: bool = False
    """Show the local runner's own log too."""
    prices: str = ""
    """Absolute URI of a file of prices; empty is the data root's own."""

    def __getitem__(self, name: str) -> Any:
        """Return a parameter's value, given or not."""
        return self.given.get(name, parameters.LOCAL[name].default)

    @property
    def folder(self) -> Path:
        """The run's folder, absolute."""
        return Path(self["output"]).absolute() / self.name

    def command(self) -> str:
        """Return the command line that starts this run, or goes on with it."""
        words = [program(), "run", "--name", self.name]
        for name, item in parameters.LOCAL.items():
            if name != "overrides" and self[name] != item.default:
                words += [item.option, str(self[name])]
        words += ["--prices", self.prices] if self.prices else []
        for key, value in self["overrides"].items():
            plain = isinstance(value, str) and parse_value(value) == value
            words += ["--set", f"{key}={value if plain else json.dumps(value)}"]
        return shlex.join(words)

    def arguments(self) -> dict[str, Any]:
        """Return the pipeline's parameters."""
        values = {name: self[name] for name in parameters.LOCAL}
        folders = {"data_root": storage.absolute(self["data_root"]), "output": str(self.folder)}
        retrain_condition.of_form(values)
        return values | folders | {"nodes": 1, "launcher": "local"}


def check(options: Options) -> None:
    """Refuse what cannot run before anything is started or written.

    Raises:
        ConfigError: naming every name, source, recipe, key, value, rule and number that cannot be used.
    """

    def processes() -> None:
        if options["nproc"] < 1:
            raise ConfigError(f"--nproc must be 1 or more, not {options['nproc']}", fix="use --nproc 1")

    def gate_of_recipe() -> None:
        config = recipes.load_here(options["recipe"], options["overrides"])
        for rule in [] if options["gate"] else config.evaluation.gate:
            parse(rule)

    checks.make_all(
        [
            partial(tuning.check_name, options.name),
            processes,
            retrain_condition.Condition(options["min_new_images"], options["min_drift"]).check,
            partial(starting_weights.check_warm_start, options["warm_start"]),
            partial(sources.parse, options["source"]),
            partial(storage.check_place, options["data_root"]),
            gate_of_recipe,
            *(partial(parse, rule) for rule in split_rules(options["gate"])),
        ]
    )


def begin(arguments: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the record of a run that begins now: `summary.json` in its folder."""
    return {
        "kind": "run",
        "version": 1,
        "name": name,
        "status": "running",
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "arguments": arguments,
        "versions": _versions(),
        "machine": {"cores": len(os.sched_getaffinity(0)), "system": platform.platform()},
    }


def complete(
    record: dict[str, Any], progress: RunProgress, folder: Path, *, stopped: bool = False, broken: str = "",
    used: Costs | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Add to a run's record how it ended and what it made.

    Args:
        record: what `begin` returned.
        progress: the state of the run's steps.
        folder: the run's folder.
        stopped: it was asked to stop.
        broken: what ended the process that watched it, if anything did.
        used: what its steps used.

    Returns:
        The record with `status` succeeded, failed or interrupted, `error` if it did not
        succeed, and what the finished steps reported.
    """
    failed = progress.failed
    done = {step.name for step in progress.steps.values() if step.state == "done"}
    ended = _results(folder, done)
    # Without an export the run is complete if the gate held it back.
    held_back = "gate" in ended and not ended["gate"]["passed"]
    may_be_skipped = {"train", "evaluate", "export"} if progress.since else {"export"} if held_back else set()
    succeeded = failed is None and not broken and set(progress.steps) - done <= may_be_skipped
    interrupted = not succeeded and (stopped or (failed is not None and failed.state == "stopped"))
    ended |= {
        "status": "succeeded" if succeeded else "interrupted" if interrupted else "failed",
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "steps": [
            {"name": step.name, "status": step.state, "seconds": round(step.seconds, 2),
             "reused": step.reused}
            for step in progress.steps.values()
        ],
    }  # fmt: skip
    if used:
        ended["used"] = used.fields()
    if progress.since:
        ended["nothing_new_since"] = progress.since
    if not succeeded:
        message, code = broken or ("stopped" if interrupted else "the pipeline ended before a step began"), 0
        if failed is not None:
            message = failed.message or "its process ended without a message (killed, or out of memory)"
            code = failed.exit_code
        ended["error"] = {
            "step": failed.name if failed else "",
            "message": redacted(message),
            "exit_code": EXIT_RETRY if interrupted else code or EXIT_FAILURE,
        }
    return record | ended


def _results(folder: Path, done: set[str]) -> dict[str, Any]:
    """Return what the finished steps wrote, and where; an earlier run's files are not read."""
    results: dict[str, Any] = {}
    if "train" in done:
        results["training"] = storage.read_json(str(folder / "train" / "result.json"))
        plan = str(folder / run_plan.FILE)
        results |= {"plan": storage.read_json(plan)} if storage.exists(plan) else {}
    if "evaluate" in done:
        metrics = storage.read_json(str(folder / "evaluation" / "metrics.json"))
        results["metrics"] = metrics["metrics"]
        results["data_warnings"] = metrics.get("data_warnings", [])
        results["gate"] = storage.read_json(str(folder / "evaluation" / "gate.json"))
    outputs = {
        "checkpoint": ("train", "train/best.pt"),
        "tensorboard": ("train", "train/tensorboard"),
        "metrics": ("evaluate", "evaluation/metrics.json"),
        "report": ("evaluate", "evaluation/report.html"),
        "model": ("export", "model"),
        "summary": ("", "summary.json"),
        "log": ("", "log.txt"),
    }
    paths = {what: str(folder / path) for what, (step, path) in outputs.items() if not step or step in done}
    return results | {"paths": paths}


def _versions() -> dict[str, str]:
    """Return the versions that decide on a result, and the commit if the code is a checkout."""
    installed = {"python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):  # An extra that is not installed.
            installed[package] = version(package)
    root, git = Path(__file__).parents[1], shutil.which("git")
    if git and (root / ".git").exists():
        command = [git, "-C", str(root), "rev-parse", "HEAD"]
        commit = subprocess.run(command, check=False, capture_output=True, text=True)
        if commit.returncode == 0:
            installed["commit"] = commit.stdout.strip()
    return installed


def report(
    record: dict[str, Any], progress: RunProgress, folder: Path, *, again: str, used: Costs | None = None
) -> None:
    """Print how a run went, from its whole record: results on stdout, what went wrong on stderr.

    `again` is the command line that goes on with the run, `used` what its steps used.
    """
    if used:
        print(f"\nwhat it used\n{used.text()}")
    _print_results(record, folder)
    took = datetime.fromisoformat(record["ended"]) - datetime.fromisoformat(record["started"])
    print(f"\nrun {record['name']}: {record['status']} in {clock(took.total_seconds())}")
    print(columns([(f"  {what}", _short(path)) for what, path in record["paths"].items()]))
    if "model" in record["paths"]:
        model = shlex.quote(_short(record["paths"]["model"]))
        print("\ntry the model")
        print(f"  on images     {program()} predict {model} IMAGES... -o DIR")
        print(f"  in a browser  {program()} serve {model}")
    sys.stdout.flush()
    if "error" in record:
        print("\n" + _failure(record, progress, again), file=sys.stderr)


def program() -> str:
    """Return how a person calls this program: by its name, or by its path if the name is not found."""
    called = Path(sys.argv[0])
    if called.name != "kubedet" or shutil.which("kubedet"):
        return "kubedet"
    return _short(str(called.absolute()))


def _print_results(record: dict[str, Any], folder: Path) -> None:
    if "nothing_new_since" in record:
        print(f"\nnothing new since {record['nothing_new_since']}: nothing was trained")
    if "metrics" in record:
        metrics = json.loads((folder / "evaluation" / "metrics.json").read_text())
        table = (folder / "evaluation" / "table.txt").read_text()
        print(f"\n{metrics['images']} images of the {metrics['split']} split\n\n{table.rstrip()}")
    for warning in record.get("data_warnings", []):
        print(f"\nwarning: data: {warning}")
    if "training" in record or "gate" in record:
        print()
    training = record.get("training", {})
    if training.get("images_per_second"):
        before = training.get("resumed_from") or 0
        did = (
            f"{training['steps'] - before} steps in {clock(training['seconds'])}, "
            f"{training['images_per_second']:.1f} images/s on {training['processes']} processes"
        )
        print(
            f"training: {did}" + (f"; with the {before} before {training['steps']} in all" if before else "")
        )
        if training.get("advice"):
            print(f"  warning: {training['advice']}")
    if "gate" in record:
        gate = record["gate"]
        print(f"gate: {'passed' if gate['passed'] else 'failed, no model was exported'}")
        print("".join(f"  {line}\n" for line in gate["reason"].splitlines()), end="")


def _failure(record: dict[str, Any], progress: RunProgress, again: str) -> str:
    error, step = record["error"], progress.failed
    if record["status"] == "interrupted":
        at = f" in step {error['step']}" if error["step"] else ""
        return f"interrupted{at}; to go on with it:\n  {again}"
    head = f"error in step {step.name}: {error['message']}" if step else f"error: {error['message']}"
    lines = list(step.lines if step else progress.outside)
    if (step and step.known) or not lines:
        return head
    return "\n".join([head, "the last lines of its log:", *(f"  {line}" for line in lines)])


def _short(path: str) -> str:
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


def run(options: Options) -> int:
    """Run the pipeline and tell how it went, on stdout and in the run's folder.

    Returns:
        Exit code: 0 (also where the gate held the export back), the failing step's, or 143
        where it was stopped and goes on when it is run again.

    Raises:
        ConfigError: the options cannot be used, or another run of that name is going on.
        StorageError: the run's folder cannot be written.
    """
    check(options)
    folder = options.folder
    with _locked(folder) as lock:
        _check_same(folder, options)
        storage.remove_stale(str(folder))
        record = begin(options.arguments(), options.name)
        _write(folder, record)
        print(f"run {options.name}: recipe {options['recipe']}, source {options['source']}", flush=True)
        _warn_of_processes(options["nproc"])
        with temporary_folder() as temporary:
            progress = RunProgress(temporary / "progress.jsonl")
            try:
                stopped = _execute(options, progress, temporary, lock)
            except BaseException as error:  # E.g. stdout was closed. The record must not stay at "running".
                progress.finish()
                record = complete(record, progress, folder, broken=repr(error))
                _write(folder, record)
                _tell_of_failure(record)
                raise
        used = costs.of_run(record["arguments"]["data_root"], options.name)
        record = complete(record, progress, folder, stopped=stopped, used=used)
        _write(folder, record)
        report(record, progress, folder, again=options.command(), used=used)
        _tell_of_failure(record)
        return record["error"]["exit_code"] if "error" in record else 0


def _tell_of_failure(record: dict[str, Any]) -> None:
    """Tell the webhook, if there is one. Of one that was interrupted, whoever did it knows."""
    if record["status"] == "failed":
        from operations import notifications

        notifications.tell(
            notifications.Notice(notifications.FAILED, record["name"], record["error"]["message"])
        )


def _warn_of_processes(count: int) -> None:
    cores = len(os.sched_getaffinity(0))
    if count > cores:
        print(f"warning: {count} training processes share {cores} cores", file=sys.stderr, flush=True)


def _write(folder: Path, record: dict[str, Any]) -> None:
    storage.write_json(str(folder / "summary.json"), record, indent=2)  # Indented: people read it too.


def _execute(options: Options, progress: RunProgress, temporary: Path, lock: int) -> bool:
    """Start the local runner, show what it does until it has ended; return whether it was stopped."""
    folder = options.folder
    artifacts = folder / "artifacts"
    shutil.rmtree(artifacts, ignore_errors=True)  # An earlier run's, which this one makes anew.
    file, arguments = str(folder / "pipeline.yaml"), json.dumps(options.arguments())
    command = [sys.executable, "-m", "pipelines.local", file, str(artifacts), arguments]
    env = {
        **os.environ,
        environment.RUN_ID: options.name,
        log.PROGRESS_FILE: str(temporary / "progress.jsonl"),
        "PYTHONUNBUFFERED": "1",  # Else a step's lines come when it has ended.
        "TMPDIR": str(temporary),  # The runner leaves a folder a step behind.
    }
    with (
        GuardedProcess(command, env=env, grace_seconds=_GRACE_SECONDS, keep_open=[lock]) as process,
        _stopping(process) as stopped,
        closing(_LogFile(folder / "log.txt")) as log_file,
        display.choose(progress) as shown,
    ):
        shown_signals = 0
        for line in _timed_lines(process):
            if len(stopped) > shown_signals:
                shown_signals, progress.stopping = len(stopped), True
                shown.line(_STOPPING if shown_signals == 1 else "killing what still runs")
            if line is not None:
                log_file.write(line)
                step_line = progress.read_line(line)
                text = line if options.verbose else step_line
                if text is not None:
                    shown.line(text)
            progress.read_events()
            shown.tick()
        process.wait()
        progress.stopping = bool(stopped)
        progress.finish()
    return bool(stopped)


def _timed_lines(process: GuardedProcess) -> Iterator[str | None]:
    """Yield the process's lines as they come, and None when a moment passes without one."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in process.lines():
            lines.put(line)
        lines.put(None)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    while True:
        try:
            line = lines.get(timeout=_TICK_SECONDS)
        except queue.Empty:
            yield None
            continue
        if line is None:
            return
        yield line


@contextmanager
def _stopping(process: GuardedProcess) -> Iterator[list[int]]:
    """Stop the process on Ctrl-C, SIGTERM or a closed terminal; yields the list that takes the signals."""
    stopped: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        stopped.append(number)
        process.stop()

    with handling(handle, (*ENDING, signal.SIGHUP)):
        yield stopped


class _LogFile:
    """Everything the runner and the steps print. A full disk costs the log, not the run."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("a")
        self.write(f"--- {datetime.now(UTC).isoformat(timespec='seconds')}")

    def write(self, line: str) -> None:
        if self._file.closed:
            return
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            print(f"warning: {self._path} ends here: {error.strerror}", file=sys.stderr)
            with suppress(OSError):
                self._file.close()

    def close(self) -> None:
        self._file.close()


@contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """Make the run's folder and hold its lock; yields the lock's descriptor."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise StorageError(
            f"cannot write the run's folder {folder}: {error.strerror}", fix="choose another --output"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ConfigError(
            f"a run named {folder.name!r} is going on in {folder}",
            fix="wait for its end, stop it, or choose another --name",
        ) from None
    try:
        yield lock
    finally:
        os.close(lock)


def _check_same(folder: Path, options: Options) -> None:
    """Refuse to go on with a run under other settings: its checkpoint would not fit, or would mislead."""
    path = folder / "summary.json"
    if not path.exists() or not (folder / "train").exists():
        return  # A mistake that ended it before the training may be mended under the same name.
    form = storage.Form("run", 1, {"arguments?": {}})
    try:
        before = storage.read_json(str(path), form).get("arguments", {})
    except (DamagedError, FormError) as error:
        # No dead end: what must not change is in the checkpoints, too, which compare it themselves.
        print(f"warning: {error.message}; it is written anew", file=sys.stderr, flush=True)
        return
    changed = [
        f"  {key}: was {json.dumps(before[key])}, now {json.dumps(value)}"
        for key, value in options.arguments().items()
        if key in ("source", "recipe", "overrides", "nproc") and key in before and before[key] != value
    ]
    if changed:
        raise ConfigError(
            f"the run {folder.name!r} was begun with other settings:\n" + "\n".join(changed),
            fix=f"choose another --name, or give the same settings to go on, or delete {folder}",
        )
