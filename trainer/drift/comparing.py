"""Two sets of data side by side: how far apart they are in each respect."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from trainer.drift.distances import Distance, Shift, measure, of_frequencies, of_values, of_vectors
from trainer.drift.measurements import Measurements
from trainer.evaluation.metrics import DRIFT

_FIELDS = {
    "drift/image_size": "image_sides",
    "drift/brightness": "brightness",
    "drift/sharpness": "sharpness",
}


@dataclass(frozen=True)
class Drift:
    """Both sets, and how far apart they are."""

    one: Measurements
    other: Measurements
    classes: list[str]
    """Of either."""
    shares: np.ndarray
    """[2, K] share of each class among the boxes of each set."""
    shifts: Mapping[str, Shift]
    """By the names in metrics.DRIFT; what could not be measured is not there."""

    @property
    def metrics(self) -> dict[str, float]:
        """The distances, 0 to 1, by name."""
        return {name: shift.value for name, shift in self.shifts.items()}

    def to_json(self) -> dict[str, Any]:
        """Return what drift.json holds."""
        sets = [
            {"uri": part.uri, "split": part.split, "images": part.images} for part in (self.one, self.other)
        ]
        return {
            "sets": sets,
            "metrics": self.metrics,
            "shifts": {name: asdict(shift) for name, shift in self.shifts.items()},
            "medians": {name: medians(self, name) for name in self.shifts if is_number(name)},
            "classes": dict(zip(self.classes, self.shares.T.tolist(), strict=True)),
        }  # fmt: skip


def find_drift(one: Measurements, other: Measurements, *, samples: int = 200, seed: int = 0) -> Drift:
    """Compare two sets.

    Args:
        one: measurements of the one, e.g. what a model was trained on.
        other: of the other.
        samples: of the bootstrap, and permutations.
        seed: of what is drawn.
    """
    classes = list(dict.fromkeys([*one.classes, *other.classes]))
    counts = np.concatenate([_counts_of(part, classes) for part in (one, other)])
    sizes = len(one.counts), len(other.counts)
    distances: dict[str, tuple[Distance, int, int]] = {}
    if all(part.counts.any() for part in (one, other)):
        distances["drift/classes"] = (of_frequencies(counts), *sizes)
    boxes = counts.sum(axis=1)
    distances["drift/boxes_per_image"] = (of_values(boxes, np.arange(len(boxes))), *sizes)
    if len(one.box_sides) and len(other.box_sides):
        images = np.r_[one.box_images, other.box_images + sizes[0]]
        distances["drift/box_size"] = (of_values(np.r_[one.box_sides, other.box_sides], images), *sizes)
    for name, field in _FIELDS.items():
        pair = [getattr(part, field) for part in (one, other)]
        if all(map(len, pair)):
            values = np.concatenate(pair)
            distances[name] = (of_values(values, np.arange(len(values))), len(pair[0]), len(pair[1]))
    if one.features.size and other.features.size:
        features = np.concatenate([one.features, other.features])
        distances["drift/features"] = (of_vectors(features), len(one.features), len(other.features))
    shifts = {
        name: measure(*distances[name], samples=samples, seed=seed) for name in DRIFT if name in distances
    }
    totals = np.array([counts[: sizes[0]].sum(axis=0), counts[sizes[0] :].sum(axis=0)])
    shares = totals / np.maximum(totals.sum(axis=1, keepdims=True), 1)
    return Drift(one, other, classes, shares, shifts)


def numbers(part: Measurements, name: str) -> np.ndarray | None:
    """Return the values that a distance compares, of one set; None where they are no numbers."""
    if name == "drift/boxes_per_image":
        return np.asarray(part.counts.sum(axis=1))
    if name == "drift/box_size":
        return part.box_sides
    return getattr(part, _FIELDS[name]) if name in _FIELDS else None


def is_number(name: str) -> bool:
    """Tell whether what a distance compares are numbers, which have a median."""
    return name in _FIELDS or name in ("drift/boxes_per_image", "drift/box_size")


def medians(drift: Drift, name: str) -> list[float]:
    """Return the median of both sets' values."""
    pair = (numbers(part, name) for part in (drift.one, drift.other))
    return [float(np.median(values)) for values in pair if values is not None]


def _counts_of(part: Measurements, classes: list[str]) -> np.ndarray:
    """[n, K] boxes of all the classes of both sets."""
    counts = np.zeros((len(part.counts), len(classes)))
    counts[:, [classes.index(name) for name in part.classes]] = part.counts
    return counts
