"""Ground truth and predictions as columns, for millions of boxes."""

import hashlib
import io
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainer import storage
from trainer.base.errors import EvaluationError, first_line
from trainer.base.os_errors import check_resources

EXAMPLES = 5  # examples of each problem that an error lists
OUTSIDE = 1.0  # pixels by which a detection may extend beyond its image

_CHECKSUM_FIELD = "content_sha256"
_LIMIT = 2**63  # Numbers must be smaller; integers in JSON may have any length.
_EXACT = 2**53  # Ids up to it are themselves: the evaluators hold them as float64.
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
    original_ids: Mapping[int, int | str] = field(default_factory=dict)  # of images; see `id_number`

    def __len__(self) -> int:
        return len(self.image_ids)

    @classmethod
    def from_coco(cls, items: Sequence[Mapping[str, Any]]) -> "Predictions":
        """Read COCO's results format: [{"image_id", "category_id", "bbox", "score"}]."""
        _refuse_malformed("detections", items, "score")
        scores = np.array([item["score"] for item in items], dtype=np.float64)
        return cls(*_columns(items), scores, _original_ids(item["image_id"] for item in items))

    @classmethod
    def join(cls, parts: Sequence["Predictions"]) -> "Predictions":
        """Concatenate predictions and sort them by image id."""
        columns = [np.concatenate(column) for column in zip(*(part._all() for part in parts), strict=True)]
        order = np.argsort(columns[0], kind="stable")
        image_ids, labels, boxes, scores = (column[order] for column in columns)
        return cls(image_ids, labels, boxes, scores)

    def take(self, rows: np.ndarray) -> "Predictions":
        """Select rows by a mask [N] or indices."""
        columns = ("image_ids", "labels", "boxes", "scores")
        return replace(self, **{name: getattr(self, name)[rows] for name in columns})

    def to_coco(self) -> list[dict[str, Any]]:
        """Return COCO's results format."""
        rows, names = zip(*(column.tolist() for column in self._all()), strict=True), self.original_ids
        return [{"image_id": names.get(i, i), "category_id": c, "bbox": b, "score": s} for i, c, b, s in rows]

    def write(self, uri: str, metadata: Mapping[str, str]) -> None:
        """Write Parquet, or COCO's JSON if the URI ends with .json."""
        if uri.endswith(".json"):
            storage.write_bytes(uri, json.dumps(self.to_coco()).encode())
            return
        columns = [self.image_ids, self.labels, *self.boxes.T, self.scores]
        table = pa.table(dict(zip(_COLUMNS, columns, strict=True)))
        buffer = io.BytesIO()
        metadata = {**metadata, _CHECKSUM_FIELD: self.digest()}
        pq.write_table(table.replace_schema_metadata(metadata), buffer, compression="zstd")
        storage.write_bytes(uri, buffer.getvalue())

    @classmethod
    def read(cls, uri: str, digest: str = "") -> tuple["Predictions", dict[str, str]]:
        """Read the predictions and metadata that `write` wrote, or COCO's results format (no metadata).

        Predictions with another `digest`, if it is not empty, are an EvaluationError.
        """
        predictions, metadata = cls._read(uri)
        if digest not in ("", predictions.digest()):
            raise EvaluationError(
                f"{uri} has other predictions than those that its evaluation scored: the file was replaced",
                fix=_EVALUATE_FIX,
            )
        return predictions, metadata

    @classmethod
    def _read(cls, uri: str) -> tuple["Predictions", dict[str, str]]:
        data = storage.read_bytes(uri)
        if data[:4] != b"PAR1":
            return cls.from_coco(parse_json(data, uri)), {}
        try:
            table = pq.read_table(io.BytesIO(data), columns=list(_COLUMNS))
            image_ids, labels, *sides, scores = (
                table[name].to_numpy().astype(kind) for name, kind in _COLUMNS.items()
            )
        except (pa.ArrowException, KeyError, ValueError, OSError) as error:
            check_resources(error, uri)
            message = f"{uri} is damaged, or contains no predictions: {first_line(error)}"
            raise EvaluationError(message, fix=_EVALUATE_FIX) from None
        predictions = cls(image_ids, labels, np.stack(sides, axis=1), scores)
        stored = (table.schema.metadata or {}).items()
        metadata = {key.decode(errors="replace"): value.decode(errors="replace") for key, value in stored}
        if metadata.pop(_CHECKSUM_FIELD, digest := predictions.digest()) != digest:
            raise EvaluationError(f"{uri} is damaged: checksum mismatch", fix=_EVALUATE_FIX)
        return predictions, metadata

    def digest(self) -> str:
        """Return the sha256 of all columns, the same for every format of the file."""
        kinds = (np.int64, np.int64, np.float64, np.float64)
        columns = [np.asarray(column, kind) for column, kind in zip(self._all(), kinds, strict=True)]
        return hashlib.sha256(b"".join(column.tobytes() for column in columns)).hexdigest()

    def _all(self) -> tuple[np.ndarray, ...]:
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
    crowd: np.ndarray  # [M] bool: a group of objects; detections in it are neither right nor wrong
    original_ids: Mapping[int, int | str] = field(default_factory=dict)  # of the boxes' images

    @classmethod
    def from_coco(cls, dataset: Mapping[str, Any]) -> "Truth":
        """Read COCO's format {"images", "annotations", "categories"}; area and iscrowd may be missing."""
        for key in ("images", "annotations", "categories"):
            found = dataset.get(key) if isinstance(dataset, Mapping) else None
            if not isinstance(found, list) or not found:
                raise EvaluationError(
                    f"ground truth has no {key}, so nothing can be scored",
                    fix="check that the split has images with boxes, and that its file has COCO's JSON "
                    "format",
                )
        images, categories = _number_ids(dataset, "images"), _number_ids(dataset, "categories")
        _refuse_repeated("categories", "name", [category.get("name") for category in categories])
        items = dataset["annotations"]
        _refuse_malformed("ground truth", items, "area")
        image_ids, labels, boxes = _columns(items)
        areas = [item.get("area", item["bbox"][2] * item["bbox"][3]) for item in items]
        crowd = [bool(item.get("iscrowd", 0)) for item in items]
        categories.sort(key=lambda category: category["id"])
        columns = image_ids, labels, boxes, np.array(areas, np.float64), np.array(crowd, bool)
        return cls(images, categories, *columns, _original_ids(item["image_id"] for item in items))

    def take(self, rows: np.ndarray) -> "Truth":
        """Select boxes by a mask [M] or indices; the images and categories remain."""
        return replace(self, **{name: getattr(self, name)[rows] for name in _TRUTH_COLUMNS})

    @property
    def names(self) -> list[str]:
        """[K] names of the categories, in the order of their ids."""
        return [category["name"] for category in self.categories]

    @property
    def category_ids(self) -> np.ndarray:
        """[K] int64, ascending."""
        return np.array([category["id"] for category in self.categories], np.int64)

    @property
    def all_image_ids(self) -> np.ndarray:
        """[I] int64, ascending: also of images without a box."""
        return np.sort(np.array([image["id"] for image in self.images], np.int64))


def parse_json(data: bytes, uri: str) -> Any:
    """Parse JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise EvaluationError(f"{uri} is not JSON: {error}", fix="use a file in COCO's JSON format") from None


def id_number(value: Any) -> int | None:
    """Return the number of an id in columns: a text's, or a long integer's, is a hash; None for others.

    The number does not depend on the file, so that detections need no ground truth to be read.
    """
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        if abs(value) < _EXACT:
            return int(value)
    elif not (isinstance(value, str) and value):
        return None
    return int.from_bytes(hashlib.sha256(json.dumps(value).encode()).digest()[:8]) >> 11


def _original_ids(values: Iterable[Any]) -> dict[int, int | str]:
    """Return the ids that are not their own numbers, by number."""
    others = (value for value in values if isinstance(value, str) or abs(value) >= _EXACT)
    return {number: value for value in others if (number := id_number(value)) is not None}


def _number_ids(dataset: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the images or categories with numbers as ids, and an id that is none as `original_id`."""
    items: list[Any] = [item if isinstance(item, Mapping) else {} for item in dataset[key]]
    numbers = [id_number(item.get("id")) for item in items]
    _refuse_repeated(key, "id", numbers, [item.get("id") for item in items])
    return [
        item if item["id"] == number else {**item, "id": number, "original_id": item["id"]}
        for item, number in zip(items, numbers, strict=True)
    ]


def _refuse_repeated(key: str, name: str, values: list[Any], shown: list[Any] | None = None) -> None:
    counts = Counter(map(repr, values))
    pairs = zip(values, shown or values, strict=True)
    bad = {repr(text)[:60]: None for value, text in pairs if value is None or counts[repr(value)] > 1}
    if bad:
        raise EvaluationError(
            f"ground truth: {len(bad)} {key} without {name} or with one that occurs more than once: "
            + ", ".join(list(bad)[:EXAMPLES]),
            fix=f"use a unique {name} for each of the {key}",
        )


def _columns(items: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    count = len(items)
    image_ids = np.fromiter((id_number(item["image_id"]) for item in items), np.int64, count)
    labels = np.fromiter((id_number(item["category_id"]) for item in items), np.int64, count)
    flat = np.fromiter((side for item in items for side in item["bbox"]), np.float64, 4 * count)
    return image_ids, labels, flat.reshape(count, 4)


def _refuse_malformed(source: str, items: Sequence[Any], *further: str) -> None:
    if not isinstance(items, list | tuple):
        fix = 'use a list of {"image_id", "category_id", "bbox": [x, y, width, height], "score"}'
        raise EvaluationError(f"{source} are not a list", fix=fix)
    names = ("image_id", "category_id", "bbox", *further)
    fields = ((index, item, _malformed_field(item, names)) for index, item in enumerate(items))
    bad = [
        f"{repr(item.get(name) if isinstance(item, Mapping) else item)[:60]} (item {index}: {name})"
        for index, item, name in fields
        if name
    ]
    if bad:
        raise EvaluationError(
            f"{source} ({len(items)} in all) cannot be scored:\n"
            f"  {len(bad)} with missing or malformed fields: {', '.join(bad[:EXAMPLES])}",
            fix="boxes are [x, y, width, height] in pixels; ids of categories are integers",
        )


def _malformed_field(item: Any, names: Sequence[str]) -> str:
    if not isinstance(item, Mapping):
        return "no JSON object"
    for name in names:
        value = item.get(name, 0 if name == "area" else None)
        if name.endswith("_id"):
            if id_number(value) is None or (name == "category_id" and isinstance(value, str)):
                return name
            continue
        numbers = value if name == "bbox" else [value]
        # NaN is a number here: `check` reports it.
        is_sound = isinstance(numbers, list | tuple) and all(
            isinstance(number, int | float) and not abs(number) >= _LIMIT for number in numbers
        )
        if not is_sound or len(numbers) != (4 if name == "bbox" else 1):
            return name
    return ""


def check(truth: Truth, items: Truth | Predictions, source: str) -> None:
    """Check that the boxes of `items` are finite, in a known image, and of a known category.

    Also that the areas of a truth are finite, and that predictions have finite scores and are in their image.
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
        outside = _is_outside(boxes, _sizes(truth, items), OUTSIDE)
        problems.append(("a non-finite score", ~np.isfinite(items.scores), items.scores))
        problems.append(("a box outside of its image", outside, boxes))
    lines = []
    for problem, is_bad, values in problems:
        rows = np.flatnonzero(is_bad)
        if len(rows):
            shown = [(row, values[row].tolist()) for row in rows[:EXAMPLES]]
            if values is items.image_ids:
                shown = [(row, items.original_ids.get(number, number)) for row, number in shown]
            examples = ", ".join(f"{value!r} (item {row})" for row, value in shown)
            lines.append(f"  {len(rows)} with {problem}: {examples}")
    if lines:
        raise EvaluationError(
            f"{source} ({len(boxes)} in all) cannot be scored:\n" + "\n".join(lines),
            fix="score detections against the ground truth of the same split and classes; boxes are "
            "[x, y, width, height] in pixels",
        )


def name_difference(first: Sequence[str], second: Sequence[str], first_owner: str, second_owner: str) -> str:
    """Describe the difference of two lists of class names; "" if they are equal and in the same order.

    The owners of the names are, for example, "the data" and "the model".
    """
    if list(first) == list(second):
        return ""
    sides = (set(first) - set(second), first_owner), (set(second) - set(first), second_owner)
    only = [f"{', '.join(sorted(names)[:EXAMPLES])} only in {owner}" for names, owner in sides if names]
    count = len(set(first) ^ set(second))
    detail = f"{count} differ: {'; '.join(only)}" if only else "the same names in another order"
    return f"{len(first)} against {len(second)} classes, {detail}"


def clip_boxes(truth: Truth, predictions: Predictions) -> tuple[Predictions, int]:
    """Clip boxes to their images; return them and the number of changed boxes."""
    boxes, sizes = predictions.boxes, _sizes(truth, predictions)
    corners = np.clip(np.stack([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1), 0.0, sizes[:, None])
    clipped = np.concatenate([corners[:, 0], corners[:, 1] - corners[:, 0]], axis=1)
    usable = np.isfinite(boxes).all(axis=1) & (boxes[:, 2:] >= 0).all(axis=1)
    changed = usable & _is_outside(boxes, sizes, 0.0)
    boxes = np.where(changed[:, None], clipped, boxes)
    return replace(predictions, boxes=boxes), int(changed.sum())


def _sizes(truth: Truth, predictions: Predictions) -> np.ndarray:
    # Infinite if the image or its size is unknown.
    by_id = sorted(truth.images, key=lambda image: image["id"])
    sizes = np.array([[image.get("width") or np.inf, image.get("height") or np.inf] for image in by_id])
    rows = np.searchsorted(truth.all_image_ids, predictions.image_ids).clip(max=len(by_id) - 1)
    is_known = np.isin(predictions.image_ids, truth.all_image_ids)
    return np.where(is_known[:, None], sizes[rows], np.inf)


def _is_outside(boxes: np.ndarray, sizes: np.ndarray, margin: float) -> np.ndarray:
    outside = (boxes[:, :2] < -margin) | (boxes[:, :2] + boxes[:, 2:] > sizes + margin)
    return np.asarray(outside.any(axis=1))
