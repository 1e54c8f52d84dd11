"""Images that every download leaves out: `<data_root>/forgotten.json`.

An image is excluded from one source, since another source may use the same name, or from all of them.
"""

from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime

from trainer import storage
from trainer.base import typed_json

FILE = "forgotten.json"


@dataclass(frozen=True)
class Exclusion:
    """One image that is left out."""

    key: str
    file_name: str  # As its source has it.
    source: str = ""  # The only one that it is left out of; empty is all.
    since: str = ""  # When it was requested.


def read(data_root: str) -> list[Exclusion]:
    """Return all exclusions of a data root."""
    uri = storage.join(data_root, FILE)
    if not storage.exists(uri):
        return []
    images = storage.read_json(uri).get("images")
    return typed_json.load(list[Exclusion], images, uri, "restore a copy of this file")


def add(data_root: str, images: list[Exclusion]) -> list[Exclusion]:
    """Add images to the list; return those that were not in it."""
    before = read(data_root)
    listed = {replace(item, since="") for item in before}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    new = dict.fromkeys(replace(item, since="") for item in images)
    added = [replace(item, since=now) for item in new if item not in listed]
    if added:
        rows = [asdict(item) for item in [*before, *added]]
        storage.write_json(storage.join(data_root, FILE), {"kind": "forgotten", "version": 1, "images": rows})
    return added


def names(data_root: str, source: str) -> frozenset[str]:
    """Return keys and file names that are left out of a source."""
    listed = [item for item in read(data_root) if item.source in ("", source)]
    return frozenset(name for item in listed for name in (item.key, item.file_name) if name)
