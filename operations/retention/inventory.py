"""What lies below a data root, as it is kept or freed: in whole folders, and of sources each image."""

from dataclasses import dataclass, field
from typing import Any

from trainer import storage
from trainer.base.errors import MissingError

_DEPTH = {"runs": 1, "raw": 1, "shards": 1, "images": 1, "models": 2, "versions": 1, "tuning": 2}


@dataclass
class Thing:
    """Something below a data root that is kept or freed as a whole."""

    name: str
    """Of its folder or file, relative to the data root."""
    place: str
    """Its URI."""
    size: int = 0
    """Bytes."""
    modified: float | None = 0.0
    """When the newest of its files was written, in seconds since 1970; None where a store does not tell."""
    files: list[str] = field(default_factory=list)
    """Names relative to its folder; [""] where it is a file itself, [] of images, which may be millions."""
    why: list[str] = field(default_factory=list)
    """Reasons to keep it; none: it may go."""
    spare: dict[str, int] = field(default_factory=dict)
    """Of images that are kept: those that nothing kept refers to, and their bytes."""

    def keep(self, reason: str) -> None:
        """Note down a reason to keep it, once."""
        if reason not in self.why:
            self.why.append(reason)

    @property
    def freed(self) -> int:
        """Bytes that go."""
        return sum(self.spare.values()) if self.why else self.size

    def has(self, uri: str) -> bool:
        """Whether a file is one of its own, given its URI, which may begin otherwise on another machine."""
        return f"/{self.name}/" in f"/{uri}" or uri.startswith(f"{self.place}/")

    def see(self, name: str, state: storage.FileState) -> None:
        """Count a file of it in."""
        self.size += state.size
        known = state.modified is not None and self.modified is not None
        self.modified = max(self.modified or 0.0, state.modified or 0.0) if known else None
        if not self.name.startswith("images/"):
            self.files.append(name)


def read_listed(uri: str) -> dict[str, Any]:
    """Return a record that was listed; {} if another process, such as `data forget`, has deleted it since.

    Raises:
        StorageError: it cannot be read, or is damaged.
    """
    try:
        return dict(storage.read_json(uri))
    except MissingError:
        return {}


def inventory(data_root: str, runs: str = "") -> dict[str, Thing]:
    """Return what the data root holds by name.

    Args:
        data_root: URI under which data are kept.
        runs: URI of a folder elsewhere whose folders are runs; may be empty.

    Raises:
        StorageError: it cannot be listed.
    """
    things: dict[str, Thing] = {}
    for kind, depth in _DEPTH.items():
        folder = storage.join(data_root, kind)
        for name, state in storage.scan(folder):
            parts = name.split("/")
            if kind != "versions" and len(parts) <= depth:
                continue  # A model's `current`, or a file of nobody's.
            key = "/".join([kind, *parts[:depth]])
            thing = things.setdefault(key, Thing(key, storage.join(data_root, key)))
            thing.see("/".join(parts[depth:]), state)
    for name, state in storage.scan(runs) if runs else ():
        first, _, rest = name.partition("/")
        if not rest:
            continue
        place = storage.join(runs, first)
        thing = things.setdefault(f"runs/{first}", Thing(f"runs/{first}", place))
        if thing.place == place:
            thing.see(rest, state)
        else:
            thing.keep(f"{runs} has a run of that name too")
    return things
