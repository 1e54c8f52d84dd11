"""Ground truth and predictions, stored as columns to handle millions of boxes."""

import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainer import storage
from trainer.base.errors import EvaluationError, first_line
from trainer.base.os_errors import raise_if_exhausted

MAX_EXAMPLES = 5  # examples of each problem that an error lists

_CHECKSUM_FIELD = "content_sha256"
_EVALUATE_FIX = "evaluate that model again"
_COLUMNS = dict.fromkeys(("image_id", "category_id"), np.int64) | dict.fromkeys(
    ("x", "y", "width", "height", "score"), np.float64
)
_TRUTH_COLUMNS = ("image_ids", "labels", "boxes", "areas", "crowd")


@dataclass(frozen=True)
class Predictions:
    """N detections: image ids and category ids [N] int64, boxes [N, 4] and scores [N] float64.

    Boxes are x, y, width, height in pixels of the image.
    """

    image_ids: np.ndarray
    labels: np.ndarray
    boxes: np.ndarray
    scores: np.ndarray

    def __len__(self) -> int:
        return len(self.image_ids)

    @classmethod
    def from_coco(cls, items: Sequence[Mapping[str, Any]]) -> "Predictions":
        """Convert COCO's results format: [{"image_id", "category_id", "bbox", "score"}]."""
        return cls(*_coco_columns(items), np.array([item["score"] for item in items], np.float64))

    @classmethod
    def join(cls, parts: Sequence["Predictions"]) -> "Predictions":
        """Concatenate predictions and sort them by image id."""
        columns = [np.concatenate(column) for column in zip(*(part.columns() for part in parts), strict=True)]
        order = np.argsort(columns[0], kind="stable")
        image_ids, labels, boxes, scores = (column[order] for column in columns)
        return cls(image_ids, labels, boxes, scores)

    def take(self, rows: np.ndarray) -> "Predictions":
        """Select rows by a mask [N] or indices."""
        return Predictions(*(column[rows] for column in self.columns()))

    def write(self, uri: str, metadata: Mapping[str, str]) -> None:
        """Write Parquet with a checksum."""
        columns = [self.image_ids, self.labels, *self.boxes.T, self.scores]
        table = pa.table(dict(zip(_COLUMNS, columns, strict=True)))
        buffer = io.BytesIO()
        metadata = {**metadata, _CHECKSUM_FIELD: self.digest()}
        pq.write_table(table.replace_schema_metadata(metadata), buffer, compression="zstd")
        storage.write_bytes(uri, buffer.getvalue())

    @classmethod
    def read(cls, uri: str, digest: str = "") -> tuple["Predictions", dict[str, str]]:
        """Read the predictions and metadata that `write` wrote.

        Raise EvaluationError if `digest` is given and does not match.
        """
        data = storage.read_bytes(uri)
        try:
            table = pq.read_table(io.BytesIO(data), columns=list(_COLUMNS))
            image_ids, labels, *sides, scores = (
                table[name].to_numpy().astype(kind) for name, kind in _COLUMNS.items()
            )
        except (pa.ArrowException, KeyError, ValueError, OSError) as error:
            raise_if_exhausted(error, uri)
            message = f"{uri} is damaged, or contains no predictions: {first_line(error)}"
            raise EvaluationError(message, fix=_EVALUATE_FIX) from None
        predictions = cls(image_ids, labels, np.stack(sides, axis=1), scores)
        stored = (table.schema.metadata or {}).items()
        metadata = {key.decode(errors="replace"): value.decode(errors="replace") for key, value in stored}
        found = predictions.digest()
        if metadata.pop(_CHECKSUM_FIELD, "") != found:
            raise EvaluationError(f"{uri} is damaged: checksum mismatch", fix=_EVALUATE_FIX)
        if digest not in ("", found):
            raise EvaluationError(
                f"{uri} was replaced: it does not contain the predictions that its evaluation scored",
                fix=_EVALUATE_FIX,
            )
        return predictions, metadata

    def digest(self) -> str:
        """Return the sha256 of all columns."""
        kinds = (np.int64, np.int64, np.float64, np.float64)
        columns = [np.asarray(column, kind) for column, kind in zip(self.columns(), kinds, strict=True)]
        return hashlib.sha256(b"".join(column.tobytes() for column in columns)).hexdigest()

    def columns(self) -> tuple[np.ndarray, ...]:
        return self.image_ids, self.labels, self.boxes, self.scores


@dataclass(frozen=True)
class Truth:
    """The images of a split and the M boxes in them, in the same columns as `Predictions`.

    Images and categories are in COCO's format, categories in the order of their ids.
    """

    images: list[dict[str, Any]]
    categories: list[dict[str, Any]]
    image_ids: np.ndarray
    labels: np.ndarray
    boxes: np.ndarray
    areas: np.ndarray  # [M] float64, square pixels
    crowd: np.ndarray  # [M] bool: a group of objects; unmatched detections in it are ignored

    @classmethod
    def from_coco(cls, dataset: Mapping[str, Any]) -> "Truth":
        """Convert COCO's format {"images", "annotations", "categories"}; area and iscrowd may be missing."""
        items = dataset["annotations"]
        if not items:
            raise EvaluationError(
                "the images have no boxes, so nothing can be scored",
                fix="choose a split that has images with boxes (evaluation.split)",
            )
        areas = [item.get("area", item["bbox"][2] * item["bbox"][3]) for item in items]
        crowd = [bool(item.get("iscrowd", 0)) for item in items]
        categories = sorted(dataset["categories"], key=lambda category: category["id"])
        columns = *_coco_columns(items), np.array(areas, np.float64), np.array(crowd, bool)
        return cls(dataset["images"], categories, *columns)

    def take(self, rows: np.ndarray) -> "Truth":
        """Select boxes by a mask [M] or indices; the images and categories remain."""
        return replace(self, **{name: getattr(self, name)[rows] for name in _TRUTH_COLUMNS})

    @property
    def class_names(self) -> list[str]:
        """[K] names of the categories, in the order of their ids."""
        return [category["name"] for category in self.categories]

    @property
    def category_ids(self) -> np.ndarray:
        """[K] int64, ascending."""
        return np.array([category["id"] for category in self.categories], np.int64)

    @property
    def all_image_ids(self) -> np.ndarray:
        """[I] int64, ascending, including images without a box."""
        return np.sort(np.array([image["id"] for image in self.images], np.int64))


def _coco_columns(items: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    count = len(items)
    image_ids = np.fromiter((item["image_id"] for item in items), np.int64, count)
    labels = np.fromiter((item["category_id"] for item in items), np.int64, count)
    flat = np.fromiter((side for item in items for side in item["bbox"]), np.float64, 4 * count)
    return image_ids, labels, flat.reshape(count, 4)


def check_boxes(truth: Truth, items: Truth | Predictions, source: str) -> None:
    """Check that the boxes of `items` are finite and refer to known images and categories.

    Also check that areas (of a truth) or scores (of predictions) are finite.
    """
    boxes = items.boxes
    finite = np.isfinite(boxes).all(axis=1)
    problems = [
        ("an unknown image id", ~np.isin(items.image_ids, truth.all_image_ids), items.image_ids),
        ("an unknown category id", ~np.isin(items.labels, truth.category_ids), items.labels),
        ("a non-finite box", ~finite, boxes),
        ("a box of negative size", finite & (boxes[:, 2:] < 0).any(axis=1), boxes),
    ]
    if isinstance(items, Truth):
        problems.append(("a non-finite area", ~np.isfinite(items.areas), items.areas))
    else:
        problems.append(("a non-finite score", ~np.isfinite(items.scores), items.scores))
    lines = []
    for problem, is_bad, values in problems:
        rows = np.flatnonzero(is_bad)
        if len(rows):
            examples = ", ".join(f"{values[row].tolist()!r} (item {row})" for row in rows[:MAX_EXAMPLES])
            lines.append(f"  {len(rows)} with {problem}: {examples}")
    if lines:
        raise EvaluationError(
            f"{source} ({len(boxes)} in total) cannot be scored:\n" + "\n".join(lines),
            fix="score detections against the ground truth of the same split and classes; boxes are "
            "[x, y, width, height] in pixels",
        )


def class_difference(first: Sequence[str], second: Sequence[str], first_owner: str, second_owner: str) -> str:
    """Describe the difference between two lists of class names; return "" if the lists are equal.

    `first_owner` and `second_owner` name the lists in the text, for example "the data" and "the model".
    """
    if list(first) == list(second):
        return ""
    sides = (set(first) - set(second), first_owner), (set(second) - set(first), second_owner)
    only = [f"{', '.join(sorted(names)[:MAX_EXAMPLES])} only in {owner}" for names, owner in sides if names]
    count = len(set(first) ^ set(second))
    detail = f"{count} differ: {'; '.join(only)}" if only else "the same names in a different order"
    return f"{len(first)} against {len(second)} classes, {detail}"
