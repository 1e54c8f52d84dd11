"""Images that no run may have any more: `<data_root>/forgotten.json`.

Every download leaves them out. An image is forgotten in the sources that it was seen in, since another set
may call another image by the same name; or, where nobody saw it, in all of them.
"""

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from trainer import storage
from trainer.data import image_keys

FILE = "forgotten.json"


@dataclass(frozen=True)
class Forgotten:
    """One image that is to be forgotten."""

    key: str
    file_name: str
    """As its source has it."""
    source: str = ""
    """The only one that it is left out of; empty is all."""
    since: str = ""
    """When it was asked for."""


def read(data_root: str) -> list[Forgotten]:
    """Return all images that are to be forgotten.

    Raises:
        StorageError: the list cannot be read.
    """
    uri = storage.join(data_root, FILE)
    return [Forgotten(**item) for item in storage.read_json(uri)["images"]] if storage.exists(uri) else []


def add(data_root: str, images: list[Forgotten]) -> list[Forgotten]:
    """Put images on the list; return those that were not there.

    Raises:
        StorageError: the list cannot be read or written.
    """
    before = read(data_root)
    listed = {(item.key, item.file_name, item.source) for item in before}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    added = [
        Forgotten(item.key, item.file_name, item.source, now)
        for item in dict.fromkeys(images)
        if (item.key, item.file_name, item.source) not in listed
    ]
    if added:
        record: dict[str, Any] = {"kind": "forgotten", "version": 1}
        record["images"] = [asdict(item) for item in [*before, *added]]
        storage.write_json(storage.join(data_root, FILE), record)
    return added


def names(data_root: str, source: str) -> frozenset[str]:
    """Return keys and file names that are left out of a source.

    Raises:
        StorageError: the list cannot be read.
    """
    return frozenset(
        name
        for item in read(data_root)
        if item.source in ("", source)
        for name in (item.key, item.file_name)
        if name
    )


def is_meant(file_name: str, forgotten: frozenset[str]) -> bool:
    """Whether an image is one of those that are left out, by its file name or its key."""
    if file_name in forgotten:
        return True
    stem = image_keys.stem(file_name)
    return stem in forgotten or image_keys.distinct(stem, file_name) in forgotten
