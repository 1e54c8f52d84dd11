"""The files of a folder of shards: read by the hashes that are known of them; what is damaged is noted.

For a note, `<file>.damaged`, the next shard step writes that file anew: without it the step would have to
read all shards to know. It is removed then.
"""

import hashlib
import logging
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from trainer import storage
from trainer.base.errors import DamagedError, DataError, KubedetError, StorageError

VERSION = 5
"""Of shards and their index. Raise it when the same raw images give other shards."""

INDEX = "index.json"
NOTE = ".damaged"
REPAIR = "run `kubedet data verify --repair {}`, or the command that made it again: it writes this file anew"
_BLOCK = 4 * 1024 * 1024
_LOG = logging.getLogger("data")

_COUNTS = {"samples": int, "boxes": int}
_SHARD = {"name": str, **_COUNTS, "bytes": int, "sha256": str}


def read_index(uri: str) -> dict[str, Any]:
    """Return the index of a folder of shards, `uri` as it is now.

    Raises:
        StorageError: it is missing, cannot be read, or is damaged.
        DataError: it is of a newer version, or of another form.
    """
    shape = {
        "fingerprint": str,
        "source": str,
        "raw_fingerprint": str,
        "categories": [{"id": int, "name": str}],
        "hierarchy?": {"*": [int]},
        "splits": {"*": {**_COUNTS, "shards": [_SHARD]}},
        "problems": {"*": int},
        "class_counts": {"*": {"*": int}},
        "files?": {"*": {"bytes": int, "sha256": str}},
        "settings?": {},
    }
    form = storage.Form("shards", VERSION, shape, _remedy(uri))
    index: dict[str, Any] = storage.read_json(storage.join(uri, INDEX), form)
    return index | {"uri": storage.absolute(uri)}


def read_sidecar(uri: str, name: str, *, rows: bool = True) -> dict[str, Any]:
    """Return what is known of one shard; `rows` whether to look at its samples, too.

    Raises:
        StorageError: it is missing, cannot be read, or is damaged, which is noted.
        DataError: it is of another form.
    """
    shape = {"block": int, **_COUNTS, "bytes": int, "sha256": str, "problems": {"*": {"count": int}}}
    shape |= {"rows": [{}]} if rows else {}
    try:
        form = storage.Form(shape=shape, remedy=_remedy(uri))
        sidecar: dict[str, Any] = storage.read_json(storage.join(uri, f"{name}.json"), form)
    except DamagedError:
        note(uri, f"{name}.tar")
        raise
    return sidecar


def read_known(uri: str, name: str, known: dict[str, Any] | None) -> bytes:
    """Return a file that the index names.

    Args:
        uri: the folder.
        name: of the file.
        known: its entry in the index; None where the index is from before there were any.

    Raises:
        DamagedError: it is not what was written.
        StorageError: it is missing or cannot be read.
    """
    try:
        return storage.read_bytes(storage.join(uri, name), sha256=known["sha256"] if known else "")
    except DamagedError as error:
        raise DamagedError(error.message, fix=_remedy(uri)) from None


def digest(uri: str) -> str:
    """Return the sha256 of a file, read from start to end."""
    actual = hashlib.sha256()
    with storage.open_reader(uri) as file:
        while block := file.read(_BLOCK):
            actual.update(block)
    return actual.hexdigest()


def blame(uri: str, split: str, shard: dict[str, Any]) -> KubedetError:
    """Return the error for a sample whose bytes are not what its table says: which of both has changed.

    Args:
        uri: the folder.
        split: of the sample.
        shard: its entry in the index.

    Raises:
        StorageError: the shard cannot be read.
    """
    try:
        actual = digest(storage.join(uri, shard["name"]))
    except DamagedError as error:
        actual = error.message
    if actual == shard["sha256"]:
        name = f"{split}.samples.npy"
        return DataError(
            f"{storage.join(uri, name)} is damaged: {shard['name']} has the bytes that it was written "
            "with, and not the samples that this table says",
            fix=_remedy(uri),
        )
    note(uri, shard["name"])
    return DataError(
        f"{storage.join(uri, shard['name'])} is damaged: it differs from what the index says",
        fix=_remedy(uri),
    )


def note(uri: str, name: str) -> None:
    """Note that a file is damaged, where the folder may be written."""
    with suppress(StorageError):
        storage.write_json(storage.join(uri, name + NOTE), {"kind": "damaged", "version": 1, "file": name})


def noted(uri: str, names: Iterable[str]) -> list[str]:
    """Return the files that are noted as damaged, of the names in a folder."""
    return sorted(name.removesuffix(NOTE) for name in names if name.endswith(NOTE))


def faults(uri: str, index: dict[str, Any]) -> list[str]:
    """Return the files of finished shards that are missing, cut off or damaged, as far as it shows quickly.

    Sizes and notes are those of a listing; tables and ground truth, which are small, are read.
    """
    states = storage.list_states(uri, recursive=True)
    files = index.get("files", {})
    sizes = {shard["name"]: shard["bytes"] for part in index["splits"].values() for shard in part["shards"]}
    names = {name.removesuffix(".tar") + ".json": None for name in sizes}
    actual = [name for name in names if name not in states]
    for name, size in (sizes | {name: file["bytes"] for name, file in files.items()}).items():
        if name not in states or states[name].size != size:
            actual.append(name)
        elif name in files:
            try:
                read_known(uri, name, files[name])
            except DamagedError:
                actual.append(name)
    if not files:  # of an index from before the files were named in it
        others = [f"{split}.samples.npy" for split in index["splits"]]
        others += [f"annotations/{split}.json" for split in index["splits"] if split != "train"]
        actual += [name for name in others if name not in states]
    return sorted({*actual, *noted(uri, states)})


def _remedy(uri: str) -> str:
    return REPAIR.format(uri)
