"""What runs that begin need of a data root, before any record of theirs tells it.

A step of the data notes down that its run needs whatever data there are, before it looks at them; when it has
ended it notes down which. It does so while it holds the data root's lease: whoever frees space holds it too,
and so either sees the note, or has ended before the step looks.
"""

import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from components import run_ids
from trainer import storage
from trainer.base.errors import MissingError
from trainer.storage import leases

_LASTS = 7 * 24 * 3600.0
"""Seconds for which a note of a step that has ended counts: so long may a run wait for its training."""

_LASTS_BEGUN = 2 * 24 * 3600.0
"""Seconds for which a note of a step that has not ended counts: so long may one pod have its part."""

_PATIENCE = 3600.0
"""Seconds for which a step waits for the end of a pruning."""

FOLDER = "retention/uses"

_FORM = storage.Form(
    "use", 1, {"began": float, "names": None, "weights": str}, "delete it once its run has ended"
)


@dataclass(frozen=True)
class Use:
    """What one run needs."""

    began: float
    """When it noted this, in seconds since 1970."""
    names: tuple[str, ...] | None
    """Names of folders and files, relative to the data root; None: whatever data there are."""
    weights: str
    """URI of the weights that it begins with; may be empty."""

    def is_late(self, now: float) -> bool:
        """Whether the note does not count any more, at a time in seconds since 1970."""
        return now - self.began > (_LASTS_BEGUN if self.names is None else _LASTS)


def begin(data_root: str, weights: str = "") -> None:
    """Note down that this run needs whatever data there are, and the weights that it is to begin with.

    Args:
        data_root: URI under which data are kept.
        weights: their URI; may be empty.

    Raises:
        StorageError: the data root cannot be written, or somebody frees space in it for an hour.
    """
    with leases.hold(leases.of_data_root(data_root), _id(), patience=_PATIENCE):
        _write(data_root, None, weights)


def renew(data_root: str) -> None:
    """Note down that another pod of the run has begun its part.

    Raises:
        StorageError: the data root cannot be read or written.
    """
    if storage.exists(place(data_root, _id())):
        note = _read(place(data_root, _id()))
        _write(data_root, note.names, note.weights)


def end(data_root: str, names: Sequence[str], weights: str = "") -> None:
    """Note down what of the data root this run needs: names of things; without any it needs nothing.

    Raises:
        StorageError: the data root cannot be written.
    """
    if names:
        _write(data_root, names, weights)
    else:
        storage.delete(place(data_root, _id()))


def notes(data_root: str) -> dict[str, Use]:
    """Return the notes by the run's id, those that do not count any more too.

    Raises:
        StorageError: a note cannot be read, or is damaged.
    """
    names = [name for name in storage.list_files(storage.join(data_root, FOLDER)) if name.endswith(".json")]
    found = {}
    for name in names:
        with suppress(MissingError):  # Another process may have deleted it since.
            found[name.removesuffix(".json")] = _read(place(data_root, name.removesuffix(".json")))
    return found


def place(data_root: str, run: str) -> str:
    """Return the URI of a run's note."""
    return storage.join(data_root, FOLDER, f"{run}.json")


def _read(uri: str) -> Use:
    note = storage.read_json(uri, _FORM)
    names = note["names"]
    return Use(note["began"], None if names is None else tuple(names), note["weights"])


def _write(data_root: str, names: Sequence[str] | None, weights: str) -> None:
    note = {
        "kind": "use",
        "version": 1,
        "began": time.time(),
        "names": None if names is None else list(names),
        "weights": weights,
    }
    storage.write_json(place(data_root, _id()), note)


def _id() -> str:
    return run_ids.current() or f"{socket.gethostname()}-{os.getpid()}"
