"""Comparison of two data sets, from their images to the page."""

import json

import numpy as np
import pytest
from PIL import Image
from scipy import stats

from operations import drift as drifts
from operations.drift import SIGNIFICANCE, compare, measure, write
from tests.trainer.conftest import config, saved
from trainer import storage
from trainer.base.errors import DataError
from trainer.data.data_views import open_view
from trainer.evaluation.metrics import DRIFT

__all__ = ["config", "saved"]

ANNOTATED = set(DRIFT) - {"drift/features"}


def draw(folder, *, dark=False, dogs=0.3, count=40, seed=0):
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
    assert min(same.shifts[name].p for name in ("drift/classes", "drift/brightness")) >= SIGNIFICANCE
    other = compare(sets["first"], sets["other"], pictures=20)
    assert max(other.shifts[name].p for name in ("drift/classes", "drift/brightness")) < SIGNIFICANCE
    assert other.metrics["drift/classes"] > 0.4 and other.metrics["drift/brightness"] == 1
    assert other.metrics["drift/image_size"] == 0
    assert other.metrics == compare(sets["first"], sets["other"], pictures=20).metrics


def test_shards_are_compared_with_features_of_a_detector(shards, saved):
    model = saved()
    drift = compare(open_view(shards), open_view(shards), pictures=6, samples=20, model_uri=model)
    assert set(drift.metrics) == set(DRIFT)
    assert all(value == pytest.approx(0, abs=1e-5) for value in drift.metrics.values())
    _, properties = drifts._measure_set(open_view(shards), "train", 6, 0, drifts._embedding(model))
    features = np.array(properties["drift/features"])
    assert features.shape[:2] == (6, 1) and features.shape[2] > 1


def test_sharpness_does_not_depend_on_the_border(tmp_path):
    """A slope has an edge only at the border; an image one pixel high has no sharpness."""
    (tmp_path / "train").mkdir()
    (tmp_path / "annotations").mkdir()
    images = []
    for number, size in enumerate([(64, 48), (64, 1)], 1):
        slope = np.tile(np.arange(64, dtype=np.uint8) * 4, (size[1], 1))
        Image.fromarray(slope).save(tmp_path / "train" / f"{number}.png")
        images.append({"id": number, "file_name": f"{number}.png", "width": size[0], "height": size[1]})
    content = {"images": images, "annotations": [], "categories": [{"id": 1, "name": "cat"}]}
    (tmp_path / "annotations" / "instances_train.json").write_text(json.dumps(content))
    _, properties = drifts._measure_set(open_view(f"coco:{tmp_path}"), "train", 2, 0, None)
    assert sorted(map(len, properties["drift/sharpness"])) == [0, 1]
    assert np.concatenate(properties["drift/sharpness"]) == pytest.approx(-8)  # Of no contrast at all.


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


def each(values):
    return [[value] for value in values]


def test_distances_of_values_and_vectors():
    one, other = RANDOM.integers(0, 9, 60).astype(float), RANDOM.integers(2, 12, 45).astype(float)
    shift = measure("drift/box_size", each(one), each(other), samples=1)
    assert shift.value == pytest.approx(stats.ks_2samp(one, other).statistic)
    near, far = RANDOM.normal(size=(2, 30, 4))

    def energy(left, right):
        return measure("drift/features", each(left), each(right), samples=1).value

    assert energy(near, near) == pytest.approx(0, abs=1e-6)
    assert energy(np.zeros((5, 4)), np.ones((5, 4))) == pytest.approx(1)
    assert 0 < energy(near, far + 1) < 1


@pytest.mark.parametrize(("one", "other"), [(1, 40), (40, 1), (1, 1)])
@pytest.mark.parametrize("samples", [1, 20])
def test_a_single_image_has_a_distance_without_confidence(one, other, samples):
    shift = measure("drift/box_size", each([1.0] * one), each([2.0] * other), samples=samples)
    assert shift == drifts.Shift(1.0, 1.0, 1.0, 1.0, 1.0)


def test_confidence_of_equal_and_of_moved_values():
    values = RANDOM.normal(size=300)
    same = measure("drift/brightness", each(values[:150]), each(values[150:]))
    assert same.p > 0.05 and same.value < 0.2
    moved = measure("drift/brightness", each(values[:150]), each(values[150:] + 1))
    assert moved.p == pytest.approx(1 / 201)
    assert moved.low < moved.value < moved.high and moved.value > moved.chance


def test_boxes_of_an_image_count_as_one_observation():
    # Ten images with a hundred equal boxes each: as few observations as images.
    sides = [[side] * 100 for side in RANDOM.normal(size=10)]
    crowded = measure("drift/box_size", sides[:5], sides[5:])
    assert crowded.chance > 0.5 and crowded.p > 1 / 201
