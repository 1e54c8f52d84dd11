"""Notes of what runs need of a data root, before their own records exist.

A step that prepares data notes that its run needs all data, before it looks at them; at its end it notes
which. It does so while it holds the data root's lease: a pruning holds it too, so it either sees the note,
or has ended before the step looks.
"""

import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

from components import environment
from trainer import storage
from trainer.base import typed_json
from trainer.base.errors import MissingError
from trainer.launching import leases

_EXPIRY_SECONDS = 7 * 24 * 3600.0  # Seconds until a note expires: a run may wait that long for its training.
_UNFINISHED_EXPIRY_SECONDS = 2 * 24 * 3600.0  # The same while the step runs, in all of its pods.
_LEASE_WAIT_SECONDS = 3600.0  # Seconds to wait for the end of a pruning.

FOLDER = "retention/uses"

_FORM = storage.Form("use", 1, remedy="delete it once its run has ended")


@dataclass(frozen=True)
class UseNote:
    """What one run needs."""

    began: float  # Time of the note, in seconds since 1970.
    names: list[str] | None  # Names of folders and files, relative to the data root; None: all data.
    weights: str  # URI of the initial weights; may be empty.
    kind: str = _FORM.kind
    version: int = _FORM.version

    def is_late(self, now: float) -> bool:
        """Whether the note has expired at a given time, in seconds since 1970."""
        return now - self.began > (_UNFINISHED_EXPIRY_SECONDS if self.names is None else _EXPIRY_SECONDS)


def begin(data_root: str, weights: str = "") -> None:
    """Record that this run needs all data, and its initial weights (a URI or empty)."""
    with leases.hold(leases.of_data_root(data_root), _id(), patience=_LEASE_WAIT_SECONDS):
        _write(data_root, None, weights)


def renew(data_root: str) -> None:
    """Renew the note when another pod of the run begins its part."""
    with suppress(MissingError):
        note = _read(place(data_root, _id()))
        _write(data_root, note.names, note.weights)


def end(data_root: str, names: Sequence[str], weights: str = "") -> None:
    """Record which folders of the data root this run needs; delete the note if there are none."""
    if names:
        _write(data_root, names, weights)
    else:
        storage.delete(place(data_root, _id()))


def notes(data_root: str) -> dict[str, UseNote]:
    """Return the notes by the run's id, including expired ones."""
    found = {}
    for name in storage.list_files(storage.join(data_root, FOLDER)):
        run, _, suffix = name.rpartition(".")
        if suffix == "json":
            with suppress(MissingError):  # Another process may have deleted it since.
                found[run] = _read(place(data_root, run))
    return found


def place(data_root: str, run: str) -> str:
    """Return the URI of a run's note."""
    return storage.join(data_root, FOLDER, f"{run}.json")


def _read(uri: str) -> UseNote:
    return typed_json.load(UseNote, storage.read_json(uri, _FORM), uri, _FORM.remedy)


def _write(data_root: str, names: Sequence[str] | None, weights: str) -> None:
    use = UseNote(time.time(), None if names is None else list(names), weights)
    storage.write_json(place(data_root, _id()), asdict(use))


def _id() -> str:
    return environment.run_id() or f"{socket.gethostname()}-{os.getpid()}"
