"""Types of an image's annotations: rows of raw tables, and records of samples in shards."""

from typing import Any, NotRequired, TypedDict


class RawBox(TypedDict):
    """A box of a raw table, as given by the source."""

    category: int
    x: float
    y: float
    w: float
    h: float
    area: float
    iscrowd: int


def to_bbox(box: RawBox) -> list[float]:
    """Return [x, y, width, height] of a raw box, unchanged."""
    return [box["x"], box["y"], box["w"], box["h"]]


class RawRow(TypedDict):
    """A row of a raw table (`raw_folder.ROW`); rows that a source yields have no id and key yet."""

    image_id: int
    key: str
    file_name: str
    origin: str
    width: int
    height: int
    boxes: list[RawBox]
    original_id: str  # Encoded as JSON, as is `extra`.
    fault_reason: str
    fault_detail: str
    version: str
    extra: str


class Annotation(TypedDict):
    """A box of a sample."""

    category_id: int  # Label.
    bbox: list[float]  # x, y, width, height in pixels of the stored image.
    area: float
    iscrowd: int


class AnnotatedImage(TypedDict):
    """The size of an image, in pixels, and its boxes."""

    width: int
    height: int
    annotations: list[Annotation]


class Record(AnnotatedImage):
    """The JSON file of a sample."""

    image_id: int
    file_name: str
    original_id: NotRequired[int | str]
    extra: NotRequired[dict[str, Any]]  # Additional data of the source, unchanged.
    tile: NotRequired[list[int]]
    """Left, top, width and height in the original image, if the sample is a tile (`trainer.data.tiles`)."""


Sample = tuple[bytes, Record]  # A stored JPEG and its record.


class IndexedRecord(Record):
    """A record in a shard's sidecar, with its location in the shard; see `shard_folder.SAMPLE`."""

    offset: int
    length: int
    json_offset: int
    json_length: int
    crc32: int
