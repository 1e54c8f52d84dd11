"""How sure a comparison of two models is: average precision over images drawn again and again.

A paired bootstrap (Efron and Tibshirani, An Introduction to the Bootstrap, 1993): each sample draws
as many images as there are, with replacement, the same ones for both models. An image that is drawn
twice counts twice, so nothing is matched anew.
"""

from dataclasses import dataclass

import numpy as np

from trainer.evaluation.coco import RECALLS
from trainer.evaluation.matching import Matches

_CELLS = 20_000_000
"""Numbers that one step may hold: samples x predictions of a class."""


@dataclass(frozen=True)
class Change:
    """A difference of average precision, new less baseline, and where it lies with 95 % confidence."""

    base: float
    new: float
    low: float
    high: float

    @property
    def delta(self) -> float:
        """The difference itself."""
        return self.new - self.base

    @property
    def sure(self) -> int:
        """1 if it is better with that confidence, -1 if worse, else 0."""
        return int(self.low > 0) - int(self.high < 0)


@dataclass(frozen=True)
class Comparison:
    """A model beside its baseline, on the same images."""

    overall: Change
    """Of coco/AP."""
    per_class: dict[str, Change]
    """Of AP of each class that has objects."""
    samples: int
    """Bootstrap samples that the intervals rest on."""


def compare(
    base: Matches, new: Matches, names: list[str], *, samples: int = 200, seed: int = 0
) -> Comparison:
    """Compare two models' predictions of the same ground truth.

    Args:
        base: matches of the baseline.
        new: matches of the model.
        names: [K] names of the classes.
        samples: bootstrap samples.
        seed: of the drawn images.
    """
    weights = _weights(base.image_count, samples, seed)
    per_class, drawn = {}, []
    for place, name in enumerate(names):
        if not len(base.objects(place)):
            continue
        pair = [_precision(matches, place, weights) for matches in (base, new)]
        per_class[name] = _change(*pair)
        drawn.append(pair)
    sums = np.array(drawn)
    # A class that a sample draws no object of is left out of that sample's mean.
    with np.errstate(all="ignore"):
        overall = _change(np.nanmean(sums[:, 0], axis=0), np.nanmean(sums[:, 1], axis=0))
    return Comparison(overall, per_class, samples)


def average_precision(matches: Matches, place: int) -> float:
    """Return the average precision of a class; NaN where it has no objects."""
    return float(_precision(matches, place, np.ones((1, matches.image_count), np.int32))[0])


def _weights(images: int, samples: int, seed: int) -> np.ndarray:
    """[samples + 1, images]: how often each image counts; the first row is the data as they are."""
    random = np.random.default_rng(seed)
    drawn = random.multinomial(images, np.full(images, 1 / images), size=samples)
    return np.concatenate([np.ones((1, images), np.int32), drawn.astype(np.int32)])


def _change(base: np.ndarray, new: np.ndarray) -> Change:
    """Of values [1 + samples], the first of the data as they are."""
    spread = (new - base)[1:]
    spread = spread[np.isfinite(spread)]
    low, high = np.percentile(spread, [2.5, 97.5]) if len(spread) else (np.nan, np.nan)
    return Change(float(base[0]), float(new[0]), float(low), float(high))


def _precision(matches: Matches, place: int, weights: np.ndarray) -> np.ndarray:
    """[B] average precision of a class over all thresholds, in each of B weightings of the images."""
    rows = matches.of_class(place)
    objects = weights[:, matches.objects(place)].sum(axis=1, dtype=np.int64)
    step = max(_CELLS // max(rows.stop - rows.start, 1), 1)
    parts = [
        _precision_part(matches, rows, weights[begin : begin + step], objects[begin : begin + step])
        for begin in range(0, len(weights), step)
    ]
    return np.concatenate(parts)


def _precision_part(matches: Matches, rows: slice, weights: np.ndarray, objects: np.ndarray) -> np.ndarray:
    drawn = weights[:, matches.images[rows]]
    seen = np.cumsum(drawn, axis=1, dtype=np.int64)
    total = np.zeros(len(weights))
    for threshold in range(len(matches.thresholds)):
        hits = np.flatnonzero(matches.right[rows, threshold])
        ignored = np.flatnonzero(matches.ignored[rows, threshold])
        counted = seen[:, hits]
        if len(ignored):
            before = np.cumsum(drawn[:, ignored], axis=1, dtype=np.int64)
            before = np.concatenate([np.zeros((len(before), 1), np.int64), before], axis=1)
            counted = counted - before[:, np.searchsorted(ignored, hits)]
        total += _area(np.cumsum(drawn[:, hits], axis=1, dtype=np.int64), counted, objects)
    return np.where(objects > 0, total / len(matches.thresholds), np.nan)


def _area(right: np.ndarray, counted: np.ndarray, objects: np.ndarray) -> np.ndarray:
    """[B] mean precision at the 101 recalls, from counts [B, m] at the m right predictions."""
    if not right.shape[1]:
        return np.zeros(len(right))
    # The smallest number keeps pycocotools' 0/0 at 0, and its last bit the same.
    precision = right / (counted + np.spacing(1))
    envelope = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    recall = right / np.maximum(objects, 1)[:, None]
    found = np.empty(len(right))
    for row in range(len(right)):
        places = np.searchsorted(recall[row], RECALLS, side="left")
        reached = places[places < recall.shape[1]]
        found[row] = envelope[row, reached].sum() / len(RECALLS)
    return found
