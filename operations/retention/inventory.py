"""The artifacts below a data root: whole folders, and single images of sources; pins."""

from dataclasses import dataclass, field
from typing import Any

from operations.retention import FOLDER
from trainer import storage
from trainer.base.errors import ConfigError, MissingError
from trainer.launching import leases

_DEPTH = {"runs": 1, "raw": 1, "shards": 1, "images": 1, "models": 2, "versions": 1, "tuning": 2}
_PATIENCE = 600.0  # Seconds for which a pin waits for the end of a pruning.


@dataclass
class Artifact:
    """A part of a data root that is kept or deleted as a whole."""

    name: str  # Of its folder or file, relative to the data root.
    place: str  # Its URI.
    size: int = 0  # Bytes.
    modified: float | None = 0.0
    """Time of its newest file, in seconds since 1970; None if the store does not say."""
    files: list[str] = field(default_factory=list)
    """Names relative to its folder; [""] if it is a file itself; [] for images, which may be millions."""
    why: list[str] = field(default_factory=list)  # Reasons to keep it.
    spare: dict[str, int] = field(default_factory=dict)
    """Of kept images: those that nothing kept refers to, and their bytes."""

    def keep(self, reason: str) -> None:
        """Note down a reason to keep it, once."""
        if reason not in self.why:
            self.why.append(reason)

    @property
    def kind(self) -> str:
        """The folder of the data root that it is in."""
        return self.name.partition("/")[0]

    @property
    def freed(self) -> int:
        """Bytes to be deleted."""
        return sum(self.spare.values()) if self.why else self.size

    def has(self, uri: str) -> bool:
        """Whether it contains a file, given its URI, which may have another root on another machine."""
        return f"/{self.name}/" in f"/{uri}" or uri.startswith(f"{self.place}/")

    def see(self, name: str, state: storage.FileState) -> None:
        """Add one of its files."""
        self.size += state.size
        known = state.modified is not None and self.modified is not None
        self.modified = max(self.modified or 0.0, state.modified or 0.0) if known else None
        if self.kind != "images":
            self.files.append(name)


def read_listed(uri: str) -> dict[str, Any]:
    """Return a record that was listed; {} if another process, such as `data forget`, has deleted it since."""
    try:
        return dict(storage.read_json(uri))
    except MissingError:
        return {}


def inventory(data_root: str, runs: str = "") -> dict[str, Artifact]:
    """Return the artifacts by name; `runs` is the URI of a folder elsewhere with further runs."""
    artifacts: dict[str, Artifact] = {}
    for kind, depth in _DEPTH.items():
        for name, state in storage.scan(storage.join(data_root, kind)):
            parts = name.split("/")
            if kind != "versions" and len(parts) <= depth:
                continue  # A model's `current`, or a file of nobody's.
            key = "/".join([kind, *parts[:depth]])
            artifact = artifacts.setdefault(key, Artifact(key, storage.join(data_root, key)))
            artifact.see("/".join(parts[depth:]), state)
    for name, state in storage.scan(runs) if runs else ():
        first, _, rest = name.partition("/")
        if not rest:
            continue
        place = storage.join(runs, first)
        artifact = artifacts.setdefault(f"runs/{first}", Artifact(f"runs/{first}", place))
        if artifact.place == place:
            artifact.see(rest, state)
        else:
            artifact.keep(f"{runs} has a run of that name too")
    return artifacts


def pin(data_root: str, name: str, runs: str = "") -> str:
    """Keep an artifact, given by its name or that of a run alone, from now on; return its name."""
    with leases.hold(leases.of_data_root(data_root), "a pin", patience=_PATIENCE):
        everything = inventory(data_root, runs)
        whole = name if name in everything else f"runs/{name}"
        if whole not in everything:
            raise ConfigError(
                f"there is no {name} in {data_root}",
                fix="name a run, or an artifact as `kubedet data prune --keep 1 --dry-run` does",
            )
        storage.create(storage.join(data_root, FOLDER, "pins", whole), b"")
    return whole


def unpin(data_root: str, name: str) -> str:
    """Unpin an artifact; return its name."""
    known = pinned(data_root)
    whole = name if name in known else f"runs/{name}"
    if whole not in known:
        raise ConfigError(f"{name} is not pinned", fix=f"pinned: {', '.join(sorted(known)) or 'nothing'}")
    storage.delete(storage.join(data_root, FOLDER, "pins", whole))
    return whole


def pinned(data_root: str) -> frozenset[str]:
    """Return the names of the artifacts that are pinned."""
    return frozenset(storage.list_files(storage.join(data_root, FOLDER, "pins")))
