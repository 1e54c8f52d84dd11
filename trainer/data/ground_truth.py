"""Converts the cleaned annotations of a split to COCO's format for evaluators."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from trainer.data.raw_manifest import Category
from trainer.data.samples import IndexedRecord

_IMAGE_KEYS = ("file_name", "width", "height", "original_id", "extra")


class Classes:
    """The classes of a data set and their hierarchy."""

    def __init__(self, categories: list[Category], hierarchy: Mapping[str, Sequence[int]]) -> None:
        """Set the categories, and the ancestors of each label, by the label as text."""
        self.categories = [
            {key: value for key, value in asdict(category).items() if key != "frequency" or value}
            for category in categories
        ]
        """In COCO's form."""
        self.header: dict[str, Any] = {"categories": self.categories}
        if hierarchy:
            self.header["hierarchy"] = dict(hierarchy)
        self._labels = {category.name: category.id for category in categories}
        self._ancestors = {int(label): set(higher) for label, higher in hierarchy.items()}
        self._descendants: dict[int, set[int]] = {}
        for label, higher in self._ancestors.items():
            for parent in higher:
                self._descendants.setdefault(parent, set()).add(label)

    def verified_labels(self, answers: Mapping[str, int]) -> list[int]:
        """Return the verified labels of an image; `answers` are 1 (present) or 0 (absent) by class name.

        Presence also verifies all ancestors of a class, absence all descendants.
        """
        labels: set[int] = set()
        for name, present in answers.items():
            if (label := self._labels.get(name)) is not None:
                labels |= {label} | (self._ancestors if present else self._descendants).get(label, set())
        return sorted(labels)

    def labels_of(self, names: Iterable[str]) -> list[int]:
        """Return the labels of classes by their names; unknown names are ignored."""
        return sorted(self._labels[name] for name in names if name in self._labels)


class GroundTruthBuilder:
    """Builds the JSON file of a split from its samples, which it keeps in memory as text."""

    def __init__(self, classes: Classes) -> None:
        self._classes = classes
        self._parts: dict[str, list[str]] = {"images": [], "annotations": []}
        self._block, self._pending, self._boxes = -1, list[IndexedRecord](), 0

    def add(self, block: int, rows: list[IndexedRecord]) -> None:
        """Add samples of a block; blocks must be added in order."""
        if block != self._block:
            self._flush()
            self._block = block
        self._pending += rows

    def to_json(self) -> bytes:
        """Return the result of `to_coco` for all samples, as JSON."""
        self._flush()
        lists = "".join(f', "{name}": [{", ".join(parts)}]' for name, parts in self._parts.items())
        header = json.dumps(self._classes.header, ensure_ascii=False)[:-1]
        return f"{header}{lists}}}".encode()

    def _flush(self) -> None:
        truth = to_coco(self._pending, self._classes, self._boxes)
        for name, parts in self._parts.items():
            if truth[name]:
                parts.append(json.dumps(truth[name], ensure_ascii=False)[1:-1])
        self._boxes += len(truth["annotations"])
        self._pending = []


def to_coco(rows: Iterable[IndexedRecord], classes: Classes, boxes_before: int = 0) -> dict[str, Any]:
    """Convert samples to COCO's format, sorted by id; labels become category ids.

    In addition to COCO's fields, images may have "verified", the labels that annotators checked, and LVIS's
    "neg_category_ids" and "not_exhaustive_category_ids". The file may have "hierarchy", the ancestors of each
    label, by the label as text. Ids of boxes begin after `boxes_before`.
    """
    rows = sorted(rows, key=lambda row: row["image_id"])
    images: list[dict[str, Any]] = [
        {"id": row["image_id"]} | {key: value for key, value in row.items() if key in _IMAGE_KEYS}
        for row in rows
    ]
    for image in images:
        if "verified" in image.get("extra", {}):
            image["verified"] = classes.verified_labels(image["extra"]["verified"])
        if "not_exhaustive" in image.get("extra", {}):
            absent = [name for name, answer in image["extra"].get("verified", {}).items() if not answer]
            image["neg_category_ids"] = classes.labels_of(absent)
            image["not_exhaustive_category_ids"] = classes.labels_of(image["extra"]["not_exhaustive"])
    annotations: list[dict[str, Any]] = [
        {"image_id": row["image_id"], **annotation} for row in rows for annotation in row["annotations"]
    ]
    for number, annotation in enumerate(annotations, start=boxes_before + 1):
        annotation["id"] = number
    return {**classes.header, "images": images, "annotations": annotations}
