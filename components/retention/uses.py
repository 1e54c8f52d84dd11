"""What runs that begin need of a data root, before any record of theirs tells it.

A step of the data notes down that its run needs whatever data there are, before it looks at them; when it has
ended it notes down which. It does so while it holds the data root's lease: whoever frees space holds it too,
and so either sees the note, or has ended before the step looks.
"""

import os
import socket
import time
from typing import Any

from components import run_ids
from components.retention import FOLDER, things
from trainer import storage
from trainer.storage import leases

_LASTS = 7 * 24 * 3600.0
"""Seconds for which a note of a step that has ended counts: so long may a run wait for its training."""

_LASTS_BEGUN = 2 * 24 * 3600.0
"""Seconds for which a note of a step that has not ended counts: so long may one pod have its part."""

_PATIENCE = 3600.0
"""Seconds for which a step waits for the end of a pruning."""

_DATA = ("raw/", "shards/", "images/", "versions/")


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
    if storage.exists(_place(data_root)):
        note = storage.read_json(_place(data_root))
        _write(data_root, note["names"], note["weights"])


def end(data_root: str, names: list[str], weights: str = "") -> None:
    """Note down what of the data root this run needs: names of things; without any it needs nothing.

    Raises:
        StorageError: the data root cannot be written.
    """
    if names:
        _write(data_root, names, weights)
    else:
        storage.delete(_place(data_root))


def apply(data_root: str, everything: dict[str, things.Thing], now: float) -> None:
    """Keep what runs that begin need.

    Args:
        data_root: URI under which data are kept.
        everything: what it holds.
        now: seconds since 1970.

    Raises:
        StorageError: a note cannot be read, or is damaged.
    """
    for run, note in _notes(data_root).items():
        if _is_late(note, now):
            continue
        for thing in everything.values():
            needs_all = note["names"] is None and thing.name.startswith(_DATA)
            if needs_all or thing.has(note["weights"]) or thing.name in (note["names"] or ()):
                thing.keep(f"the run {run} begins")


def expired(data_root: str, now: float) -> list[str]:
    """Return the URIs of notes that do not count any more."""
    folder = storage.join(data_root, FOLDER, "uses")
    late = [run for run, note in _notes(data_root).items() if _is_late(note, now)]
    return [storage.join(folder, f"{run}.json") for run in late]


def _is_late(note: dict[str, Any], now: float) -> bool:
    return bool(now - note["began"] > (_LASTS_BEGUN if note["names"] is None else _LASTS))


def _notes(data_root: str) -> dict[str, dict[str, Any]]:
    folder = storage.join(data_root, FOLDER, "uses")
    names = [name for name in storage.list_files(folder) if name.endswith(".json")]
    notes = {name.removesuffix(".json"): things.read_listed(storage.join(folder, name)) for name in names}
    return {run: note for run, note in notes.items() if note}


def _write(data_root: str, names: list[str] | None, weights: str) -> None:
    note = {"kind": "use", "version": 1, "began": time.time(), "names": names, "weights": weights}
    storage.write_json(_place(data_root), note)


def _place(data_root: str) -> str:
    return storage.join(data_root, FOLDER, "uses", f"{_id()}.json")


def _id() -> str:
    return run_ids.current() or f"{socket.gethostname()}-{os.getpid()}"
