"""Logging and progress of every process.

Progress is shown as a bar on a terminal and as a line every ten seconds elsewhere. It is also emitted as an
event (see `trainer.base.events`), from which `kubedet run` draws the bars of its steps.
"""

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from trainer.base import events
from trainer.base.events import Progress
from trainer.base.safe_text import format_message, redact

if TYPE_CHECKING:
    from rich.progress import TaskID

_LINE_SECONDS = 10.0
_EVENT_SECONDS = 0.2
_RATE_SECONDS = 30.0
_MAX_RATE = 100_000.0  # higher rates, right after the start, are not shown
_OWN_LOGGERS = ("trainer.", "components.", "operations.", "pipelines.", "kubedet.")


class _Formatter(logging.Formatter):
    """Formats records as `12:34:56 download: message`, sanitized and with secrets in addresses redacted."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(part)s: %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """Format a record and its traceback."""
        ours = record.name.startswith(_OWN_LOGGERS)
        record.part = record.name.rpartition(".")[2] if ours else record.name
        return redact(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Format the line without a traceback."""
        record.message = format_message(record.message)
        return super().formatMessage(record)


def setup(level: int = logging.INFO) -> None:
    """Send log lines to stderr as `12:34:56 name: message`, once per process.

    Of the processes that torchrun starts on a machine, all but the first log only warnings and errors.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter())
    if os.environ.get("LOCAL_RANK", "0") != "0":
        level = max(level, logging.WARNING)
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # Storage logs its retries.
    for noisy in ("torch.distributed", "onnxscript", "onnx_ir", "matplotlib", "fontTools", "wandb", "mlflow"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


Sink = Callable[["Bar", bool], None]  # displays a bar; the flag is true on the last call


class Bar:
    """The progress of one task; `progress` creates it."""

    def __init__(self, task: str, total: int | None, unit: str, sink: Sink | None, done: int = 0) -> None:
        self.task, self.total, self.unit, self.note = task, total, unit, ""
        self.metrics: dict[str, float] = {}  # The newest measurements, for events.
        self.done = done
        self._sink = sink
        self._worked = 0
        self._start = (time.monotonic(), 0)
        self._marks = deque([self._start])

    def update(self, amount: int = 1, *, note: str | None = None) -> None:
        """Count `amount` more units as done; `note` replaces the free text (a loss, failures)."""
        self._worked += amount
        now = time.monotonic()
        if now - self._marks[-1][0] >= 1:
            self._marks.append((now, self._worked))
        while len(self._marks) > 1 and now - self._marks[1][0] > _RATE_SECONDS:
            self._marks.popleft()
        if note is not None:
            self.note = note
        self.skip(amount)

    def skip(self, amount: int = 1) -> None:
        """Count units that an earlier run finished; they do not count toward the rate."""
        self.done += amount
        self.show()

    def show(self, *, end: bool = False) -> None:
        """Pass the current state to the sink."""
        if self._sink:
            self._sink(self, end)

    @property
    def rate(self) -> float:
        """Units per second of this process over the last 30 seconds."""
        return self._rate_since(self._marks[0])

    def _rate_since(self, mark: tuple[float, int]) -> float:
        return (self._worked - mark[1]) / max(time.monotonic() - mark[0], 1e-9)

    @property
    def eta(self) -> float | None:
        """Estimated seconds until the task ends; None if unknown."""
        if self.total is None or self._worked == self._marks[0][1]:
            return None
        return max(self.total - self.done, 0) / self.rate

    def state(self, *, end: bool = False) -> Progress:
        """Return the state as an event; `end` gives the mean rate of the whole task."""
        return Progress(
            task=self.task,
            done=self.done,
            total=self.total,
            unit=self.unit,
            note=self.note,
            rate=self._rate_since(self._start) if end else self.rate,
            eta=self.eta,
            end=end,
            worked=self._worked,
            metrics=self.metrics,
        )


@contextmanager
def progress(task: str, total: int | None, unit: str, *, done: int = 0, shown: bool = True) -> Iterator[Bar]:
    """Show the progress of a task as a bar on a terminal or as log lines, and emit it as events.

    `unit` is a plural, e.g. "images"; `total` is None if unknown; `done` counts units of an earlier run.
    """
    has_file = events.is_file_set()
    terminal = _Terminal() if shown and not has_file and sys.stderr.isatty() else None
    next_time, lock = time.monotonic() + (0.0 if has_file else _LINE_SECONDS), threading.Lock()

    def show(bar: Bar, end: bool) -> None:
        if terminal:
            terminal.show(bar, end)
        else:
            with lock:
                write(bar, end)

    def write(bar: Bar, end: bool) -> None:
        nonlocal next_time
        if end or time.monotonic() >= next_time:
            next_time = time.monotonic() + (_EVENT_SECONDS if has_file else _LINE_SECONDS)
            state = bar.state(end=end)
            if not has_file:
                logging.getLogger("kubedet").info(format_progress(state))
            events.emit(state)

    bar = Bar(task, total, unit, show if shown else None, done)
    try:
        with _call_periodically(bar.show) if shown and not terminal else nullcontext():
            yield bar
    finally:
        bar.show(end=True)


@contextmanager
def log_activity(logger: logging.Logger, text: str) -> Iterator[None]:
    """Log every ten seconds which activity is in progress, and for how long."""
    start = time.monotonic()
    with _call_periodically(lambda: logger.info("%s, %s", text, format_duration(time.monotonic() - start))):
        yield


@contextmanager
def _call_periodically(function: Callable[[], None]) -> Iterator[None]:
    """Call a function every ten seconds, so that the log shows activity during long waits."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(_LINE_SECONDS):
            function()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class _Terminal:
    """Draws a bar on the terminal's last line."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column

        # On a narrow terminal the numbers stay complete and the rest is truncated.
        fixed, rest = Column(no_wrap=True), Column(no_wrap=True, overflow="ellipsis", ratio=1)
        self._bars = Progress(
            TextColumn("{task.description}", table_column=fixed),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[count]}", table_column=fixed),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}", table_column=rest),
            console=Console(stderr=True),
            expand=True,
        )
        self._id: TaskID | None = None

    def show(self, bar: Bar, end: bool) -> None:
        count = f"{bar.done}/{bar.total} {bar.unit}" if bar.total else f"{bar.done} {bar.unit}"
        rate = bar.state(end=end).rate
        shown_rate = f"{rate:.1f}/s  " if rate < _MAX_RATE else ""
        text = f"{shown_rate}{bar.note}".rstrip()
        if self._id is None:
            self._bars.start()
            self._id = self._bars.add_task(bar.task, total=bar.total, count=count, text=text)
        self._bars.update(self._id, completed=bar.done, count=count, text=text)
        if end:
            self._bars.stop()


def format_duration(seconds: float) -> str:
    """Format a duration as 0:05, 12:34 or 1:02:03."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def format_progress(progress: Progress) -> str:
    """Format progress as one line: `train 120/600 steps 20%, 3.1 steps/s, 2:35 left, loss 0.71`."""
    done, total, unit = progress.done, progress.total, progress.unit
    share = f"/{total} {unit} {100 * done / total:.0f}%" if total else f" {unit}"
    parts = [f"{progress.task} {done}{share}", f"{progress.rate:.1f} {unit}/s"]
    if progress.eta:
        parts.append(f"{format_duration(progress.eta)} left")
    if progress.note:
        parts.append(progress.note)
    return ", ".join(parts)
