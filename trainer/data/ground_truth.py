"""The cleaned annotations of a split in COCO's form, which evaluators take.

That of a large split is written block by block: no more than a block is in memory.
"""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainer import storage

_IMAGE_KEYS = ("file_name", "width", "height", "original_id", "extra")
Row = dict[str, Any]
"""A sample as a sidecar has it."""


class GroundTruthWriter:
    """Takes the samples of shards in order, and writes them as one JSON file."""

    def __init__(self, categories: list[dict[str, Any]], folder: Path) -> None:
        """Keep what comes in an empty local folder until `write`."""
        self._categories = categories
        self._parts = {name: folder / name for name in ("images", "annotations")}
        for path in self._parts.values():
            path.touch()
        self._block, self._pending, self._boxes = -1, list[Row](), 0

    def add(self, block: int, rows: list[Row]) -> None:
        """Take samples of a block; blocks come in order, and so do their ids."""
        if block != self._block:
            self._flush()
            self._block = block
        self._pending += rows

    def write(self, uri: str) -> None:
        """Write `{"categories", "images", "annotations"}`, whole or not at all."""
        self._flush()
        with storage.new_file(uri) as path, path.open("w", encoding="utf-8") as whole:
            whole.write(f'{{"categories": {json.dumps(self._categories, ensure_ascii=False)}')
            for name, part in self._parts.items():
                whole.write(f', "{name}": [')
                with part.open(encoding="utf-8") as file:
                    shutil.copyfileobj(file, whole)
                whole.write("]")
            whole.write("}")

    def _flush(self) -> None:
        made = ground_truth(self._pending, self._categories, self._boxes)
        for name, part in self._parts.items():
            if made[name]:
                with part.open("a", encoding="utf-8") as file:
                    file.write(", " if file.tell() else "")
                    file.write(json.dumps(made[name], ensure_ascii=False)[1:-1])
        self._boxes += len(made["annotations"])
        self._pending = []


def ground_truth(
    rows: Iterable[Row], categories: list[dict[str, Any]], boxes_before: int = 0
) -> dict[str, Any]:
    """Return samples in COCO's form, in order of their ids; labels are the category ids.

    Args:
        rows: of sidecars.
        categories: of the data set.
        boxes_before: the number after which those of the boxes begin.
    """
    rows = sorted(rows, key=lambda row: row["image_id"])
    images = [{"id": row["image_id"], **{key: row[key] for key in _IMAGE_KEYS if key in row}} for row in rows]
    labels = {category["name"]: category["id"] for category in categories}
    for image in images:
        if "verified" in image.get("extra", {}):
            # Of the classes that people looked for in the image, those that are kept.
            image["verified"] = sorted(labels[name] for name in image["extra"]["verified"] if name in labels)
    annotations = [
        {"image_id": row["image_id"], **annotation} for row in rows for annotation in row["annotations"]
    ]
    for number, annotation in enumerate(annotations, start=boxes_before + 1):
        annotation["id"] = number
    return {"categories": categories, "images": images, "annotations": annotations}
