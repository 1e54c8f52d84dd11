"""A whole evaluation that is kept: what it was computed from, and the hashes of its files."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from trainer import storage
from trainer.errors import DamagedError, MissingError

RECORD = "made_from.json"
"""File of an evaluation's folder that says what the others were computed from; the last one of all."""


def keep(folder: str, names: Iterable[str], made_from: Mapping[str, str]) -> None:
    """Note what the files of an evaluation were computed from.

    Args:
        folder: URI of its folder.
        names: of the files, whole by now.
        made_from: everything that a result follows from, by name.

    Raises:
        StorageError: a file cannot be read, or the note not be written.
    """
    files = {name: _sha256(storage.join(folder, name)) for name in names}
    storage.write_json(storage.join(folder, RECORD), {"made_from": dict(made_from), "files": files})


def is_kept(folder: str, made_from: Mapping[str, str]) -> bool:
    """Tell whether a folder has the evaluation of just this, and each file as it was written.

    Raises:
        StorageError: the folder cannot be read.
    """
    uri = storage.join(folder, RECORD)
    if not storage.exists(uri):
        return False
    try:
        record: Any = storage.read_json(uri)
        if not isinstance(record, dict) or record.get("made_from") != dict(made_from):
            return False
        files = record["files"]
        return bool(files) and all(_sha256(storage.join(folder, name)) == files[name] for name in files)
    except (MissingError, DamagedError, KeyError, ValueError, TypeError):  # It is written anew.
        return False


def _sha256(uri: str) -> str:
    return hashlib.sha256(storage.read_bytes(uri)).hexdigest()
