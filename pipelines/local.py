"""Runs the five steps of a run as processes on this machine, one after the other."""

import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from components import environment
from components.launchers.guarded_process import GuardedProcess
from components.launchers.output import Hints
from components.launchers.process_variables import ALLOCATOR, ALLOCATORS, EXPANDABLE
from pipelines.display import Display, RunProgress
from trainer.base import events
from trainer.launching.stop_signals import STOP_SIGNALS, signal_handler
from trainer.steps import manifests
from trainer.steps.manifests import Bundle, Manifest, NothingNew, RawData, Scores, Shards, TrainedModel

# Longer than the grace period after which torchrun kills training processes.
_GRACE_SECONDS = 90.0
_TICK_SECONDS = 0.2
_STOPPING = "stopping: the running step saves what it can and ends; press Ctrl-C again to kill it"


@dataclass
class Results:
    """The manifests of the finished steps."""

    raw: RawData | None = None
    nothing_new: NothingNew | None = None
    shards: Shards | None = None
    model: TrainedModel | None = None
    scores: Scores | None = None
    bundle: Bundle | None = None


class LocalRun(AbstractContextManager["LocalRun"]):
    """Runs the steps of a run, and shows their progress."""

    def __init__(
        self, folder: Path, progress: RunProgress, display: Display, temporary: Path, lock: IO[str]
    ) -> None:
        """Store files in `folder`; child processes hold its `lock`."""
        self._folder, self._progress, self._display = folder, progress, display
        self._temporary, self._lock = temporary, lock
        self._process: GuardedProcess | None = None
        self._signals = 0
        # Handle Ctrl-C, SIGTERM and a closed terminal; Python allows handlers only in the main thread.
        is_main = threading.current_thread() is threading.main_thread()
        self._signal_handlers = signal_handler(self._stop, (*STOP_SIGNALS, signal.SIGHUP) if is_main else ())
        self._log = (folder / "log.txt").open("ab", buffering=0)

    def __enter__(self) -> "LocalRun":
        self._signal_handlers.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._signal_handlers.__exit__(*exception)
        self._log.close()

    @property
    def stopped(self) -> bool:
        """Whether the run was asked to stop."""
        return bool(self._signals)

    def run(self, request: Mapping[str, Any]) -> Results:
        """Run the steps until one fails, there is nothing new, or the gate refuses the model.

        `request` has the parameters of `kubedet run` by name.
        """
        done, name = Results(), self._folder.name
        downloaded = self._run_step(
            "download",
            "download",
            manifests.DOWNLOAD_RESULT,
            source=request["source"],
            data_root=request["data_root"],
            recipe=request["recipe"],
            overrides=request["overrides"],
            min_new_images=request["min_new_images"],
            trains=True,
            run_id=name,
        )
        if isinstance(downloaded, NothingNew):
            done.nothing_new = downloaded
            return done
        done.raw = downloaded
        if done.raw:
            done.shards = self._run_step("convert-to-shards", "shard", Shards, raw=done.raw)
        if done.shards:
            done.model = self._run_step(
                "train",
                "train",
                TrainedModel,
                shards=done.shards,
                output=str(self._folder),
                nproc=request["nproc"],
                rules=request["gate"],
                warm_start=request["warm_start"],
                run_id=name,
            )
        if done.model:
            rules = request["gate"]
            done.scores = self._run_step("evaluate", "evaluate", Scores, model=done.model, rules=rules)
        if done.model and done.scores and done.scores.passed:
            done.bundle = self._run_step("export", "export", Bundle, model=done.model)
        return done

    def _run_step(self, name: str, verb: str, kind: Any, **arguments: Any) -> Any:
        """Run one step; return its manifest, or None if it failed or the run was stopped."""
        if self.stopped:
            return None
        given = {
            key: value.model_dump(mode="json") if isinstance(value, Manifest) else value
            for key, value in arguments.items()
        }
        (request := self._temporary / f"{name}.json").write_text(json.dumps(given))
        output = self._folder / "manifests" / f"{name}.json"
        command = [sys.executable, "-m", "trainer", "step", verb]
        command += ["--input", str(request), "--output", str(output)]
        output.unlink(missing_ok=True)  # Manifest of an earlier attempt.
        self._progress.begin(name)
        with GuardedProcess(
            command, env=self._environment(), grace_seconds=_GRACE_SECONDS, keep_open=[self._lock.fileno()]
        ) as self._process:
            if self.stopped:  # Stopped while the process was started.
                self._process.stop()
            self._show_output(self._process)
            code = self._process.wait()
        self._process = None
        self._progress.end(name, code, stopped=self.stopped)
        self._write_log(self._progress.steps[name].message)
        self._display.refresh_display()
        return None if code else manifests.read(output, kind)

    def _environment(self) -> dict[str, str]:
        defaults = {
            "OMP_WAIT_POLICY": "PASSIVE",  # Spinning threads halve the speed if other programs run.
            "LOGLEVEL": "ERROR",  # For torchrun, which otherwise warns about every stop.
        }
        defaults |= {} if ALLOCATORS & os.environ.keys() else {ALLOCATOR: EXPANDABLE}
        return {
            **defaults,
            **os.environ,
            environment.RUN_ID: self._folder.name,
            events.FILE: str(self._progress.events),
            "PYTHONUNBUFFERED": "1",  # Otherwise a step's output arrives only at its end.
            "TMPDIR": str(self._temporary),
        }

    def _show_output(self, process: GuardedProcess) -> None:
        """Show the output and the progress of a process until it ends."""
        lines: queue.Queue[str | None] = queue.Queue()

        def read() -> None:
            for line in process.lines():
                lines.put(line)
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        hints, shown_signals = Hints(rdma=False, pods=False), 0
        while True:
            with suppress(queue.Empty):
                line = lines.get(timeout=_TICK_SECONDS)
                if line is None:
                    return
                self._write_log(line)
                self._progress.add_line(line)
                if line.strip():
                    self._display.show_line(line)
                if hint := hints.find_new(line):
                    self._display.show_line(f"hint: {hint}")
            if self._signals > shown_signals:
                shown_signals = self._signals
                self._display.show_line(_STOPPING if shown_signals == 1 else "killing what still runs")
            self._progress.read_events()
            self._display.refresh_display()

    def _write_log(self, text: str) -> None:
        with suppress(OSError):  # A full disk ends the log, not the run.
            if text:
                self._log.write(f"{text}\n".encode())

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._process:
            self._process.stop()
