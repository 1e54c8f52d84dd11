"""Log lines and progress of every process, and how they reach the person who waits.

A process on a terminal draws a bar; elsewhere it prints a plain line now and then. When
`kubedet run` waits for the steps it starts, it names a file in KUBEDET_PROGRESS: they
append their progress to it as JSON lines and it draws the bars.
"""

import json
import logging
import os
import re
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trainer.base.masking import masked

if TYPE_CHECKING:
    from rich.progress import TaskID

PROGRESS_FILE = "KUBEDET_PROGRESS"
"""Environment variable: a file that takes progress events, one JSON object a line:
{"task", "done", "total" (or null), "unit", "note", "rate", "eta" (s or null), "end" (bool),
"worked" (units of this process, of those that are done)}."""

_PLAIN_INTERVAL = 10.0
_FILE_INTERVAL = 0.2
_RATE_SECONDS = 30.0
_TOO_FAST = 100_000.0
"""Units a second that nothing here reaches."""
_OURS = ("trainer.", "components.", "operations.", "pipelines.", "kubedet.")
_DESCRIBED = re.compile(
    r"(?:^|: )(?P<task>[^:/]+?) (?P<done>\d+)/(?P<total>\d+) (?P<unit>\w+) \d+%, "
    r"(?P<rate>\d+\.\d) (?P=unit)/s(?:, (?P<eta>\d+(?::\d\d)+) left)?(?:, (?P<note>.*))?$"
)
"""What `describe` writes, at the end of a line of the log."""


class _Formatter(logging.Formatter):
    """`12:34:56 download: message`: a person reads the part of the program, not its Python path."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(part)s: %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """Write a record as a line, and its traceback; secrets of addresses are left out, a proxy's too."""
        ours = record.name.startswith(_OURS)
        record.part = record.name.rpartition(".")[2] if ours else record.name
        return masked(super().format(record))


def setup(level: int = logging.INFO) -> None:
    """Send log lines to stderr as `12:34:56 name: message`, once for a process.

    Of the processes that torchrun starts on one machine only the first logs everything; the others log
    warnings and errors only.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter())
    if os.environ.get("LOCAL_RANK", "0") != "0":
        level = max(level, logging.WARNING)
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # The storage logs its retries itself, once.
    for noisy in ("torch.distributed", "onnxscript", "onnx_ir", "matplotlib", "fontTools", "wandb", "mlflow"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


class Sink(Protocol):
    """Where one task's progress is shown."""

    def show(self, bar: "Bar", *, end: bool = False) -> None:
        """Show where the bar stands; `end` is its last call."""
        ...


class Bar:
    """The progress of one task. Made by `progress`."""

    def __init__(self, task: str, total: int | None, unit: str, sink: Sink, done: int = 0) -> None:
        self.task, self.total, self.unit, self.note = task, total, unit, ""
        self.done = done
        self._sink = sink
        self._worked = 0
        self._start = (time.monotonic(), 0)
        self._marks = deque([self._start])

    def update(self, amount: int = 1, *, note: str | None = None) -> None:
        """Count `amount` more units as done; `note` replaces the free text (a loss, failures)."""
        self.done += amount
        self._worked += amount
        self._mark()
        if note is not None:
            self.note = note
        self._sink.show(self)

    def skip(self, amount: int = 1) -> None:
        """Count `amount` units that an earlier run has done: they do not count for the rate."""
        self.done += amount
        self._sink.show(self)

    def _mark(self) -> None:
        now = time.monotonic()
        if now - self._marks[-1][0] >= 1:
            self._marks.append((now, self._worked))
        while len(self._marks) > 1 and now - self._marks[1][0] > _RATE_SECONDS:
            self._marks.popleft()

    @property
    def rate(self) -> float:
        """Units a second of this process in the last half minute: the first minute of a task is slower."""
        return self._rate_since(self._marks[0])

    def _rate_since(self, mark: tuple[float, int]) -> float:
        return (self._worked - mark[1]) / max(time.monotonic() - mark[0], 1e-9)

    @property
    def eta(self) -> float | None:
        """Seconds to the end at this rate, or None where that is unknown."""
        if self.total is None or self._worked == self._marks[0][1]:
            return None
        return max(self.total - self.done, 0) / self.rate

    def event(self, *, end: bool = False) -> dict[str, Any]:
        """Return the state as an event for PROGRESS_FILE; at the end with the mean rate."""
        rate = self._rate_since(self._start) if end else self.rate
        return {
            "task": self.task, "done": self.done, "total": self.total, "unit": self.unit,
            "note": self.note, "rate": rate, "eta": self.eta, "end": end, "worked": self._worked,
        }  # fmt: skip


@contextmanager
def progress(task: str, total: int | None, unit: str, *, done: int = 0, shown: bool = True) -> Iterator[Bar]:
    """Show the progress of a task: a bar on a terminal, events to a file, or plain lines.

    Args:
        task: short name, e.g. "download".
        total: units in all, or None where unknown.
        unit: plural name of the units, e.g. "images".
        done: units that an earlier run has done.
        shown: whether this process shows it (of several, only the main one does).
    """
    sink = _choose_sink() if shown else _NoSink()
    bar = Bar(task, total, unit, sink, done)
    try:
        yield bar
    finally:
        sink.show(bar, end=True)


def clock(seconds: float) -> str:
    """Write a duration as 0:05, 12:34 or 1:02:03."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _choose_sink() -> Sink:
    if os.environ.get(PROGRESS_FILE):
        return _FileSink(Path(os.environ[PROGRESS_FILE]))
    return _TerminalSink() if sys.stderr.isatty() else _LineSink()


class _NoSink:
    """Shows nothing."""

    def show(self, bar: Bar, *, end: bool = False) -> None:
        pass


class _FileSink:
    """Appends events to the file that the waiting parent reads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next = 0.0

    def show(self, bar: Bar, *, end: bool = False) -> None:
        now = time.monotonic()
        if now < self._next and not end:
            return
        self._next = now + _FILE_INTERVAL
        # One short write to a file opened for appending is atomic between processes.
        with self._path.open("a") as file:
            file.write(json.dumps(bar.event(end=end)) + "\n")


class _LineSink:
    """Prints a plain line every ten seconds and at the end."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _PLAIN_INTERVAL

    def show(self, bar: Bar, *, end: bool = False) -> None:
        now = time.monotonic()
        if now < self._next and not end:
            return
        self._next = now + _PLAIN_INTERVAL
        logging.getLogger("kubedet").info(describe(bar.event(end=end)))


def describe(event: dict[str, Any]) -> str:
    """One line of a progress event: `train 120/600 steps 20%, 3.1 steps/s, 2:35 left, loss 0.71`."""
    done, total, unit = event["done"], event["total"], event["unit"]
    share = f"/{total} {unit} {100 * done / total:.0f}%" if total else f" {unit}"
    parts = [f"{event['task']} {done}{share}", f"{event['rate']:.1f} {unit}/s"]
    if event["eta"]:
        parts.append(f"{clock(event['eta'])} left")
    if event["note"]:
        parts.append(event["note"])
    return ", ".join(parts)


def parse(line: str) -> dict[str, Any] | None:
    """Read a line with what `describe` has written; None if that is not one, or no total was known.

    Returns:
        task, done, total, unit, note, rate, eta, as far as the line says and as exactly.
    """
    match = _DESCRIBED.search(line.rstrip())
    if not match:
        return None
    return {
        **match.groupdict(), "done": int(match["done"]), "total": int(match["total"]),
        "rate": float(match["rate"]), "eta": _seconds(match["eta"]), "note": match["note"] or "",
    }  # fmt: skip


def _seconds(text: str | None) -> float | None:
    """Read what `clock` has written."""
    if text is None:
        return None
    return float(sum(int(part) * 60**power for power, part in enumerate(reversed(text.split(":")))))


class _TerminalSink:
    """Draws a bar on the terminal's last line."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column

        # A number that is cut misleads: on a narrow terminal the rest gives way.
        whole, rest = Column(no_wrap=True), Column(no_wrap=True, overflow="ellipsis", ratio=1)
        self._bars = Progress(
            TextColumn("{task.description}", table_column=whole), BarColumn(bar_width=20),
            TextColumn("{task.fields[count]}", table_column=whole), TimeRemainingColumn(),
            TextColumn("{task.fields[text]}", table_column=rest), console=Console(stderr=True), expand=True,
        )  # fmt: skip
        self._id: TaskID | None = None

    def show(self, bar: Bar, *, end: bool = False) -> None:
        count = f"{bar.done}/{bar.total} {bar.unit}" if bar.total else f"{bar.done} {bar.unit}"
        rate = bar.event(end=end)["rate"]
        # In the first moment it is nothing that could be told.
        text = "  ".join([f"{rate:.1f}/s"] * (rate < _TOO_FAST) + [bar.note] * bool(bar.note))
        if self._id is None:
            self._bars.start()
            self._id = self._bars.add_task(bar.task, total=bar.total, count=count, text=text)
        self._bars.update(self._id, completed=bar.done, count=count, text=text)
        if end:
            self._bars.stop()
