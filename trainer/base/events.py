"""Events of a process for the program that started it: one JSON object a line.

They go to the file that KUBEDET_EVENTS names, or in a pod to its log, between the lines for people.
"""

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from trainer.base.json_files import STRICT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

FILE = "KUBEDET_EVENTS"
"""Environment variable: the file, or LOG. Not a descriptor, because torchrun closes those of its workers."""

LOG = "-"  # Value of that variable: to stderr, as in a pod.

_START = '{"event":'


class _Event(BaseModel):
    model_config = {**STRICT, "frozen": True, "ser_json_inf_nan": "constants"}


class Progress(_Event):
    """The progress of a task."""

    event: Literal["progress"] = "progress"
    task: str
    done: int
    total: int | None  # None if it is unknown.
    unit: str  # A plural, e.g. images.
    note: str = ""
    rate: float = 0.0  # Units per second.
    eta: float | None = None  # Seconds to the end.
    end: bool = False  # Whether the task has ended.
    worked: int = 0  # Units that this process did.
    metrics: dict[str, float] = {}  # The newest measurements, by name.


class Resumed(_Event):
    """A training continues from a checkpoint."""

    event: Literal["resumed"] = "resumed"
    step: int
    steps: int


class Scored(_Event):
    """The metrics of a validation."""

    event: Literal["scored"] = "scored"
    metrics: dict[str, float]


class Reused(_Event):
    """The result of the step existed already."""

    event: Literal["reused"] = "reused"
    uri: str


class Failed(_Event):
    """The process ends with an error; its message is for the user."""

    event: Literal["failed"] = "failed"
    message: str
    exit_code: int


Event = Progress | Resumed | Scored | Reused | Failed
_ADAPTER: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="event")])


def to_file() -> bool:
    """Return whether events go to a file: then its reader shows the progress, and the log need not."""
    return os.environ.get(FILE, LOG) not in ("", LOG)


def emit(event: Event) -> None:
    """Write an event, unless nobody reads it. A full disk does not end the work."""
    line = event.model_dump_json() + "\n"
    if to_file():
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
    try:
        return _ADAPTER.validate_json(line)
    except ValidationError:
        return None


def select(lines: "Iterable[str]") -> "Iterator[Event]":
    """Yield the events in the lines of a log."""
    return (event for line in lines if (event := parse(line)))
