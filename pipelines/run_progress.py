"""Follows a running pipeline: what its steps print and report, and how far they are.

The local runner mixes its own log with the steps' output on one stream, without the steps'
exit codes. What is needed beyond that (progress, errors) the steps append to a file.
"""

import json
import re
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from components.hooks import NOTHING_NEW
from components.steps import FINISHED, STARTED
from pipelines import TITLES
from trainer.base.errors import EXIT_RETRY

State = Literal["waiting", "running", "done", "failed", "stopped", "skipped"]

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_TASK_STARTS = re.compile(r" - INFO - Executing task '([\w-]+)'")
_TASK_ENDS = re.compile(r" - (?:INFO|ERROR) - Task '([\w-]+)' finished with status (SUCCESS|FAILURE)")
_FOUND_DONE = re.compile(r"shards of .* are there already")  # And so the images that they were made of.
_NOTHING_NEW = re.compile(rf"{NOTHING_NEW} since (.*?)(?: \(fewer than \d+\))?: \d+ new, ")
_LAST_LINES = 20


@dataclass
class Step:
    """Where one step stands."""

    name: str
    title: str
    state: State = "waiting"
    started: float = 0.0
    """Of time.monotonic()."""
    seconds: float = 0.0
    """How long it took, once it has ended."""
    bar: dict[str, Any] | None = None
    """Its latest progress event (see trainer.base.log)."""
    reused: bool = False
    """It found its work done by an earlier run."""
    note: str = ""
    """Why it was skipped, where that is not plain."""
    message: str = ""
    """Its error, where it reported one."""
    exit_code: int = 0
    """Its exit code, where it reported one."""
    known: bool = False
    """Its error is a message for the user, not a crash."""
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_LAST_LINES))
    """Its last lines of output."""

    @property
    def elapsed(self) -> float:
        """Seconds since it began, or that it took."""
        return time.monotonic() - self.started if self.state == "running" else self.seconds


class RunProgress:
    """The state of a run, from the lines and events it is fed."""

    def __init__(self, events: Path) -> None:
        """Follow a run whose steps append their events to the file `events`."""
        self.steps = {name: Step(name, title) for name, title in TITLES.items()}
        self.running: Step | None = None
        self.outside: deque[str] = deque(maxlen=_LAST_LINES)
        self.stopping = False
        """The run was asked to stop, which is why a step fails."""
        self.since = ""
        """The version that nothing is new since, where the run ended with its first step for that."""
        self._events = events
        self._position = 0
        self._own_output = False
        self._error_lines: list[str] = []

    @property
    def failed(self) -> Step | None:
        """The step that failed or was stopped, if one did."""
        return next((step for step in self.steps.values() if step.state in ("failed", "stopped")), None)

    def read_line(self, line: str) -> str | None:
        """Take a line of the runner's output; return what a step itself printed, else None."""
        plain = _COLOUR.sub("", line)
        starts, ends = _TASK_STARTS.search(plain), _TASK_ENDS.search(plain)
        if starts:
            self._start(starts[1])
            return None
        if ends:
            self._end(ends[1], ok=ends[2] == "SUCCESS")
            return None
        if self.running is None:
            if plain.strip():
                self.outside.append(plain)
            return None
        return self._step_line(self.running, plain.removeprefix("    "))

    def _start(self, name: str) -> None:
        step = self.steps.setdefault(name, Step(name, name))
        step.state, step.started = "running", time.monotonic()
        self.running, self._own_output = step, False

    def _end(self, name: str, *, ok: bool) -> None:
        self.read_events()
        step = self.steps[name]
        step.seconds = step.elapsed
        stopped = self.stopping or step.exit_code == EXIT_RETRY
        step.state = "done" if ok else "stopped" if stopped else "failed"
        self.running = None

    def _step_line(self, step: Step, line: str) -> str | None:
        if STARTED in line:
            # What came before is the component executor's: where it found the function, its input.
            self._own_output = True
            step.lines.clear()
            return None
        if FINISHED in line:
            self._own_output = False
            return None
        if line.strip():
            step.lines.append(line)
        if _FOUND_DONE.search(line):
            step.reused = True
        if step.name == "prepare" and (ended := _NOTHING_NEW.search(line)):
            self.since = ended[1]
        if line.startswith("error: "):
            self.read_events()
            self._error_lines = f"error: {step.message}".splitlines() if step.known else []
        if self._error_lines and line == self._error_lines[0]:
            self._error_lines.pop(0)
            return None
        return line if self._own_output and line.strip() else None

    def read_events(self) -> None:
        """Take the events that were appended since the last call."""
        if not self._events.exists():
            return
        with self._events.open("rb") as file:
            file.seek(self._position)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._position += len(whole)
        for line in whole.splitlines():
            try:
                self._take(json.loads(line))
            except ValueError:
                continue  # Cut short by a full disk: the next one is as good.

    def _take(self, event: dict[str, Any]) -> None:
        if "task" in event:
            if self.running is not None:
                self.running.bar = event
        elif event.get("step") in self.steps:
            step = self.steps[event["step"]]
            step.message, step.exit_code = event["message"], event["exit_code"]
            step.known = event.get("known", False)

    def finish(self) -> None:
        """Settle what the run left open: a step that was cut off has failed, others never began."""
        if self.running is not None:
            self._end(self.running.name, ok=False)
        for step in self.steps.values():
            if step.state == "waiting":
                step.state = "skipped"
                step.note = "held back by the gate" if self.steps["evaluate"].state == "done" else ""
                if self.since:
                    step.note = f"{NOTHING_NEW} since {self.since}"
