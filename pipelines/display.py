"""Displays the progress of a local run from the events of its steps, as bars or plain lines."""

import sys
import time
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich import progress as rich_progress
from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from components.hooks import NOTHING_NEW
from pipelines import STEP_TITLES
from trainer.base import events
from trainer.base.errors import EXIT_RETRY
from trainer.base.events import Progress
from trainer.base.log import format_duration, format_progress

State = Literal["waiting", "running", "done", "failed", "stopped", "skipped"]

_LAST_LINES = 20


@dataclass
class Step:
    """The state of one step."""

    name: str
    title: str
    state: State = "waiting"
    started: float = 0.0  # time.monotonic() at its start.
    seconds: float = 0.0  # Its duration, after its end.
    bar: Progress | None = None  # Its latest progress.
    main_bar: Progress | None = None  # Progress of its first task; a training run later predicts images.
    reused: bool = False  # Its work was finished by an earlier run.
    note: str = ""  # Why the step was skipped.
    message: str = ""  # Its error message; empty after a crash.
    exit_code: int = 0
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_LAST_LINES))  # Its last lines of output.

    @property
    def elapsed(self) -> float:
        """Seconds since its start, or its duration."""
        return time.monotonic() - self.started if self.state == "running" else self.seconds


class RunProgress:
    """The state of a run, from the events of its steps."""

    def __init__(self, events: Path) -> None:
        """Follow a run whose steps append their events to the file `events`."""
        self.steps = {name: Step(name, title) for name, title in STEP_TITLES.items()}
        self.running: Step | None = None
        self.since = ""  # The model version since which no data changed, if training is skipped.
        self.events = events
        self._position = 0

    @property
    def failed(self) -> Step | None:
        """The step that failed or was stopped, if any."""
        return next((step for step in self.steps.values() if step.state in ("failed", "stopped")), None)

    def begin(self, name: str) -> None:
        """Record that a step begins."""
        self.running = self.steps[name]
        self.running.state, self.running.started = "running", time.monotonic()

    def add_line(self, line: str) -> None:
        """Keep a line of the running step's output."""
        if self.running and line.strip():
            self.running.lines.append(line)

    def end(self, name: str, exit_code: int, *, stopped: bool) -> None:
        """Record that a step has ended; `stopped` means that the run was asked to stop."""
        self.read_events()
        step = self.steps[name]
        step.seconds, step.exit_code = step.elapsed, exit_code
        is_stop = stopped or exit_code == EXIT_RETRY
        step.state = "done" if exit_code == 0 else "stopped" if is_stop else "failed"
        self.running = None

    def read_events(self) -> None:
        """Read the events since the last call."""
        if not self.events.exists():
            return
        with self.events.open("rb") as file:
            file.seek(self._position)
            text = file.read()
        complete = text[: text.rfind(b"\n") + 1]
        self._position += len(complete)
        # A full disk may truncate a line; the next one replaces it.
        for event in events.parse_lines(complete.decode(errors="replace").splitlines()):
            if self.running is None:
                continue
            if isinstance(event, events.Progress):
                self.running.bar = event
                if self.running.main_bar is None or self.running.main_bar.task == event.task:
                    self.running.main_bar = event
            elif isinstance(event, events.ResultReused):
                self.running.reused = True
            elif isinstance(event, events.ProcessFailed) and not self.running.message:
                self.running.message = event.message

    def finish(self) -> None:
        """End the run: a running step has failed, waiting steps are skipped."""
        if self.running is not None:
            self.end(self.running.name, 1, stopped=False)
        for step in self.steps.values():
            if step.state == "waiting":
                step.state = "skipped"
                step.note = "held back by the gate" if self.steps["evaluate"].state == "done" else ""
                if self.since:
                    step.note = f"{NOTHING_NEW} since {self.since}"


_QUIET_SECONDS = 10.0
_WIDE_COLUMNS = 100
_BAR, _SHORT_BAR = 24, 8
"""Width of a bar, in columns, on wide and on narrow terminals."""
_MARKS = {
    "waiting": ("·", "dim"), "running": ("▸", "bold"), "done": ("✓", "green"), "failed": ("✗", "bold red"),
    "stopped": ("‖", "yellow"), "skipped": ("-", "dim"),
}  # fmt: skip
"""Mark and style of each state."""


def choose_display(run: RunProgress) -> "Display":
    """Return the display that suits stdout."""
    console = Console()
    drawn = sys.stdout.isatty() and not console.is_dumb_terminal
    return TerminalDisplay(run) if drawn else PlainDisplay(run)


class PlainDisplay(AbstractContextManager["PlainDisplay"]):
    """Prints a line for each start and end of a step, its output, and its progress if it prints nothing."""

    def __init__(self, run: RunProgress) -> None:
        self._run = run
        self._shown: dict[str, str] = {}
        self._last_print = time.monotonic()
        self._bar: Progress | None = None

    def show_line(self, text: str) -> None:
        self.refresh_display()
        self._print(f"  {text}")

    def refresh_display(self) -> None:
        for step in self._run.steps.values():
            if step.state != self._shown.get(step.name, "waiting"):
                self._shown[step.name] = step.state
                if step.state != "skipped" or step.note:
                    self._print(describe_step(step))
        running, silence = self._run.running, time.monotonic() - self._last_print
        if silence > _QUIET_SECONDS:
            if running and running.bar and running.bar is not self._bar and not running.bar.end:
                self._bar = running.bar
                self._print("  " + format_progress(running.bar))
            elif silence > _QUIET_SECONDS + 1:  # Longer than the ten seconds between lines of a step.
                self._print(
                    f"  still running, {format_duration(running.elapsed)}" if running else "starting ..."
                )

    def _print(self, text: str) -> None:
        print(text, flush=True)
        self._last_print = time.monotonic()

    def __exit__(self, *exception: Any) -> None:
        self.refresh_display()


class TerminalDisplay:
    """Shows one line for each step at the bottom of the terminal, and the output of the steps above."""

    def __init__(self, run: RunProgress, console: Console | None = None) -> None:
        self._run = run
        console = console or Console(highlight=False)
        rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        self._progress = rich_progress.Progress(
            TextColumn("[{task.fields[style]}]{task.fields[mark]} {task.description}"),
            TextColumn("{task.fields[clock]}", justify="right"),
            BarColumn(_BAR if console.width >= _WIDE_COLUMNS else _SHORT_BAR),
            TextColumn("{task.fields[detail]}", "dim", markup=False, table_column=rest),
            console=console,
            auto_refresh=False,
            expand=True,
        )
        self._rows: dict[str, TaskID] = {}

    def show_line(self, text: str) -> None:
        # Wrap between words, so that paths are not split if they fit on a line.
        console = self._progress.console
        for part in Text(text, style="dim").wrap(console, console.width - 2):
            part.rstrip()
            console.print(Text("  ") + part, soft_wrap=True)

    def refresh_display(self) -> None:
        for step in self._run.steps.values():
            mark, style = _MARKS[step.state]
            fields: dict[str, Any] = {"mark": mark, "style": style, "detail": _describe_outcome(step)}
            fields["clock"] = "" if step.state in ("waiting", "skipped") else format_duration(step.elapsed)
            total: int | None = 1
            done = int(step.state == "done")
            if step.state == "running":
                fields["detail"] = "finishing" if step.bar else "starting"
                if step.bar and not step.bar.end:
                    fields["detail"] = format_progress(step.bar)
                    total, done = step.bar.total, step.bar.done
            if step.name not in self._rows:
                self._rows[step.name] = self._progress.add_task(step.title, **fields)
            self._progress.update(self._rows[step.name], total=total, completed=done, **fields)
        self._progress.refresh()

    def __enter__(self) -> "TerminalDisplay":
        self._progress.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.refresh_display()
        self._progress.stop()


Display = PlainDisplay | TerminalDisplay


def describe_step(step: Step) -> str:
    """Return one plain line: `Train: done in 1:35, 640 steps`."""
    if step.state == "running":
        return f"{step.title} ..."
    took = "" if step.state == "skipped" else f" in {format_duration(step.seconds)}"
    outcome = _describe_outcome(step)
    return f"{step.title}: {step.state}{took}{', ' if outcome else ''}{outcome}"


def _describe_outcome(step: Step) -> str:
    if step.state != "done":
        return step.note
    if step.reused:
        return "reused"
    if not step.main_bar:
        return ""
    done, unit, worked = step.main_bar.done, step.main_bar.unit, step.main_bar.worked
    return f"{done} {unit}" if worked in (0, done) else f"{worked} {unit}, {done} in all"
