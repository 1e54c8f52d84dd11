"""What a person sees while the pipeline runs here: bars on a terminal, plain lines elsewhere.

Kubeflow's local runner mixes its own log with the steps' output on one stream, without the steps'
exit codes. What is needed beyond that (progress, errors) the steps append to a file.
"""

import json
import re
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from components.hooks import NOTHING_NEW
from components.steps import FINISHED, STARTED
from pipelines import TITLES
from trainer.base.errors import EXIT_RETRY
from trainer.base.log import clock, describe

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
                event = json.loads(line)
            except ValueError:
                continue  # Cut short by a full disk: the next one is as good.
            if "task" in event and self.running is not None:
                self.running.bar = event
            elif step := self.steps.get(event.get("step", "")):
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


_PLAIN_SECONDS = 10.0
_WIDE = 100
_MARGIN, _CLOCK, _BAR, _SHORT_BAR = 4, 7, 24, 8
"""Columns: free at the right, of times, of a bar on a wide terminal and on a narrow one."""
_MARKS = {"waiting": "·", "running": "▸", "done": "✓", "failed": "✗", "stopped": "‖", "skipped": "–"}
_ASCII_MARKS = {"waiting": ".", "running": ">", "done": "+", "failed": "x", "stopped": "=", "skipped": "-"}
_STYLES = {
    "waiting": "dim", "running": "bold", "done": "green", "failed": "bold red", "stopped": "yellow",
    "skipped": "dim",
}  # fmt: skip


def choose(run: RunProgress) -> "PlainDisplay | TerminalDisplay":
    """Return the display that suits stdout."""
    drawn = sys.stdout.isatty() and not Console().is_dumb_terminal
    return TerminalDisplay(run) if drawn else PlainDisplay(run)


class PlainDisplay:
    """Lines: each step's beginning and end, what it prints, and its progress when it is silent."""

    def __init__(self, run: RunProgress) -> None:
        self._run = run
        self._shown: dict[str, str] = {}
        self._spoke = time.monotonic()
        self._bar: dict[str, Any] | None = None

    def line(self, text: str) -> None:
        self.tick()
        self._print(f"  {text}")

    def tick(self) -> None:
        for step in self._run.steps.values():
            if step.state != self._shown.get(step.name, "waiting"):
                self._shown[step.name] = step.state
                # After a failure nobody needs a line for each step that did not begin.
                if step.state != "skipped" or step.note:
                    self._print(describe_step(step))
        running = self._run.running
        silent = time.monotonic() - self._spoke > _PLAIN_SECONDS
        if running and silent:
            if running.bar and running.bar is not self._bar and not running.bar["end"]:
                self._bar = running.bar
                self._print("  " + describe(running.bar))
            elif time.monotonic() - self._spoke > 6 * _PLAIN_SECONDS:
                self._print(f"  {running.title}: still running, {clock(running.elapsed)}")

    def _print(self, text: str) -> None:
        print(text, flush=True)
        self._spoke = time.monotonic()

    def __enter__(self) -> "PlainDisplay":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.tick()


class TerminalDisplay:
    """One line a step at the bottom of the terminal, the steps' own lines above."""

    def __init__(self, run: RunProgress, console: Console | None = None) -> None:
        self._run = run
        self._console = console or Console(highlight=False)
        self._live = Live(self._table(), console=self._console, auto_refresh=False)

    def line(self, text: str) -> None:
        # Broken between words: a path that has room on the next line stays whole.
        for part in Text(text, style="dim").wrap(self._console, self._console.width - 2):
            part.rstrip()
            self._console.print(Text("  ") + part, soft_wrap=True)

    def tick(self) -> None:
        self._live.update(self._table(), refresh=True)

    def _table(self) -> Table:
        marks = _MARKS if "utf" in self._console.encoding.lower() else _ASCII_MARKS
        # Not to the last column: a terminal that echoes ^C there would begin a new line.
        table = Table.grid(padding=(0, 1), expand=True)
        table.width = self._console.width - _MARGIN
        # Only the last column gives way on a narrow terminal.
        table.add_column(width=1)
        table.add_column(width=self._title_width)
        table.add_column(width=_CLOCK, justify="right")
        table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        for step in self._run.steps.values():
            style = _STYLES[step.state]
            seconds = "" if step.state in ("waiting", "skipped") else clock(step.elapsed)
            table.add_row(
                Text(marks[step.state], style), Text(step.title, style), seconds, self._detail(step)
            )
        return table

    def _detail(self, step: Step) -> Table | Text:
        if step.state == "running" and step.bar and not step.bar["end"]:
            width = _BAR if self._console.width >= _WIDE else _SHORT_BAR
            row = Table.grid(padding=(0, 1), expand=True)
            row.add_column(width=width)
            row.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
            bar = ProgressBar(total=step.bar["total"], completed=step.bar["done"], width=width)
            room = self._console.width - _MARGIN - 1 - self._title_width - _CLOCK - 3 - width - 1
            beside = _beside_bar(step, room)
            row.add_row(bar, Text(beside, overflow="ellipsis"))
            return row
        if step.state == "running":
            return Text("finishing" if step.bar else "starting", "dim")
        return Text(_outcome(step), "dim")

    @property
    def _title_width(self) -> int:
        return max(len(step.title) for step in self._run.steps.values())

    def __enter__(self) -> "TerminalDisplay":
        self._live.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.tick()
        self._live.stop()


def _beside_bar(step: Step, width: int) -> str:
    """As much of a step's progress as a number of columns takes, in whole pieces: a cut number misleads."""
    assert step.bar is not None
    event = step.bar
    total = f"/{event['total']}" if event["total"] else ""
    task = "" if event["task"] == step.name else f"{event['task']}: "
    # What a person wants to know first comes first.
    pieces = [f"{clock(event['eta'])} left"] if event["eta"] else []
    pieces += [f"{event['done']}{total} {event['unit']}"]
    pieces += [piece for piece in event["note"].split(", ") if piece] + [f"{event['rate']:.1f}/s"]
    shown = task + pieces[0]
    for piece in pieces[1:]:
        if len(shown) + 2 + len(piece) > width:
            break
        shown += f", {piece}"
    return shown


def describe_step(step: Step) -> str:
    """One plain line: `Train: done in 1:35, 640 steps`."""
    if step.state == "running":
        return f"{step.title} ..."
    took = "" if step.state == "skipped" else f" in {clock(step.seconds)}"
    outcome = _outcome(step)
    return f"{step.title}: {step.state}{took}{', ' if outcome else ''}{outcome}"


def _outcome(step: Step) -> str:
    if step.state != "done":
        return step.note
    if step.reused:
        return "reused"
    if not step.bar:
        return ""
    done, unit = step.bar["done"], step.bar["unit"]
    worked = step.bar.get("worked", done)
    return f"{done} {unit}" if worked in (0, done) else f"{worked} {unit}, {done} in all"
