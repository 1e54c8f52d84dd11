"""`kubedet run`: the pipeline on this machine, watched from a process that starts and stops it."""

import fcntl
import json
import os
import queue
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import IO, Any

from components import costs, run_ids
from components.launchers.guarded_process import GuardedProcess
from pipelines import display, run_report, summary
from pipelines.options import Options, check
from pipelines.run_progress import RunProgress
from trainer import storage
from trainer.base import log
from trainer.base.errors import ConfigError, DamagedError, FormError, StorageError
from trainer.base.temporary_folders import temporary_folder
from trainer.launching.stop_signals import ENDING, handling

# Longer than a training launcher's own patience: it kills what does not stop, then says so.
_GRACE_SECONDS = 90.0
_TICK_SECONDS = 0.2
_STOPPING = "stopping: the running step saves what it can and ends; Ctrl-C again kills it"


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
        record = summary.begin(options.arguments(), options.name)
        _write(folder, record)
        print(f"run {options.name}: recipe {options['recipe']}, source {options['source']}", flush=True)
        _warn_of_processes(options["nproc"])
        with temporary_folder() as temporary:
            progress = RunProgress(temporary / "progress.jsonl")
            try:
                stopped = _execute(options, progress, temporary, lock)
            except BaseException as error:  # E.g. stdout was closed. The record must not stay at "running".
                progress.finish()
                record = summary.complete(record, progress, folder, broken=repr(error))
                _write(folder, record)
                _tell_of_failure(record)
                raise
        used = costs.of_run(record["arguments"]["data_root"], options.name)
        record = summary.complete(record, progress, folder, stopped=stopped, used=used)
        _write(folder, record)
        run_report.report(record, progress, folder, again=options.command(), used=used)
        _tell_of_failure(record)
        return run_report.exit_code(record)


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
    # Indented: people read it too.
    storage.write_json(str(folder / "summary.json"), record, indent=2)


def _execute(options: Options, progress: RunProgress, temporary: Path, lock: int) -> bool:
    """Start the local runner, show what it does until it has ended; return whether it was stopped."""
    folder = options.folder
    artifacts = folder / "artifacts"
    shutil.rmtree(artifacts, ignore_errors=True)  # An earlier run's, which this one makes anew.
    file, arguments = str(folder / "pipeline.yaml"), json.dumps(options.arguments())
    command = [sys.executable, "-m", "pipelines.local", file, str(artifacts), arguments]
    env = {
        **os.environ,
        run_ids.VARIABLE: options.name,
        log.PROGRESS_FILE: str(temporary / "progress.jsonl"),
        "PYTHONUNBUFFERED": "1",  # Else a step's lines come when it has ended.
        "TMPDIR": str(temporary),  # The runner leaves a folder a step behind.
    }
    with (
        GuardedProcess(command, env=env, grace_seconds=_GRACE_SECONDS, keep_open=[lock]) as process,
        _stopping(process) as stopped,
        _LogFile(folder / "log.txt") as log_file,
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
        self._path = path
        self._file: IO[str] | None = None

    def __enter__(self) -> "_LogFile":
        self._file = self._path.open("a")
        self.write(f"--- {datetime.now(UTC).isoformat(timespec='seconds')}")
        return self

    def write(self, line: str) -> None:
        if self._file is None:
            return
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            print(f"warning: {self._path} ends here: {error.strerror}", file=sys.stderr)
            self._file = None

    def __exit__(self, *exception: Any) -> None:
        if self._file is not None:
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
