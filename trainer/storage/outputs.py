"""Prevents commands from replacing files that kubedet did not write."""

import json
import os
from collections.abc import Iterable
from contextlib import suppress

from trainer import storage
from trainer.base.errors import ConfigError

RECORD = ".kubedet-files"  # in an output folder: a JSON list of the names that kubedet wrote there


def claim(folder: str, names: Iterable[str], inputs: Iterable[str] = ()) -> None:
    """Check that outputs replace neither other files nor inputs, and record their names.

    Args:
        folder: URI of the output folder.
        names: files and folders that the command will write there.
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
            problem = f"{uri} is an input of the command or part of one, and would be replaced"
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
    """Raise ConfigError if a folder already contains files, which may be the user's."""
    if found := _first_file(folder):
        problem = f"{folder} already exists and may contain your changes ({found})"
        raise ConfigError(problem, fix="choose another folder with -o, or delete this one")


def _canonical(uri: str) -> str:
    return os.path.realpath(storage.local_path(uri)) if storage.is_local(uri) else storage.absolute(uri)


def _first_file(uri: str) -> str:
    """Return the URI of a file, or of the first file in a folder; "" if there is none."""
    if storage.exists(uri):
        return uri
    first = next((name for name, _ in storage.scan(uri) if name != RECORD), "")
    return storage.join(uri, first) if first else ""
