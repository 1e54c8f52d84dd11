"""Comparison of two data sets, from their images to the page."""

import json

import numpy as np
import pytest
from PIL import Image
from scipy import stats

from operations.drift import compare, measure, of_values, of_vectors, write
from tests.trainer.conftest import config, saved
from trainer import storage
from trainer.base.errors import DataError
from trainer.data.data_views import open_view
from trainer.evaluation.metrics import DRIFT

__all__ = ["config", "saved"]

ANNOTATED = set(DRIFT) - {"drift/features"}


def draw(folder, *, dark=False, dogs=0.3, count=40, seed=0):
    """Write a COCO set of noise with boxes."""
    random = np.random.default_rng(seed)
    (folder / "train").mkdir(parents=True)
    (folder / "annotations").mkdir()
    images, boxes = [], []
    for number in range(count):
        pixels = random.integers(0, 90 if dark else 255, (48, 64, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / "train" / f"{number}.png")
        images.append({"id": number, "file_name": f"{number}.png", "width": 64, "height": 48})
        for _ in range(random.integers(1, 4)):
            x, y = random.integers(0, 30, 2).tolist()
            side = int(random.integers(5, 15))
            category = 1 + int(random.random() < dogs)
            boxes.append({"id": len(boxes), "image_id": number, "category_id": category, "iscrowd": 0,
                          "bbox": [x, y, side, side], "area": side * side})  # fmt: skip
    categories = [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}]
    content = {"images": images, "annotations": boxes, "categories": categories}
    (folder / "annotations" / "instances_train.json").write_text(json.dumps(content))
    return open_view(f"coco:{folder}")


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")
    return {
        "first": draw(folder / "first"),
        "same": draw(folder / "same", seed=1),
        "other": draw(folder / "other", seed=2, dark=True, dogs=0.9),
    }


def test_equal_sets_differ_by_chance_and_changes_are_significant(sets):
    same = compare(sets["first"], sets["same"], pictures=20)
    assert set(same.metrics) == ANNOTATED
    assert not same.shifts["drift/classes"].sure and not same.shifts["drift/brightness"].sure
    other = compare(sets["first"], sets["other"], pictures=20)
    assert other.shifts["drift/classes"].sure and other.metrics["drift/classes"] > 0.4
    assert other.metrics["drift/brightness"] == 1 and other.shifts["drift/brightness"].sure
    assert other.metrics["drift/image_size"] == 0
    assert other.metrics == compare(sets["first"], sets["other"], pictures=20).metrics


def test_shards_are_compared_with_features_of_a_detector(shards, saved):
    drift = compare(open_view(shards), open_view(shards), pictures=6, samples=20, model_uri=saved())
    assert set(drift.metrics) == set(DRIFT)
    assert all(value == pytest.approx(0, abs=1e-5) for value in drift.metrics.values())
    features = np.array(drift.one.properties["drift/features"])
    assert features.shape[:2] == (6, 1) and features.shape[2] > 1


def test_mistakes_are_errors(sets):
    with pytest.raises(DataError, match="the split night"):
        compare(sets["first"], sets["same"], split="night")


def test_page_and_record_contain_every_distance(sets, tmp_path):
    drift = compare(sets["first"], sets["other"], pictures=20, samples=50)
    write(drift, str(tmp_path))
    record = storage.read_json(str(tmp_path / "drift.json"))
    assert record["metrics"] == drift.metrics and record["classes"]["dog"][0] < record["classes"]["dog"][1]
    page = (tmp_path / "drift.html").read_text()
    assert all(name in page for name in drift.metrics) and "://" not in page.replace("http://www.w3.org", "")
    assert "More than chance moved:" in page and DRIFT["drift/classes"] in page
    assert "Not measured: features of a detector&#39;s backbone" in page
    assert page.count("<figure>") == 1


RANDOM = np.random.default_rng(7)


def weights(one, other):
    """Of sets as they are."""
    sides = np.r_[np.ones(one), np.zeros(other)]
    return sides, 1 - sides


def test_distances_of_values_and_vectors():
    one, other = RANDOM.integers(0, 9, 60).astype(float), RANDOM.integers(2, 12, 45).astype(float)
    distance = of_values(np.r_[one, other], np.arange(105))(*weights(60, 45))
    assert distance == pytest.approx(stats.ks_2samp(one, other).statistic)
    near, far = RANDOM.normal(size=(2, 30, 4))

    def energy(left, right):
        return of_vectors(np.r_[left, right])(*weights(len(left), len(right)))

    assert energy(near, near) == pytest.approx(0, abs=1e-6)
    assert energy(np.zeros((5, 4)), np.ones((5, 4))) == pytest.approx(1)
    assert 0 < energy(near, far + 1) < 1


def test_confidence_of_equal_and_of_moved_values():
    values = RANDOM.normal(size=300)
    same = measure(of_values(values, np.arange(300)), 150, 150)
    assert same.p > 0.05 and not same.sure and same.value < 0.2
    values[150:] += 1
    moved = measure(of_values(values, np.arange(300)), 150, 150)
    assert moved.sure and moved.p == pytest.approx(1 / 201)
    assert moved.low < moved.value < moved.high and moved.value > moved.chance


def test_boxes_of_an_image_count_as_one_observation():
    # Ten images with a hundred equal boxes each: as few observations as images.
    sides = np.repeat(RANDOM.normal(size=10), 100)
    crowded = measure(of_values(sides, np.repeat(np.arange(10), 100)), 5, 5)
    assert crowded.chance > 0.5 and crowded.p > 1 / 201
