"""Ground truth and predictions as columns: millions of boxes without an object for each."""

import hashlib
import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainer import storage
from trainer.base.errors import EvaluationError, first_line
from trainer.base.os_errors import refuse_want

_CONTENT = "content_sha256"
"""Key of a Parquet file's metadata: the hash of its numbers."""
EXAMPLES = 5
"""Examples of each problem that an error lists."""

_END_OF_IDS, _END_OF_FLOATS = 2**63, 2**1023
"""Ids are kept as int64, all else as float64; JSON's integers may have any length."""

_COLUMNS = ("image_id", "category_id", "x", "y", "width", "height", "score")


@dataclass(frozen=True)
class Predictions:
    """N boxes that a detector found."""

    image_ids: np.ndarray
    """[N] int64."""
    labels: np.ndarray
    """[N] int64, ids of categories."""
    boxes: np.ndarray
    """[N, 4] float64: x, y, width, height in pixels of the image."""
    scores: np.ndarray
    """[N] float64."""

    def __len__(self) -> int:
        return len(self.image_ids)

    @classmethod
    def from_coco(cls, items: Sequence[Mapping[str, Any]]) -> "Predictions":
        """Read COCO's results form: [{"image_id", "category_id", "bbox", "score"}].

        Raises:
            EvaluationError: it is no list of such; with the count and the first examples.
        """
        if not isinstance(items, list | tuple):
            raise EvaluationError(
                "detections are not a list",
                fix='give a list of {"image_id", "category_id", "bbox": [x, y, width, height], "score"}',
            )
        _refuse_malformed("detections", items, "score")
        return cls(*_columns(items), np.array([item["score"] for item in items], dtype=np.float64))

    @classmethod
    def join(cls, parts: Sequence["Predictions"]) -> "Predictions":
        """Put parts one after the other, then in the order of image ids."""
        columns = [np.concatenate(column) for column in zip(*(part._all() for part in parts), strict=True)]
        order = np.argsort(columns[0], kind="stable")
        return cls(*(column[order] for column in columns))

    def take(self, rows: np.ndarray) -> "Predictions":
        """Return some of the rows, by a mask [N] or indices."""
        return Predictions(*(column[rows] for column in self._all()))

    def to_coco(self) -> list[dict[str, Any]]:
        """Return COCO's results form."""
        rows = zip(*(column.tolist() for column in self._all()), strict=True)
        return [{"image_id": i, "category_id": c, "bbox": b, "score": s} for i, c, b, s in rows]

    def write(self, uri: str, metadata: Mapping[str, str]) -> None:
        """Write them as Parquet, or as COCO's JSON where the URI ends so.

        Raises:
            StorageError: it cannot be written.
        """
        if uri.endswith(".json"):
            storage.write_bytes(uri, json.dumps(self.to_coco()).encode())
            return
        columns = [self.image_ids, self.labels, *self.boxes.T, self.scores]
        table = pa.table(dict(zip(_COLUMNS, columns, strict=True)))
        buffer = io.BytesIO()
        known = {**metadata, _CONTENT: self._digest()}
        pq.write_table(table.replace_schema_metadata(known), buffer, compression="zstd")
        storage.write_bytes(uri, buffer.getvalue())

    @classmethod
    def read(cls, uri: str) -> tuple["Predictions", dict[str, str]]:
        """Read what `write` wrote, or any results in COCO's JSON form.

        Returns:
            The predictions, and their metadata ({} of JSON).

        Raises:
            EvaluationError: the file is neither.
            StorageError: it cannot be read.
        """
        data = storage.read_bytes(uri)
        if data[:4] != b"PAR1":
            return cls.from_coco(parse_json(data, uri)), {}
        try:
            table = pq.read_table(io.BytesIO(data))
            wrong = [name for name in _COLUMNS if not _is_full_of_numbers(table, name)]
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            refuse_want(error, uri)
            raise EvaluationError(
                f"{uri} is damaged: {first_line(error)}", fix="evaluate that model again"
            ) from None
        if wrong:
            raise EvaluationError(
                f"{uri} has no columns {', '.join(wrong)} that are full of numbers",
                fix="give a file that `evaluate` wrote",
            )
        image, label, x, y, width, height, score = (table[name].to_numpy() for name in _COLUMNS)
        boxes = np.stack([x, y, width, height], axis=1).astype(np.float64)
        kept = {
            key.decode(errors="replace"): value.decode(errors="replace")
            for key, value in (table.schema.metadata or {}).items()
        }
        read = cls(image.astype(np.int64), label.astype(np.int64), boxes, score.astype(np.float64))
        if kept.pop(_CONTENT, digest := read._digest()) != digest:
            raise EvaluationError(
                f"{uri} is damaged: the sha256 of its numbers is another", fix="evaluate that model again"
            )
        return read, kept

    def _digest(self) -> str:
        digest = hashlib.sha256()
        for column, kind in zip(self._all(), (np.int64, np.int64, np.float64, np.float64), strict=True):
            digest.update(np.asarray(column, kind).tobytes())
        return digest.hexdigest()

    def _all(self) -> tuple[np.ndarray, ...]:
        return self.image_ids, self.labels, self.boxes, self.scores


@dataclass(frozen=True)
class Truth:
    """The images of a split and the M boxes in them."""

    images: list[dict[str, Any]]
    """COCO's images: id, file_name, width, height."""
    categories: list[dict[str, Any]]
    """COCO's categories, in the order of their ids: id, name."""
    image_ids: np.ndarray
    """[M] int64."""
    labels: np.ndarray
    """[M] int64, ids of categories."""
    boxes: np.ndarray
    """[M, 4] float64: x, y, width, height in pixels of the image."""
    areas: np.ndarray
    """[M] float64, square pixels; decides whether an object is small."""
    crowd: np.ndarray
    """[M] bool: groups, in which any number of detections are right and none is missed."""

    @classmethod
    def from_coco(cls, dataset: Mapping[str, Any]) -> "Truth":
        """Read COCO's form {"images", "annotations", "categories"}; area and iscrowd may be missing.

        Raises:
            EvaluationError: it is empty, an id or name occurs twice, or annotations are malformed.
        """
        _check_parts(dataset)
        items = dataset["annotations"]
        _refuse_malformed("ground truth", items, "area")
        image_ids, labels, boxes = _columns(items)
        areas = [item.get("area", item["bbox"][2] * item["bbox"][3]) for item in items]
        crowd = [bool(item.get("iscrowd", 0)) for item in items]
        categories = sorted(dataset["categories"], key=lambda category: category["id"])
        return cls(
            dataset["images"], categories, image_ids, labels, boxes, np.array(areas, np.float64),
            np.array(crowd, bool),
        )  # fmt: skip

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


def parse_json(data: bytes, where: str | Path) -> Any:
    """Read JSON, naming the file where it is none.

    Raises:
        EvaluationError: it is not JSON.
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise EvaluationError(
            f"{where} is not JSON: {error}", fix="give a file in COCO's JSON form"
        ) from None


def _is_full_of_numbers(table: pa.Table, name: str) -> bool:
    if name not in table.column_names:
        return False
    column = table[name]
    is_number = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
    return bool(is_number and not column.null_count)


def _columns(items: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    count = len(items)
    image_ids = np.fromiter((item["image_id"] for item in items), np.int64, count)
    labels = np.fromiter((item["category_id"] for item in items), np.int64, count)
    flat = np.fromiter((side for item in items for side in item["bbox"]), np.float64, 4 * count)
    return image_ids, labels, flat.reshape(count, 4)


def _refuse_malformed(where: str, items: Sequence[Any], *further: str) -> None:
    names = ("image_id", "category_id", "bbox", *further)
    wrong = ((place, item, _wrong_field(item, names)) for place, item in enumerate(items))
    bad = [f"{item!r} (item {place}: {field})" for place, item, field in wrong if field]
    if bad:
        raise EvaluationError(
            f"{where} ({len(items)} in all) cannot be scored:\n"
            f"  {len(bad)} with missing or malformed fields: {', '.join(bad[:EXAMPLES])}",
            fix="boxes are [x, y, width, height] in pixels; ids are integers",
        )


def _wrong_field(item: Any, names: Sequence[str]) -> str:
    if not isinstance(item, Mapping):
        return "no JSON object"
    for name in names:
        value = item.get(name, 0 if name == "area" else None)
        if value is None:
            return f"no {name}"
        values = (value,) if name != "bbox" else value if isinstance(value, list | tuple) else ()
        sound = len(values) == (4 if name == "bbox" else 1) and all(
            isinstance(number, float) or (isinstance(number, int) and abs(number) < _END_OF_FLOATS)
            for number in values
        )
        if sound and name.endswith("_id"):
            sound = float(value).is_integer() and abs(value) < _END_OF_IDS
        if not sound:
            return name
    return ""


def _check_parts(dataset: Mapping[str, Any]) -> None:
    if not isinstance(dataset, Mapping):
        raise EvaluationError("ground truth is not a JSON object", fix="give a file in COCO's JSON form")
    for key in ("images", "annotations", "categories"):
        if not isinstance(dataset.get(key), list) or not dataset[key]:
            raise EvaluationError(
                f"ground truth has no {key}, so nothing can be scored",
                fix="check that the split has images with boxes, and its file COCO's JSON form",
            )
    for key, field in (("images", "id"), ("categories", "id"), ("categories", "name")):
        counts = Counter(item.get(field) for item in dataset[key])
        wrong = [value for value, count in counts.items() if count > 1 or value is None]
        if wrong:
            raise EvaluationError(
                f"ground truth: {len(wrong)} {key} without {field} or with one that occurs more than once: "
                + ", ".join(map(repr, wrong[:EXAMPLES])),
                fix=f"give each of the {key} its own {field}",
            )


OUTSIDE = 1.0
"""Pixels by which a detection may lie outside of its image: rounding, not another image's box."""


def check_truth(truth: Truth) -> None:
    """Check that each box is a finite one of a known image and category.

    Raises:
        EvaluationError: with the count of each problem and the first examples.
    """
    problems = list(_unknown_ids(truth, truth)) + list(_malformed_boxes(truth.boxes))
    problems.append(("a non-finite area", ~np.isfinite(truth.areas), truth.areas))
    _refuse("ground truth", problems)


def check_predictions(truth: Truth, predictions: Predictions, where: str = "detections") -> None:
    """Check that each prediction has a finite score and box inside of a known image, of a known category.

    Raises:
        EvaluationError: with the count of each problem and the first examples.
    """
    problems = list(_unknown_ids(truth, predictions)) + list(_malformed_boxes(predictions.boxes))
    problems.append(("a non-finite score", ~np.isfinite(predictions.scores), predictions.scores))
    problems.append(
        (
            "a box outside of its image",
            _beyond(predictions.boxes, _sizes(truth, predictions), OUTSIDE),
            predictions.boxes,
        )
    )
    _refuse(where, problems)


def name_difference(one: Sequence[str], other: Sequence[str], of_one: str, of_other: str) -> str:
    """Say in what two lists of names differ, in words; "" if they are the same, in one order.

    Args:
        one: names, e.g. of a model's classes by label.
        other: likewise.
        of_one: what the first are of.
        of_other: what the second are of.
    """
    if list(one) == list(other):
        return ""
    sides = (set(one) - set(other), of_one), (set(other) - set(one), of_other)
    parts = [f"{', '.join(sorted(some)[:EXAMPLES])} only in {whose}" for some, whose in sides if some]
    count = len(set(one) ^ set(other))
    detail = f"{count} differ: {'; '.join(parts)}" if parts else "the same names in another order"
    return f"{len(one)} against {len(other)} classes, {detail}"


_Problem = tuple[str, np.ndarray, np.ndarray]


def _unknown_ids(truth: Truth, items: Truth | Predictions) -> Iterator[_Problem]:
    yield "an unknown image id", ~np.isin(items.image_ids, truth.all_image_ids), items.image_ids
    yield "an unknown category id", ~np.isin(items.labels, truth.category_ids), items.labels


def _malformed_boxes(boxes: np.ndarray) -> Iterator[_Problem]:
    finite = np.isfinite(boxes).all(axis=1)
    yield "a non-finite box", ~finite, boxes
    yield "a box of negative size", finite & (boxes[:, 2:] < 0).any(axis=1), boxes


def clip_boxes(truth: Truth, predictions: Predictions) -> tuple[Predictions, int]:
    """Clip boxes to their images; returns the predictions, and how many boxes changed.

    What cannot be clipped (unknown images, boxes that are not finite or of negative size) stays as it is, for
    `check_predictions`.
    """
    boxes, sizes = predictions.boxes, _sizes(truth, predictions)
    corners = np.clip(np.stack([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1), 0.0, sizes[:, None])
    clipped = np.concatenate([corners[:, 0], corners[:, 1] - corners[:, 0]], axis=1)
    usable = np.isfinite(boxes).all(axis=1) & (boxes[:, 2:] >= 0).all(axis=1)
    changed = usable & _beyond(boxes, sizes, 0.0)
    boxes = np.where(changed[:, None], clipped, boxes)
    return replace(predictions, boxes=boxes), int(changed.sum())


def _sizes(truth: Truth, predictions: Predictions) -> np.ndarray:
    by_id = sorted(truth.images, key=lambda image: image["id"])
    sizes = np.array([[image.get("width") or np.inf, image.get("height") or np.inf] for image in by_id])
    place = np.searchsorted(truth.all_image_ids, predictions.image_ids).clip(max=len(by_id) - 1)
    is_known = np.isin(predictions.image_ids, truth.all_image_ids)
    return np.where(is_known[:, None], sizes[place], np.inf)


def _beyond(boxes: np.ndarray, sizes: np.ndarray, margin: float) -> np.ndarray:
    beyond = (boxes[:, :2] < -margin) | (boxes[:, :2] + boxes[:, 2:] > sizes + margin)
    return np.asarray(beyond.any(axis=1))


def _refuse(where: str, problems: list[_Problem]) -> None:
    lines = []
    for problem, wrong, values in problems:
        places = np.flatnonzero(wrong)
        if len(places):
            examples = ", ".join(f"{values[place].tolist()!r} (item {place})" for place in places[:EXAMPLES])
            lines.append(f"  {len(places)} with {problem}: {examples}")
    if lines:
        count = len(problems[0][1])
        raise EvaluationError(
            f"{where} ({count} in all) cannot be scored:\n" + "\n".join(lines),
            fix="score detections against the ground truth of the same split and classes; boxes are "
            "[x, y, width, height] in pixels",
        )
