"""Pins: things of a data root that somebody wants kept, whatever else needs them or not."""

from operations.retention import FOLDER
from operations.retention.inventory import inventory
from trainer import storage
from trainer.base.errors import ConfigError
from trainer.storage import leases

_PATIENCE = 600.0
"""Seconds for which the end of a pruning is waited for."""


def pin(data_root: str, name: str, runs: str = "") -> str:
    """Keep a thing from now on; returns its name.

    Args:
        data_root: URI under which data are kept.
        name: of a thing, as `runs/20261121-4f0c`, or of a run alone.
        runs: see `things.inventory`.

    Raises:
        ConfigError: there is no such thing.
        StorageError: the data root cannot be read or written, or somebody frees space in it all the time.
    """
    with leases.hold(leases.of_data_root(data_root), "a pin", patience=_PATIENCE):
        everything = inventory(data_root, runs)
        whole = name if name in everything else f"runs/{name}"
        if whole not in everything:
            raise ConfigError(
                f"there is no {name} in {data_root}",
                fix="name a run, or a thing as `kubedet data prune --keep 1 --dry-run` does",
            )
        storage.create(storage.join(data_root, FOLDER, "pins", whole), b"")
    return whole


def unpin(data_root: str, name: str) -> str:
    """Let a thing go again when nothing else needs it; returns its name.

    Raises:
        ConfigError: it is not pinned.
        StorageError: the data root cannot be read or written.
    """
    known = pinned(data_root)
    whole = name if name in known else f"runs/{name}"
    if whole not in known:
        raise ConfigError(f"{name} is not pinned", fix=f"pinned: {', '.join(sorted(known)) or 'nothing'}")
    storage.delete(storage.join(data_root, FOLDER, "pins", whole))
    return whole


def pinned(data_root: str) -> frozenset[str]:
    """Return the names of the things that are pinned."""
    return frozenset(storage.list_files(storage.join(data_root, FOLDER, "pins")))
