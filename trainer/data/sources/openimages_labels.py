"""Open Images' data about whole images: verified labels and rotations."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from trainer import storage
from trainer.base.errors import DataError
from trainer.data.sources.openimages_classes import Meaning
from trainer.data.sources.source import Category

_BLOCK = 4 * 1024 * 1024
_UPRIGHT = {90: 8, 180: 3, 270: 6}
"""Degrees counter-clockwise that turn an image upright, as the Exif orientation that says the same."""


def read_columns(uri: str, types: dict[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
    """Yield some columns of a CSV, block by block as it arrives.

    Args:
        uri: of the CSV; it has a header.
        types: of the columns wanted, by name; their order and what else there is do not matter.

    Raises:
        DataError: a column is missing or a value of another type.
        StorageError: the file is missing or cannot be reached, at any time until its end.
    """
    read = pa_csv.ReadOptions(block_size=_BLOCK)
    convert = pa_csv.ConvertOptions(column_types=types, include_columns=list(types))
    try:
        with storage.open_reader(uri) as file, pa_csv.open_csv(file, read, convert_options=convert) as reader:
            yield from (batch for batch in reader if len(batch))
    except (pa.ArrowException, KeyError) as error:
        raise DataError(
            f"{uri} cannot be read: {error}", fix=f"it needs the columns {', '.join(types)}"
        ) from None


def read_orientations(uri: str) -> dict[str, int]:
    """Return the Exif orientation of the images that do not stand upright, by id."""
    orientations: dict[str, int] = {}
    for batch in read_columns(uri, {"ImageID": pa.string(), "Rotation": pa.float64()}):
        turned = batch.filter(pc.is_in(batch["Rotation"], pa.array([90.0, 180.0, 270.0])))
        degrees = turned["Rotation"].to_pylist()
        orientations.update(
            (image_id, _UPRIGHT[int(angle)])
            for image_id, angle in zip(turned["ImageID"].to_pylist(), degrees, strict=True)
        )
    return orientations


class Verified:
    """The classes that annotators verified in an image, as present or absent; all others are unknown."""

    def __init__(self, uri: str, present: Meaning, absent: Meaning, categories: list[Category]) -> None:
        """Read a CSV with ImageID, LabelName and Confidence (1 is in the image, 0 is not).

        Args:
            uri: of the CSV.
            present: what categories are in an image that a class is in.
            absent: what categories are not in an image that a class is not in.
            categories: those that are kept.

        Raises:
            DataError: a column is missing or a value of another type.
            StorageError: the file is missing.
        """
        self._names = [category.name for category in categories]
        types = {"ImageID": pa.string(), "LabelName": pa.string(), "Confidence": pa.float64()}
        parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = [
            (np.zeros(0, "S32"), np.zeros(0, np.int16), np.zeros(0, bool))
        ]
        for batch in read_columns(uri, types):
            sure = pc.greater_equal(batch["Confidence"], 0.5).fill_null(False)
            for meaning, mask, value in ((present, sure, True), (absent, pc.invert(sure), False)):
                part = batch.filter(mask)
                rows, labels = meaning.apply(part["LabelName"])
                rows, labels = rows[labels >= 0], labels[labels >= 0]
                ids = _encoded(part["ImageID"].to_pylist())[rows]
                parts.append((ids, labels.astype(np.int16), np.full(len(rows), value)))
        ids, labels, sure = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.argsort(ids, kind="stable")
        self._ids, self._labels, self._sure = ids[order], labels[order], sure[order]

    def ids(self) -> set[str]:
        """Return the images of which something is known."""
        return {image_id.decode(errors="replace") for image_id in np.unique(self._ids).tolist()}

    def of(self, image_ids: list[str]) -> list[str]:
        """Return, for each image, JSON such as {"verified": {"Cat": 1, "Dog": 0}}, or ""."""
        ids = _encoded(image_ids)
        begins = np.searchsorted(self._ids, ids, "left").tolist()
        ends = np.searchsorted(self._ids, ids, "right").tolist()
        return [
            self._json(begin, end) if end > begin else "" for begin, end in zip(begins, ends, strict=True)
        ]

    def _json(self, begin: int, end: int) -> str:
        answers: dict[str, Any] = {}
        pairs = zip(self._labels[begin:end].tolist(), self._sure[begin:end].tolist(), strict=True)
        for label, sure in pairs:
            # Where annotators disagree, a positive answer counts.
            answers[self._names[label]] = max(int(sure), answers.get(self._names[label], 0))
        return json.dumps({"verified": answers})


def _encoded(image_ids: list[str]) -> np.ndarray:
    """Return ids as bytes, which are compared fast; theirs are 16 hex digits, a mirror's may be others."""
    return np.array([image_id.encode() for image_id in image_ids], "S32")
