"""Every evaluator and our own matching, against pycocotools: on hundreds of odd cases."""

import numpy as np
import pytest

from trainer.base.errors import EvaluationError
from trainer.evaluation import bootstrap, coco, engines
from trainer.evaluation.box_matching import BoxMatches, match_boxes
from trainer.evaluation.truth_and_predictions import Predictions, Truth

CASES = 150


def odd_case(seed: int) -> tuple[Truth, Predictions]:
    """A few images with crowds, ties, repeated boxes, classes without objects, and many predictions."""
    random = np.random.default_rng(seed)
    images = [
        {"id": int(i), "file_name": f"{i}.jpg", "width": 200, "height": 200}
        for i in random.choice(1000, random.integers(1, 7), replace=False)
    ]
    categories = [
        {"id": int(i), "name": f"class {i}"} for i in random.choice(50, random.integers(1, 6), False)
    ]
    ids = np.array([image["id"] for image in images])
    labels = np.array([category["id"] for category in categories])
    count = int(random.integers(1, 30))
    boxes = random.integers(0, 60, (count, 4)).astype(float) * [1, 1, 2, 2] + [0, 0, 1, 1]
    truth = Truth(
        images,
        sorted(categories, key=lambda category: category["id"]),
        random.choice(ids, count),
        random.choice(labels[: random.integers(1, len(labels) + 1)], count),
        boxes,
        boxes[:, 2] * boxes[:, 3],
        random.random(count) < random.choice([0, 0.3]),
    )
    many = int(random.choice([0, 5, 40, 150, 400]))
    near = random.integers(0, count, many)
    moved = boxes[near] + random.choice([0, 1, 5], (many, 1)) * random.normal(0, 1, (many, 4))
    moved = np.clip(moved, 0, None)
    moved[:, :2] = np.clip(moved[:, :2], 0, 199)
    moved[:, 2:] = np.clip(moved[:, 2:], 0, 200 - moved[:, :2])
    wrong = random.random(many) < 0.2
    return truth, Predictions(
        np.where(wrong, random.choice(ids, many), truth.image_ids[near]),
        np.where(random.random(many) < 0.1, random.choice(labels, many), truth.labels[near]),
        moved,
        np.round(random.random(many), int(random.integers(1, 5))),
    )


def matched(truth: Truth, detections: Predictions) -> BoxMatches:
    return match_boxes(truth, detections, coco.IOU_THRESHOLDS)


def average_precision(matches: BoxMatches, place: int) -> float:
    """Of a class, with every image counted once; NaN where it has no objects."""
    once = np.ones((matches.image_count, 1), np.uint8)
    return float(bootstrap._resample(matches, place, once)[0, 0])


@pytest.mark.slow
@pytest.mark.parametrize("fifth", range(5))
def test_all_agree_with_pycocotools(fifth: int) -> None:
    for seed in range(fifth * CASES // 5, (fifth + 1) * CASES // 5):
        truth, detections = odd_case(seed)
        oracle = engines.run_evaluator("pycocotools", truth, detections)
        arrays = engines.run_evaluator("hotcoco", truth, detections)
        for ours, expected in zip(arrays, oracle, strict=True):
            assert np.abs(ours - expected).max() <= 1e-12, seed
        result = coco.evaluate(truth, detections)
        fallback = coco.evaluate(truth, detections, engine="pycocotools")
        for name, value in fallback.metrics.items():
            assert result.metrics[name] == pytest.approx(value, abs=1e-12), (seed, name)
        matches = matched(truth, detections)
        for place, name in enumerate(truth.class_names):
            ours = average_precision(matches, place)
            expected = fallback.per_class[name]["AP"]
            assert (np.isnan(ours) and expected == -1) or ours == pytest.approx(expected, abs=1e-12), seed


def test_a_class_scores_as_if_it_were_alone() -> None:
    compared = 0
    for seed in range(40):
        truth, detections = odd_case(seed)
        rows = coco.evaluate(truth, detections).per_class
        for category in truth.categories:
            of_class = truth.labels == category["id"]
            if not of_class.any():
                continue
            columns = (truth.image_ids, truth.labels, truth.boxes, truth.areas, truth.crowd)
            alone = Truth(truth.images, [category], *(column[of_class] for column in columns))
            metrics = coco.evaluate(alone, detections.take(detections.labels == category["id"])).metrics
            row = rows[category["name"]]
            assert row.pop("boxes") == (of_class & ~truth.crowd).sum()
            assert row == pytest.approx({name: metrics[f"coco/{name}"] for name in row}, abs=1e-12), seed
            compared += len(set(row.values())) > 5
    assert compared > 10


def test_a_few_classes_after_the_others_give_the_same(monkeypatch) -> None:
    loaded, calls = engines._load_hotcoco, []
    monkeypatch.setattr(engines, "_load_hotcoco", lambda *given: calls[-1].append(given) or loaded(*given))
    for seed in range(60):
        truth, detections = odd_case(seed)
        calls.append([])
        whole = engines.run_evaluator("hotcoco", truth, detections)
        assert len(calls[-1]) == 1
        calls.append([])
        with monkeypatch.context() as small:
            small.setattr(engines, "_CHUNK_PREDICTIONS", 20)
            apart = engines.run_evaluator("hotcoco", truth, detections)
        for one, other in zip(apart, whole, strict=True):
            assert np.array_equal(one, other), seed
    assert max(map(len, calls)) >= 4  # What keeps the memory small.


def test_an_unknown_evaluator() -> None:
    with pytest.raises(EvaluationError, match="unknown evaluator 'torch'"):
        coco.evaluate(*odd_case(1), engine="torch")


def test_matching_where_no_object_is_near_a_rank() -> None:
    """The best prediction of the class lies in an image without objects, alone."""
    truth, _ = odd_case(3)
    first = truth.image_ids == truth.image_ids[0]
    elsewhere = next(image for image in truth.all_image_ids if image != truth.image_ids[0])
    truth = Truth(
        truth.images,
        truth.categories,
        *(column[first] for column in (truth.image_ids, truth.labels, truth.boxes, truth.areas, truth.crowd)),
    )
    detections = Predictions(np.array([elsewhere]), truth.labels[:1], truth.boxes[:1], np.array([0.5]))
    matches = matched(truth, detections)
    assert not matches.correct.any() and not matches.ignored.any()
