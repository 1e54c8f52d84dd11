"""What is measured of a set: its annotations, and the pixels of some of its images."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from trainer.base.errors import DataError
from trainer.data.data_views import RawImages, Shards, SourceRows
from trainer.data.inspection import cleaned_samples, is_sized
from trainer.data.problem_counts import Problems
from trainer.data.shard_index import ShardDataset

MOST = 20_000
"""Images whose annotations are compared, drawn at random where there are more."""
_SIDE = 512
"""Longer side at which sharpness is measured, so that it is not the image's size."""

Embed = Callable[[Image.Image], np.ndarray]
"""Features of an image, [D]."""


@dataclass(frozen=True)
class Measurements:
    """Of a split of a set."""

    uri: str
    split: str
    images: int
    """In the split."""
    classes: list[str]
    counts: np.ndarray
    """[n, K] boxes of each class in each image that was looked at."""
    box_sides: np.ndarray
    """[m] square root of the area of each box, pixels."""
    box_images: np.ndarray
    """[m] the image of each box, of those n."""
    image_sides: np.ndarray
    """[i] longer side of each image whose size the annotations tell, pixels."""
    brightness: np.ndarray
    """[p] mean luminance of each image whose pixels were looked at, 0 to 1."""
    sharpness: np.ndarray
    """[p] logarithm of the mean squared Laplacian of its luminance."""
    features: np.ndarray
    """[p, D]; [p, 0] without a detector."""


def measure_set(
    view: Shards | RawImages | SourceRows, split: str, *, pictures: int, seed: int = 0,
    embed: Embed | None = None,
) -> Measurements:  # fmt: skip
    """Measure a split.

    Args:
        view: of the set.
        split: its split.
        pictures: images whose pixels are looked at, at most.
        seed: of what is drawn.
        embed: gives features of an image.

    Raises:
        DataError: it has no image, or none that can be read.
        StorageError: it cannot be read.
    """
    random = np.random.default_rng(seed)
    rows = list(_rows(view, split))
    if not rows:
        raise DataError(f"{view.uri} has no images in {split}", fix="choose another --split")
    total = len(rows)
    if total > MOST:
        rows = [rows[place] for place in np.sort(random.choice(total, MOST, replace=False))]
    counts = np.zeros((len(rows), len(view.names)))
    sides, places, image_sides = [], [], []
    for place, (sample, sized) in enumerate(rows):
        for box in sample["annotations"]:
            counts[place, box["category_id"]] += 1
            if sized:
                sides.append(np.sqrt(box["bbox"][2] * box["bbox"][3]))
                places.append(place)
        if sized:
            image_sides.append(max(sample["width"], sample["height"]))
    luminances = [
        (_luminance(picture.image), embed(picture.image) if embed else np.zeros(0))
        for picture in view.pictures(split, pictures, random)
        if picture.image is not None
    ]
    if pictures and not luminances:
        raise DataError(
            f"none of the images of {view.uri} that were looked at can be read",
            fix="`kubedet data verify` tells what is wrong with them",
        )
    return Measurements(
        view.uri, split, total, list(view.names), counts, np.array(sides, float), np.array(places, int),
        np.array(image_sides, float),
        np.array([image.mean() for image, _ in luminances]),
        np.array([_sharpness(image) for image, _ in luminances]),
        np.array([features for _, features in luminances]) if embed else np.zeros((len(luminances), 0)),
    )  # fmt: skip


def _rows(view: Shards | RawImages | SourceRows, split: str) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yield samples with the boxes that cleaning keeps, and whether their sizes are pixels."""
    if isinstance(view, Shards):
        truth = ShardDataset(view.uri, split).annotations()
        boxes: dict[int, list[dict[str, Any]]] = {image["id"]: [] for image in truth["images"]}
        for box in truth["annotations"]:
            boxes[box["image_id"]].append(box)
        for image in truth["images"]:
            yield {**image, "annotations": boxes[image["id"]]}, True
        return
    for block in view.blocks(split):
        sound = [row for row in block if not row["fault_reason"]]
        samples = cleaned_samples(sound, len(view.names), Problems())
        for row, sample in zip(sound, samples, strict=True):
            yield sample, is_sized(row)


def _luminance(image: Image.Image) -> np.ndarray:
    """[h, w] from 0 to 1, of the image made as small as _SIDE."""
    small = image.convert("L")
    small.thumbnail((_SIDE, _SIDE), Image.Resampling.BOX)
    return np.asarray(small, float) / 255


def _sharpness(image: np.ndarray) -> float:
    if min(image.shape) < 3:
        return float(np.log10(1e-8))
    inner = image[1:-1, 1:-1]
    around = image[:-2, 1:-1] + image[2:, 1:-1] + image[1:-1, :-2] + image[1:-1, 2:]
    return float(np.log10(np.mean((around - 4 * inner) ** 2) + 1e-8))
