"""The forms of an image's annotations: a row of the raw tables, and the record of a sample in the shards."""

from typing import Any, NotRequired, TypedDict


class RawBox(TypedDict):
    """A box of a raw table, as the source has it."""

    category: int
    x: float
    y: float
    w: float
    h: float
    area: float
    iscrowd: int


def to_bbox(box: RawBox) -> list[float]:
    """Return [x, y, width, height] of a box, as the source has it."""
    return [box["x"], box["y"], box["w"], box["h"]]


class RawRow(TypedDict):
    """A row of a raw table (`raw_folder.ROW`); rows of a source have no id and no key."""

    image_id: int
    key: str
    file_name: str
    origin: str
    width: int
    height: int
    boxes: list[RawBox]
    original_id: str  # JSON, as is `extra`.
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
    extra: NotRequired[dict[str, Any]]  # Further data of the source, in the source's form.
    tile: NotRequired[list[int]]
    """Left, top, width and height in the image that this sample is a tile of (`trainer.data.tiles`)."""


Sample = tuple[bytes, Record]  # A stored JPEG and its record.


class IndexedRecord(Record):
    """A record in a shard's sidecar, with the fields of `shard_folder.SAMPLE` that locate it."""

    offset: int
    length: int
    json_offset: int
    json_length: int
    crc32: int
