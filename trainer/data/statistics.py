"""Statistics of samples, as histograms with fixed bins, so that the statistics of parts can be added."""

from collections.abc import Iterable

import numpy as np
from pydantic.dataclasses import dataclass

from trainer.base.json_files import STRICT
from trainer.data.samples import AnnotatedImage

BINS: dict[str, list[float]] = {
    "box_side": [0, *(2.0**power for power in range(2, 13))],
    "box_share": [round(0.05 * step, 2) for step in range(21)],
    "box_aspect": [round(-4 + 0.5 * step, 1) for step in range(17)],
    "image_side": [0, 128, 256, 384, 512, 640, 768, 896, 1024, 1280, 1600, 2048],
    "image_aspect": [round(-2 + 0.25 * step, 2) for step in range(17)],
    "boxes_per_image": [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256],
}
"""Edges of the bins; the first and last bin count everything beyond them.

box_side       square root of a box's area, in pixels
box_share      box_side divided by the square root of the image's area
box_aspect     log2 of a box's height over its width
image_side     longer side of an image, in pixels
image_aspect   log2 of an image's height over its width
"""


@dataclass(config=STRICT, frozen=True)
class SplitStatistics:
    """Counts of the samples in a split, or in a part of it."""

    images: int
    images_without_boxes: int
    crowds: int
    boxes_of_class: list[int]  # By label.
    images_of_class: list[int]
    box_side: list[int]  # This and the following are counts in the bins of BINS.
    box_share: list[int]
    box_aspect: list[int]
    image_side: list[int]
    image_aspect: list[int]
    boxes_per_image: list[int]

    @property
    def boxes(self) -> int:
        return sum(self.boxes_of_class)

    def histogram(self, name: str) -> list[int]:
        """Return the counts in the bins BINS[name]."""
        counts: list[int] = getattr(self, name)
        return counts

    def __add__(self, other: "SplitStatistics") -> "SplitStatistics":
        others = vars(other)
        sums = {name: np.add(value, others[name]).tolist() for name, value in vars(self).items()}
        return SplitStatistics(**sums)


def compute_statistics(samples: Iterable[AnnotatedImage], labels: int) -> SplitStatistics:
    """Compute the statistics of samples; `labels` is the number of categories."""
    images = list(samples)
    boxes = [box for image in images for box in image["annotations"]]
    per_image = [len(image["annotations"]) for image in images]
    box_image = np.repeat(np.arange(len(images)), per_image)
    label = np.array([box["category_id"] for box in boxes], int)
    side = np.array([box["bbox"][2:] for box in boxes], float).reshape(-1, 2)
    size = np.array([(image["width"], image["height"]) for image in images], float).reshape(-1, 2)
    area = side.prod(axis=1)
    values = {
        "box_side": np.sqrt(area),
        "box_share": np.sqrt(area / size.prod(axis=1)[box_image]),
        "box_aspect": np.log2(side[:, 1] / side[:, 0]),
        "image_side": size.max(axis=1, initial=0),
        "image_aspect": np.log2(size[:, 1] / size[:, 0]),
        "boxes_per_image": np.array(per_image, float),
    }
    histograms = {}
    for name, numbers in values.items():
        edges = BINS[name]
        inside = np.clip(numbers, edges[0], np.nextafter(edges[-1], -np.inf))
        histograms[name] = np.histogram(inside, edges)[0].tolist()
    pairs = np.unique(box_image * labels + label)  # One number for each pair of an image and a class in it.
    return SplitStatistics(
        images=len(images),
        images_without_boxes=per_image.count(0),
        crowds=sum(box["iscrowd"] for box in boxes),
        boxes_of_class=np.bincount(label, minlength=labels).tolist(),
        images_of_class=np.bincount(pairs % labels, minlength=labels).tolist(),
        **histograms,
    )
