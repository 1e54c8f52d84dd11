"""Distances between sets, and how sure they are."""

import numpy as np
import pytest

from trainer.drift.distances import measure, of_frequencies, of_values, of_vectors

RANDOM = np.random.default_rng(7)


def weights(one, other):
    """Of sets as they are."""
    sides = np.r_[np.ones(one), np.zeros(other)][:, None]
    return sides, 1 - sides


def test_frequencies_are_apart_by_what_would_have_to_move():
    counts = np.array([[3, 1], [0, 0], [1, 3], [2, 2]])
    assert of_frequencies(counts)(*weights(2, 2)) == pytest.approx([0.75 - 3 / 8])
    assert of_frequencies(np.eye(2))(*weights(1, 1)) == pytest.approx([1])


def test_values_are_apart_as_scipy_has_it():
    stats = pytest.importorskip("scipy.stats")
    one, other = RANDOM.integers(0, 9, 60).astype(float), RANDOM.integers(2, 12, 45).astype(float)
    values = np.r_[one, other]
    distance = of_values(values, np.arange(105))(*weights(60, 45))
    assert distance == pytest.approx([stats.ks_2samp(one, other).statistic])


def test_vectors_are_apart_by_the_energy_distance():
    near, far = RANDOM.normal(size=(2, 30, 4))
    assert of_vectors(np.r_[near, near])(*weights(30, 30)) == pytest.approx([0], abs=1e-6)
    points = np.r_[np.zeros((5, 4)), np.ones((5, 4))]
    assert of_vectors(points)(*weights(5, 5)) == pytest.approx([1])
    assert 0 < of_vectors(np.r_[near, far + 1])(*weights(30, 30))[0] < 1


def test_sets_of_one_kind_are_not_called_apart_and_others_are():
    values = RANDOM.normal(size=300)
    same = measure(of_values(values, np.arange(300)), 150, 150)
    assert same.p > 0.05 and not same.sure and same.value < 0.2
    values[150:] += 1
    moved = measure(of_values(values, np.arange(300)), 150, 150)
    assert moved.sure and moved.p == pytest.approx(1 / 201)
    assert moved.low < moved.value < moved.high and moved.value > moved.chance


def test_chance_is_called_a_change_as_seldom_as_it_should():
    called = [
        measure(
            of_values(np.random.default_rng(seed).normal(size=80), np.arange(80)), 40, 40, samples=60
        ).sure
        for seed in range(60)
    ]
    assert sum(called) <= 9  # 3 are expected; more than 9 come once in a thousand.


def test_boxes_of_an_image_count_as_one_observation():
    # Ten images with a hundred equal boxes each: as few observations as images.
    sides = np.repeat(RANDOM.normal(size=10), 100)
    crowded = measure(of_values(sides, np.repeat(np.arange(10), 100)), 5, 5)
    assert crowded.chance > 0.5 and crowded.p > 1 / 201
