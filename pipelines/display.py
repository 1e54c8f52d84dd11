"""What a person sees while the pipeline runs: bars on a terminal, plain lines elsewhere."""

import re
import sys
import time
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipelines.follow import Follower, Step
from trainer.log import clock

_PLAIN_SECONDS = 10.0
_LOGGED = re.compile(r"^\d\d:\d\d:\d\d [\w.]+: ")
_MARKS = {"waiting": "·", "running": "▸", "done": "✓", "failed": "✗", "skipped": "–"}
_ASCII_MARKS = {"waiting": ".", "running": ">", "done": "+", "failed": "x", "skipped": "-"}
_STYLES = {"waiting": "dim", "running": "bold", "done": "green", "failed": "bold red", "skipped": "dim"}


class Display(Protocol):
    """Where a run is shown. Used as a context manager around the run."""

    def line(self, text: str) -> None:
        """Show a line that a step printed."""

    def tick(self) -> None:
        """Show where the steps stand now."""

    def __enter__(self) -> "Display": ...

    def __exit__(self, *exception: Any) -> None: ...


def choose(run: Follower) -> Display:
    """Return the display that suits stdout."""
    return TerminalDisplay(run) if sys.stdout.isatty() else PlainDisplay(run)


class PlainDisplay:
    """Lines: each step's beginning and end, what it prints, and its progress when it is silent."""

    def __init__(self, run: Follower) -> None:
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
                self._print(describe_step(step))
        running = self._run.running
        silent = time.monotonic() - self._spoke > _PLAIN_SECONDS
        if running and silent:
            if running.bar and running.bar is not self._bar and not running.bar["end"]:
                self._bar = running.bar
                self._print("  " + describe_bar(running.bar))
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

    def __init__(self, run: Follower) -> None:
        self._run = run
        self._console = Console(highlight=False)
        self._live = Live(self._table(), console=self._console, auto_refresh=False)

    def line(self, text: str) -> None:
        # The bar shows the training's progress; its hundreds of log lines are in log.txt.
        running = self._run.running
        if running and running.name == "train" and running.bar and _LOGGED.match(text):
            return
        self._console.print(Text(f"  {text}", style="dim"), soft_wrap=True)

    def tick(self) -> None:
        self._live.update(self._table(), refresh=True)

    def _table(self) -> Table:
        marks = _MARKS if "utf" in self._console.encoding.lower() else _ASCII_MARKS
        table = Table.grid(padding=(0, 1))
        for column in ({}, {}, {"justify": "right"}, {"no_wrap": True, "overflow": "ellipsis"}):
            table.add_column(**column)
        for step in self._run.steps.values():
            style = _STYLES[step.state]
            seconds = "" if step.state in ("waiting", "skipped") else clock(step.elapsed)
            table.add_row(
                Text(marks[step.state], style), Text(step.title, style), seconds, self._detail(step)
            )
        return table

    def _detail(self, step: Step) -> Table | Text:
        if step.state == "running" and step.bar and not step.bar["end"]:
            row = Table.grid(padding=(0, 1))
            row.add_column(width=24)
            row.add_column(no_wrap=True, overflow="ellipsis")
            bar = ProgressBar(total=step.bar["total"] or 1, completed=step.bar["done"], width=24)
            row.add_row(bar, Text(describe_bar(step.bar)))
            return row
        return Text(_outcome(step), "dim")

    def __enter__(self) -> "TerminalDisplay":
        self._live.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.tick()
        self._live.stop()


def describe_step(step: Step) -> str:
    """One plain line: `Train: done in 1:35, 640 steps`."""
    if step.state == "running":
        return f"{step.title} ..."
    took = "" if step.state == "skipped" else f" in {clock(step.seconds)}"
    outcome = _outcome(step)
    return f"{step.title}: {step.state}{took}{', ' if outcome else ''}{outcome}"


def describe_bar(event: dict[str, Any]) -> str:
    """One line of a progress event: `train 120/600 steps 20%, 3.1 steps/s, 2:35 left, loss 0.71`."""
    done, total, unit = event["done"], event["total"], event["unit"]
    share = f"/{total} {unit} {100 * done / total:.0f}%" if total else f" {unit}"
    parts = [f"{event['task']} {done}{share}", f"{event['rate']:.1f} {unit}/s"]
    if event["eta"]:
        parts.append(f"{clock(event['eta'])} left")
    if event["note"]:
        parts.append(event["note"])
    return ", ".join(parts)


def _outcome(step: Step) -> str:
    if step.state != "done":
        return ""
    if step.reused:
        return "reused"
    return f"{step.bar['done']} {step.bar['unit']}" if step.bar else ""
