"""From a source's listing to the internal form, and from raw boxes to clean ones.

The internal form is COCO JSON (https://cocodataset.org/#format-data) with labels that are
contiguous from 0 and the same in all splits; the source's ids are kept as `original_id`.
"""

import hashlib
import math
import re
import unicodedata
from collections import Counter
from pathlib import PurePosixPath
from typing import Any

from trainer.config import DataConfig
from trainer.data import problems as reasons
from trainer.data.problems import Problems
from trainer.data.sources.base import UNKNOWN, Category, Entry, Listing
from trainer.errors import DataError

MIN_SIDE = 0.1
"""Boxes with a shorter side than this, in pixels, count as having no area."""

SPLITS = ("train", "val", "test")

_MAX_KEY = 80  # a tar header holds 100 bytes of name, ".json" included
_EXTENSION = re.compile(r"\.[A-Za-z0-9]{1,5}$")


def build(listing: Listing, config: DataConfig) -> tuple[dict[str, dict[str, Any]], dict[str, list[Entry]]]:
    """Put a source's listing into the internal form.

    Args:
        listing: what the source has; its `problems` grow.
        config: val_fraction and classes are used.

    Returns:
        The internal form of each split, and the entries of its images in the same order.
        Boxes are as the source has them: category_id -1 for unknown ones, bbox [] for those
        that are not four numbers.

    Raises:
        DataError: unknown class names, no training images, or no box at all.
    """
    categories, label_of = _select_classes(listing, config.classes)
    keyed = {split: _unique_keys(entries) for split, entries in listing.splits.items() if entries}
    _carve_val(keyed, config.val_fraction)
    if not keyed.get("train"):
        raise DataError(
            "no training images", fix="name a source with a train split, or set data.val_fraction lower"
        )
    forms: dict[str, dict[str, Any]] = {}
    entries_of: dict[str, list[Entry]] = {}
    image_id = annotation_id = 0
    for split in (name for name in SPLITS if keyed.get(name)):
        images, annotations = [], []
        for key, entry in sorted(keyed[split].items()):
            image_id += 1
            images.append(_image(image_id, key, entry))
            for box in entry.boxes:
                if box.category != UNKNOWN and label_of[box.category] is None:
                    continue  # of a class that data.classes leaves out
                annotation_id += 1
                annotations.append(
                    {
                        "id": annotation_id,
                        "image_id": image_id,
                        "category_id": UNKNOWN if box.category == UNKNOWN else label_of[box.category],
                        "bbox": list(box.bbox),
                        "area": box.area,
                        "iscrowd": box.iscrowd,
                    }
                )
        forms[split] = {"categories": categories, "images": images, "annotations": annotations}
        entries_of[split] = [entry for _, entry in sorted(keyed[split].items())]
    _check_classes(forms, listing.problems)
    return forms, entries_of


def clean(
    annotations: list[dict[str, Any]], width: int, height: int, labels: int, problems: Problems, where: str
) -> list[dict[str, Any]]:
    """Return the usable boxes of one image, clipped to it; count the others by reason.

    Args:
        annotations: of the internal form, boxes in pixels of the image.
        width: of the image in pixels.
        height: of the image in pixels.
        labels: how many categories there are.
        problems: grows.
        where: the image's name, for the examples.
    """
    kept = []
    for annotation in annotations:
        reason, box = _judge(annotation, width, height, labels)
        if reason:
            shown = [round(value, 2) for value in annotation["bbox"]]
            problems.add(reason, f"{where} {shown}")
        if box is None:
            continue
        area = box[2] * box[3]
        kept.append(
            {
                "id": annotation["id"],
                "category_id": annotation["category_id"],
                "bbox": box,
                "area": min(annotation["area"], area) if annotation["area"] > 0 else area,
                "iscrowd": annotation["iscrowd"],
            }
        )
    return kept


def _judge(
    annotation: dict[str, Any], width: int, height: int, labels: int
) -> tuple[str | None, list[float] | None]:
    """Return what is wrong with a box, if anything, and what can be used of it, if anything."""
    box = annotation["bbox"]
    if len(box) != 4 or not all(math.isfinite(value) for value in box):
        return reasons.BOX_NOT_FINITE, None
    if not 0 <= annotation["category_id"] < labels:
        return reasons.BOX_UNKNOWN_CATEGORY, None
    x, y, w, h = box
    if w < MIN_SIDE or h < MIN_SIDE:
        return reasons.BOX_WITHOUT_AREA, None
    if x >= 0 and y >= 0 and x + w <= width and y + h <= height:
        return None, box
    left, top = max(x, 0.0), max(y, 0.0)
    right, bottom = min(x + w, float(width)), min(y + h, float(height))
    if right - left < MIN_SIDE or bottom - top < MIN_SIDE:
        return reasons.BOX_OUTSIDE, None
    return reasons.BOX_CLIPPED, [left, top, right - left, bottom - top]


def _select_classes(
    listing: Listing, wanted: list[str]
) -> tuple[list[dict[str, Any]], dict[int, int | None]]:
    """Return the categories kept, as JSON, and the label of each of the source's categories."""
    names = [category.name for category in listing.categories]
    if not names:
        raise DataError("the source lists no classes", fix="add categories to its annotations")
    twice = [name for name, count in Counter(wanted).items() if count > 1]
    unknown = [name for name in wanted if name not in names]
    if unknown or twice:
        what = f"classes unknown: {', '.join(unknown)}" if unknown else f"classes twice: {', '.join(twice)}"
        raise DataError(f"data.classes names {what}", fix=f"the source has: {', '.join(names[:100])}")
    kept: list[Category] = [
        category for name in (wanted or names) for category in listing.categories if category.name == name
    ]
    position = {category: label for label, category in enumerate(kept)}
    categories = [
        {"id": label, "name": category.name, "original_id": category.original_id}
        for label, category in enumerate(kept)
    ]
    return categories, {index: position.get(category) for index, category in enumerate(listing.categories)}


def _unique_keys(entries: list[Entry]) -> dict[str, Entry]:
    """Name each image by a key of [A-Za-z0-9_-] that is unique without regard to case."""
    stems = [_safe_stem(entry.file_name) for entry in entries]
    used = Counter(stem.lower() for stem in stems)
    keyed = {}
    for stem, entry in zip(stems, entries, strict=True):
        key = stem if used[stem.lower()] == 1 else f"{stem[: _MAX_KEY - 9]}-{_digest(entry.file_name)}"
        keyed[key] = entry
    return keyed


def _safe_stem(file_name: str) -> str:
    stem = _EXTENSION.sub("", file_name)
    plain = unicodedata.normalize("NFKD", stem).encode("ascii", "ignore").decode()
    safe = re.sub(r"[^A-Za-z0-9_-]+", "_", plain).strip("_-")
    # Letters that were lost, or a name that was cut, may have told two images apart.
    if safe and len(safe) <= _MAX_KEY and plain.isascii() and len(plain) == len(stem):
        return safe
    return f"{safe[: _MAX_KEY - 9] or 'image'}-{_digest(file_name)}"


def _digest(text: str) -> str:
    return hashlib.sha256(unicodedata.normalize("NFC", text).encode("utf-8", "surrogatepass")).hexdigest()[:8]


def hash_fraction(key: str, salt: str) -> float:
    """Return a number in [0, 1) that depends on the key and nothing else."""
    return int(hashlib.sha256(f"{salt}:{key}".encode()).hexdigest()[:13], 16) / 16**13


def _carve_val(keyed: dict[str, dict[str, Entry]], fraction: float) -> None:
    """Move a share of train to val where there is none, chosen by a hash of each key.

    So the choice does not change when images are added; at least one image goes, one stays.
    """
    train = keyed.get("train", {})
    if keyed.get("val") or fraction <= 0 or len(train) < 2:
        return
    order = sorted(train, key=lambda key: hash_fraction(key, "val"))
    chosen = [key for key in order if hash_fraction(key, "val") < fraction] or order[:1]
    keyed["val"] = {key: train.pop(key) for key in chosen[: len(order) - 1]}


def _image(image_id: int, key: str, entry: Entry) -> dict[str, Any]:
    extension = PurePosixPath(entry.file_name.lower()).suffix
    file_name = key + (extension if _EXTENSION.fullmatch(extension) else "")
    image: dict[str, Any] = {
        "id": image_id,
        "file_name": file_name,
        "width": entry.width,
        "height": entry.height,
    }
    if entry.original_id is not None:
        image["original_id"] = entry.original_id
    if file_name != entry.file_name:
        image["original_file_name"] = entry.file_name
    return image


def _check_classes(forms: dict[str, dict[str, Any]], problems: Problems) -> None:
    """Note the classes that have no box in train; raise DataError if none has one."""
    counts = Counter(annotation["category_id"] for annotation in forms["train"]["annotations"])
    empty = [category["name"] for category in forms["train"]["categories"] if counts[category["id"]] == 0]
    if len(empty) == len(forms["train"]["categories"]):
        raise DataError(
            f"no training image has a box of {', '.join(empty[:20])}",
            fix="check that the annotations belong to these images, or name other data.classes",
        )
    for name in empty:
        problems.add(reasons.CLASS_WITHOUT_BOXES, name)
