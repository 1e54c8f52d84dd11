"""The record of what one process of a run, and those that it started, used."""

from dataclasses import asdict, dataclass
from typing import Any

from trainer.storage import records

FORM = records.Form(
    "usage", 1,
    {
        "run": str, "step": str, "rank": int, "began": str, "ended": bool, "seconds": float, "nodes": int,
        "read": int, "written": int,
    },
    remedy="delete it: the other records of the run are counted without it",
)  # fmt: skip


@dataclass(frozen=True)
class Record:
    """What one process used."""

    run: str
    """Id of the run."""
    step: str
    """Name of the step, e.g. "train"."""
    rank: int
    """Number of the node, of a step that has several."""
    began: str
    """When, in UTC, as ISO 8601."""
    ended: bool
    """Whether it came to its end; of a process that was killed this is what it had used a minute before."""
    seconds: float
    """How long it has run."""
    nodes: int
    """Machines that it had: 1, or 0 where it only waited for others, which have records of their own."""
    gpus: int | None
    """GPUs that it had; None if their number is unknown, which is not 0."""
    read: int
    """Bytes that came from servers."""
    written: int
    """Bytes that went to servers."""

    def encoded(self) -> bytes:
        """Return it as JSON with its hash."""
        return records.encode({"kind": FORM.kind, "version": FORM.version, **asdict(self)})

    @classmethod
    def of(cls, fields: dict[str, Any]) -> "Record":
        """Return it from what `encoded` wrote; keys of later versions are left out."""
        known: dict[str, Any] = {name: fields.get(name) for name in cls.__dataclass_fields__}
        return cls(**known)
