"""The form of a sample in the shards: what its JSON file holds, with boxes in pixels of the stored image."""

from typing import Any, NotRequired, TypedDict


class Annotation(TypedDict):
    """One box."""

    category_id: int
    """Label."""
    bbox: list[float]
    """x, y, width, height."""
    area: float
    iscrowd: int


class Record(TypedDict):
    """What is known of one stored image."""

    image_id: int
    file_name: str
    width: int
    height: int
    annotations: list[Annotation]
    original_id: NotRequired[int | str]
    extra: NotRequired[dict[str, Any]]
    """Further data of the source, in the source's form."""


Sample = tuple[bytes, Record]
"""A stored JPEG and its record."""


class IndexedRecord(Record):
    """A record in a shard's sidecar, with the fields of `shard_folder.SAMPLE` that locate it."""

    offset: int
    length: int
    json_offset: int
    json_length: int
    crc32: int
