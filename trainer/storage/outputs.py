"""Protects files that kubedet did not write from being replaced."""

import json
import os
from collections.abc import Iterable
from contextlib import suppress

from trainer import storage
from trainer.base.errors import ConfigError

RECORD = ".kubedet-files"  # in a folder of results: a JSON list of the names that kubedet wrote there


def claim(folder: str, names: Iterable[str], inputs: Iterable[str] = ()) -> None:
    """Refuse to replace files that kubedet did not write or that a command reads, and record the names.

    Args:
        folder: URI of the folder of the results.
        names: files and folders that are going to be written there.
        inputs: URIs that the command reads.

    Raises:
        ConfigError: a file would be replaced.
    """
    place = storage.join(folder, RECORD)
    known: set[str] = set()
    with suppress(ValueError, TypeError):  # A damaged record is ignored.
        known = set(json.loads(storage.read_bytes(place))) if storage.exists(place) else known
    wanted = set(names)
    read = set(map(_canonical, filter(None, inputs)))
    for name in sorted(wanted):
        uri, problem = storage.join(folder, name), ""
        if not read.isdisjoint((_canonical(uri), _canonical(folder))):
            problem = f"{uri} is or belongs to an input of the command, and would be replaced"
        elif name not in known and (found := _first_file(uri)):
            problem = f"{found} was not written by kubedet, and would be replaced"
        if problem:
            raise ConfigError(problem, fix="name another folder or file with -o")
    if not wanted <= known:
        storage.write_bytes(place, json.dumps(sorted(known | wanted)).encode())


def claim_file(uri: str, inputs: Iterable[str] = ()) -> None:
    """Claim a single file; see `claim`."""
    claim(storage.parent(uri), [storage.absolute(uri).rpartition("/")[2]], inputs)


def require_new(folder: str) -> None:
    """Refuse a folder that already contains files, which may be the user's."""
    if found := _first_file(folder):
        problem = f"{folder} already exists and may contain your changes ({found})"
        raise ConfigError(problem, fix="choose another folder with -o, or delete this one")


def _canonical(uri: str) -> str:
    return os.path.realpath(storage.local_path(uri)) if storage.is_local(uri) else storage.absolute(uri)


def _first_file(uri: str) -> str:
    """Return the URI of a file or of the first one in a folder; "" if there is none."""
    if storage.exists(uri):
        return uri
    first = next((name for name, _ in storage.scan(uri) if name != RECORD), "")
    return storage.join(uri, first) if first else ""
