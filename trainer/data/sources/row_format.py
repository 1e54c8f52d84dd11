"""The row format in which sources give their images, in batches of bounded size."""

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import pyarrow as pa

from trainer.data.sources.source import Box, Entry

ROWS = 1000
"""Images of a batch of rows."""

BOX = pa.struct(
    [("category", pa.int32()), *((name, pa.float64()) for name in "xywh"), ("area", pa.float64()),
     ("iscrowd", pa.int8())]
)  # fmt: skip
"""A box in pixels as the source has it; NaN where the source's is not four numbers."""

SOURCE_ROW = pa.schema(
    [
        ("file_name", pa.string()),
        ("origin", pa.string()),
        ("version", pa.string()),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("orientation", pa.int8()),
        ("original_id", pa.string()),
        ("fault_reason", pa.string()),
        ("fault_detail", pa.string()),
        ("extra", pa.string()),
        ("boxes", pa.list_(BOX)),
    ]
)
"""What a source tells of an image: the fields of `Entry`; `original_id` and `extra` as JSON texts."""

_NAN = (float("nan"),) * 4


class Entries(list[Entry]):
    """The images of a split that fits in memory, as a list."""

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield rows of SOURCE_ROW, a thousand at a time."""
        yield from batches_of(self)


def batches_of(entries: Iterable[Entry]) -> Iterator[pa.RecordBatch]:
    """Yield entries as rows of SOURCE_ROW, ROWS at a time."""
    rest = iter(entries)
    while batch := list(islice(rest, ROWS)):
        yield batch_of(batch)


def batch_of(entries: list[Entry], boxes: pa.ListArray | None = None) -> pa.RecordBatch:
    """Return entries as rows of SOURCE_ROW.

    Args:
        entries: images.
        boxes: those of each image, where they are not in the entries.
    """
    rows = [
        {
            "file_name": _text(entry.file_name),
            "origin": _text(entry.origin),
            "version": entry.version,
            "width": entry.width,
            "height": entry.height,
            "orientation": entry.orientation,
            "original_id": json.dumps(entry.original_id),
            "fault_reason": entry.fault[0] if entry.fault else "",
            "fault_detail": _text(entry.fault[1]) if entry.fault else "",
            "extra": json.dumps(entry.extra) if entry.extra else "",
            "boxes": [_box(box) for box in entry.boxes],
        }
        for entry in entries
    ]
    batch = pa.RecordBatch.from_pylist(rows, schema=SOURCE_ROW)
    return batch if boxes is None else batch.set_column(batch.num_columns - 1, "boxes", boxes)


def _text(text: str) -> str:
    """Return text that is UTF-8: names of files may hold bytes that are not."""
    return text.encode("utf-8", "backslashreplace").decode()


def _box(box: Box) -> tuple[Any, ...]:
    return (box.category, *(box.bbox or _NAN), box.area, box.iscrowd)
