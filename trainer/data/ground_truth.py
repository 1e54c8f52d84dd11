"""The cleaned annotations of a split in COCO's form, which evaluators take.

That of a large split is written block by block: no more than a block is in memory.
"""

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainer import storage
from trainer.data.raw_folder import Category
from trainer.data.shard_folder import StoredFile

_IMAGE_KEYS = ("file_name", "width", "height", "original_id", "extra")
Row = dict[str, Any]
"""A sample as a sidecar has it."""


class Classes:
    """The classes of a data set and their hierarchy."""

    def __init__(self, categories: list[Category], hierarchy: Mapping[str, Sequence[int]]) -> None:
        """Take categories and the labels above each, by its label as text."""
        self.categories = [asdict(category) for category in categories]
        """In COCO's form."""
        self.header: dict[str, Any] = {"categories": self.categories}
        if hierarchy:
            self.header["hierarchy"] = dict(hierarchy)
        self._labels = {category.name: category.id for category in categories}
        self._above = {int(label): set(others) for label, others in hierarchy.items()}
        self._below: dict[int, set[int]] = {}
        for label, others in self._above.items():
            for other in others:
                self._below.setdefault(other, set()).add(label)

    def verified(self, answers: Mapping[str, int]) -> list[int]:
        """Return the labels that are known to be in an image or not.

        What is in it holds for the classes above, what is not for those below.

        Args:
            answers: 1 or 0 by class name; classes that are not kept are left out.
        """
        labels: set[int] = set()
        for label, present in ((self._labels.get(name), present) for name, present in answers.items()):
            if label is not None:
                labels |= {label} | (self._above if present else self._below).get(label, set())
        return sorted(labels)

    def negatives(self, record: Mapping[str, Any]) -> list[int]:
        """Return the labels of which an image is known to have no object but those with boxes.

        They are what people found to be absent, with the classes below, and what they found and therefore
        boxed. Not so the classes above one that is there, whose objects have no boxes of their own; nor those
        with a box around a group, which is no target.

        Args:
            record: of a sample: its annotations, and `extra` with {"verified": {NAME: 1 or 0}}.
        """
        answers = record.get("extra", {}).get("verified", {})
        known = [(self._labels[name], value) for name, value in answers.items() if name in self._labels]
        present = {box["category_id"] for box in record["annotations"]} | {
            label for label, value in known if value
        }
        groups = {box["category_id"] for box in record["annotations"] if box["iscrowd"]}
        absent = {label for label, value in known if not value} - present
        below = {one for label in absent for one in self._below.get(label, ())}
        above = {one for label in present for one in self._above.get(label, ())}
        return sorted((present | absent | below) - above - groups)


class GroundTruthWriter:
    """Takes the samples of shards in order, and writes them as one JSON file."""

    def __init__(self, classes: Classes, folder: Path) -> None:
        """Collect the parts in an empty local folder until `write`."""
        self._classes = classes
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

    def write(self, uri: str) -> StoredFile:
        """Write what `ground_truth` gives of all samples, whole or not at all."""
        self._flush()
        digest, size = "", 0
        with storage.new_file(uri, sha256=lambda: digest, confirm=True) as path:
            with path.open("w", encoding="utf-8") as whole:
                whole.write(json.dumps(self._classes.header, ensure_ascii=False)[:-1])
                for name, part in self._parts.items():
                    whole.write(f', "{name}": [')
                    with part.open(encoding="utf-8") as file:
                        shutil.copyfileobj(file, whole)
                    whole.write("]")
                whole.write("}")
            with path.open("rb") as written:
                digest = hashlib.file_digest(written, "sha256").hexdigest()
            size = path.stat().st_size
        return StoredFile(size, digest)

    def _flush(self) -> None:
        truth = ground_truth(self._pending, self._classes, self._boxes)
        for name, part in self._parts.items():
            if truth[name]:
                with part.open("a", encoding="utf-8") as file:
                    file.write(", " if file.tell() else "")
                    file.write(json.dumps(truth[name], ensure_ascii=False)[1:-1])
        self._boxes += len(truth["annotations"])
        self._pending = []


def ground_truth(rows: Iterable[Row], classes: Classes, boxes_before: int = 0) -> dict[str, Any]:
    """Return samples in COCO's form, in order of their ids; labels are the category ids.

    Besides COCO's fields, images have "verified" where the source tells: the labels that people looked
    for in them. The whole has "hierarchy" where the classes have an order: the labels of all classes
    above one, by its label as text.

    Args:
        rows: of sidecars.
        classes: of the data set.
        boxes_before: the number after which those of the boxes begin.
    """
    rows = sorted(rows, key=lambda row: row["image_id"])
    images = [{"id": row["image_id"], **{key: row[key] for key in _IMAGE_KEYS if key in row}} for row in rows]
    for image in images:
        if "verified" in image.get("extra", {}):
            image["verified"] = classes.verified(image["extra"]["verified"])
    annotations = [
        {"image_id": row["image_id"], **annotation} for row in rows for annotation in row["annotations"]
    ]
    for number, annotation in enumerate(annotations, start=boxes_before + 1):
        annotation["id"] = number
    return {**classes.header, "images": images, "annotations": annotations}
