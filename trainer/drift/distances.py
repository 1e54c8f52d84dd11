"""Distances between two sets of images, each from 0 (the same) to 1, with their confidence.

A distance is a function of how often each image counts, so that one way of drawing images serves all of them:
the interval is the bootstrap's over the images of each set, and the p-value a permutation test's, in which
images change sides. (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapters 13 and 15.)
Boxes of an image are drawn together: they are not independent.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from trainer.evaluation.bootstrap import drawn_images

SURE = 0.05
"""A p-value below it is called a change."""

Distance = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Of weights [n, S] of all n images on the one side and on the other: S distances."""


@dataclass(frozen=True)
class Shift:
    """How far two sets are apart in one respect."""

    value: float
    """The distance, 0 to 1."""
    low: float
    high: float
    """Ends of its 95 % interval."""
    p: float
    """How often sets that differ by chance alone are as far apart."""
    chance: float
    """The distance below which 95 % of these are."""

    @property
    def sure(self) -> bool:
        """Whether more than chance moved them apart."""
        return self.p < SURE


def measure(distance: Distance, one: int, other: int, *, samples: int = 200, seed: int = 0) -> Shift:
    """Return a distance with its confidence.

    Args:
        distance: of the images of both sets, those of the one first.
        one: images of the one set, at least one.
        other: images of the other.
        samples: of the bootstrap, and permutations.
        seed: of what is drawn.
    """
    left, right = np.zeros((2, one + other, samples + 1))
    left[:one] = drawn_images(one, samples, seed)
    right[one:] = drawn_images(other, samples, seed + 1)
    spread = distance(left, right)
    value = float(spread[0])
    # Sets that are drawn anew lie further apart than those they are drawn of: shifted back by the bias.
    ends = np.percentile(spread[1:], [2.5, 97.5]) - (spread[1:].mean() - value)
    low, high = np.clip(ends, 0, 1)
    random = np.random.default_rng(seed + 2)
    sides = np.zeros((one + other, samples))
    for sample in range(samples):
        sides[random.permutation(one + other)[:one], sample] = 1
    by_chance = distance(sides, 1 - sides)
    p = (1 + int((by_chance >= value - 1e-12).sum())) / (1 + samples)
    return Shift(value, float(low), float(high), p, float(np.percentile(by_chance, 95)))


def of_frequencies(counts: np.ndarray) -> Distance:
    """Total variation: the share of the boxes that would have to be of another class.

    Args:
        counts: [n, K] boxes of each class in each image.
    """

    def distance(one: np.ndarray, other: np.ndarray) -> np.ndarray:
        shares = []
        for weights in (one, other):
            totals = counts.T @ weights
            shares.append(totals / np.maximum(totals.sum(axis=0), 1e-12))
        return np.asarray(np.abs(shares[0] - shares[1]).sum(axis=0) / 2)

    return distance


def of_values(values: np.ndarray, images: np.ndarray) -> Distance:
    """Kolmogorov and Smirnov's: the largest difference between the shares of values up to a bound.

    Args:
        values: [m].
        images: [m] the image of each.
    """
    order = np.argsort(values, kind="stable")
    ordered, of_image = values[order], images[order]
    last = np.flatnonzero(np.r_[ordered[1:] != ordered[:-1], True])

    def distance(one: np.ndarray, other: np.ndarray) -> np.ndarray:
        largest = np.zeros(one.shape[1])
        for begin in range(0, one.shape[1], _AT_ONCE):
            part = slice(begin, begin + _AT_ONCE)
            shares = []
            for weights in (one[:, part], other[:, part]):
                sums = np.cumsum(weights[of_image], axis=0)
                shares.append(sums[last] / np.maximum(sums[-1], 1e-12))
            largest[part] = np.abs(shares[0] - shares[1]).max(axis=0)
        return largest

    return distance


_AT_ONCE = 16
"""Samples that are computed together: millions of boxes of each are in memory."""


def of_vectors(vectors: np.ndarray) -> Distance:
    """The energy distance as a share: 0 where the distributions are the same, 1 where each is one point.

    (Szekely and Rizzo, Energy statistics, 2013: the coefficient of inhomogeneity.)

    Args:
        vectors: [n, D].
    """
    squares = (vectors**2).sum(axis=1)
    between = np.sqrt(np.maximum(squares[:, None] + squares[None, :] - 2 * vectors @ vectors.T, 0))

    def distance(one: np.ndarray, other: np.ndarray) -> np.ndarray:
        left, right = (weights / weights.sum(axis=0) for weights in (one, other))
        across = 2 * (left * (between @ right)).sum(axis=0)
        within = sum((side * (between @ side)).sum(axis=0) for side in (left, right))
        return np.clip((across - within) / np.maximum(across, 1e-12), 0, 1)

    return distance
