"""Events that a process reports to the program that started it, as one JSON object per line.

They are written to the file in KUBEDET_EVENTS or, in a pod, to stderr between the log lines.
"""

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Annotated, Literal

if TYPE_CHECKING:
    from pydantic import TypeAdapter

FILE = "KUBEDET_EVENTS"
"""Environment variable: the path of a file, or LOG. torchrun's workers do not inherit file descriptors."""

LOG = "-"  # Value of that variable: write events to stderr, as in a pod.

_START = '{"event": '


@dataclass(frozen=True)
class Progress:
    """The progress of a task."""

    task: str
    done: int
    total: int | None  # None if it is unknown.
    unit: str  # A plural, e.g. images.
    note: str = ""
    rate: float = 0.0  # Units per second.
    eta: float | None = None  # Estimated seconds until the task ends.
    end: bool = False  # Whether the task has ended.
    worked: int = 0  # Units that this process completed.
    metrics: dict[str, float] = field(default_factory=dict)  # The newest measurements, by name.
    event: Literal["progress"] = "progress"


@dataclass(frozen=True)
class TrainingResumed:
    """A training run continues from a checkpoint."""

    step: int
    steps: int
    event: Literal["resumed"] = "resumed"


@dataclass(frozen=True)
class ValidationScored:
    """A validation computed metrics."""

    metrics: dict[str, float]
    event: Literal["scored"] = "scored"


@dataclass(frozen=True)
class ResultReused:
    """The result of the step already exists and is reused."""

    uri: str
    event: Literal["reused"] = "reused"


@dataclass(frozen=True)
class ProcessFailed:
    """The process ends with an error, whose message is for the user."""

    message: str
    exit_code: int
    event: Literal["failed"] = "failed"


Event = Progress | TrainingResumed | ValidationScored | ResultReused | ProcessFailed


@cache
def _adapter() -> "TypeAdapter[Event]":
    from pydantic import Field, TypeAdapter  # Slow to import; only readers need it.

    return TypeAdapter(Annotated[Event, Field(discriminator="event")])


def is_file_set() -> bool:
    """Return whether events are written to a file; the log then shows no progress."""
    return os.environ.get(FILE, LOG) not in ("", LOG)


def encode(event: Event) -> str:
    """Encode an event as a line."""
    return json.dumps({"event": event.event, **asdict(event)}) + "\n"


def emit(event: Event) -> None:
    """Write an event if KUBEDET_EVENTS is set; write errors are ignored."""
    line = encode(event)
    if is_file_set():
        # One short write to a file opened for appending is atomic between processes.
        with suppress(OSError), open(os.environ[FILE], "a") as file:
            file.write(line)
    elif os.environ.get(FILE) == LOG or "KUBERNETES_SERVICE_HOST" in os.environ:
        sys.stderr.write(line)
        sys.stderr.flush()


def parse(line: str) -> Event | None:
    """Return the event in a line, or None for any other line."""
    if not line.startswith(_START):
        return None
    from pydantic import ValidationError

    try:
        return _adapter().validate_json(line, strict=True)
    except ValidationError:
        return None


def parse_lines(lines: Iterable[str]) -> Iterator[Event]:
    """Yield the events in the lines of a log."""
    return (event for line in lines if (event := parse(line)))
