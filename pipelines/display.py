"""What a person sees while the pipeline runs: bars on a terminal, plain lines elsewhere."""

import sys
import time
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipelines.run_progress import RunProgress, Step
from trainer.base.log import clock, describe

_PLAIN_SECONDS = 10.0
_WIDE = 100
_MARGIN, _CLOCK, _BAR, _SHORT_BAR = 4, 7, 24, 8
"""Columns: free at the right, of times, of a bar on a wide terminal and on a narrow one."""
_MARKS = {"waiting": "·", "running": "▸", "done": "✓", "failed": "✗", "stopped": "‖", "skipped": "–"}
_ASCII_MARKS = {"waiting": ".", "running": ">", "done": "+", "failed": "x", "stopped": "=", "skipped": "-"}
_STYLES = {
    "waiting": "dim",
    "running": "bold",
    "done": "green",
    "failed": "bold red",
    "stopped": "yellow",
    "skipped": "dim",
}


class Display(Protocol):
    """Where a run is shown. Used as a context manager around the run."""

    def line(self, text: str) -> None:
        """Show a line that a step printed."""

    def tick(self) -> None:
        """Show where the steps stand now."""

    def __enter__(self) -> "Display": ...

    def __exit__(self, *exception: Any) -> None: ...


def choose(run: RunProgress) -> Display:
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
            beside = _beside_bar(step, self._detail_width - width - 1)
            row.add_row(bar, Text(beside, overflow="ellipsis"))
            return row
        if step.state == "running":
            return Text("finishing" if step.bar else "starting", "dim")
        return Text(_outcome(step), "dim")

    @property
    def _detail_width(self) -> int:
        """Columns of the last column of `_table`."""
        return self._console.width - _MARGIN - 1 - self._title_width - _CLOCK - 3

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
