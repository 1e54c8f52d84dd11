"""The Challenge's protocol, against a slow and plain form of the same rules, and small cases by hand."""

import numpy as np
import pytest

from tests.trainer.evaluation.test_engines import odd_case
from trainer.evaluation import openimages_metric
from trainer.evaluation.truth_and_predictions import Predictions, Truth


def plain(truth: Truth, detections: Predictions) -> dict[str, float]:
    """Score one class, image and prediction after the other, in the words of the protocol."""
    per_class = {}
    for category in truth.categories:
        scored, objects = [], 0
        for image in truth.images:
            objects_mask = (truth.labels == category["id"]) & (truth.image_ids == image["id"])
            singles = truth.boxes[objects_mask & ~truth.crowd]
            groups = truth.boxes[objects_mask & truth.crowd]
            objects += len(singles) + len(groups)
            mine = np.flatnonzero(
                (detections.labels == category["id"]) & (detections.image_ids == image["id"])
            )
            mine = mine[np.argsort(-detections.scores[mine], kind="stable")]
            taken, group_scores = set(), {}
            for row in mine:
                own = detections.boxes[row][2] * detections.boxes[row][3]
                both = [common(detections.boxes[row], box) for box in singles]
                ious = [
                    c / max(own + box[2] * box[3] - c, 1e-12) for c, box in zip(both, singles, strict=True)
                ]
                best = int(np.argmax(ious)) if ious else -1
                if ious and ious[best] >= 0.5 and best not in taken:
                    taken.add(best)
                    scored.append((detections.scores[row], True))
                    continue
                shares = [common(detections.boxes[row], b) / max(own, 1e-12) for b in groups]
                place = int(np.argmax(shares)) if shares else -1
                if shares and shares[place] >= 0.5:
                    group_scores[place] = max(group_scores.get(place, -1.0), detections.scores[row])
                else:
                    scored.append((detections.scores[row], False))
            scored += [(score, True) for score in group_scores.values()]
        per_class[category["name"]] = area(scored, objects) if objects else -1.0
    return per_class


def common(one, other) -> float:
    width = min(one[0] + one[2], other[0] + other[2]) - max(one[0], other[0])
    height = min(one[1] + one[3], other[1] + other[3]) - max(one[1], other[1])
    return max(width, 0.0) * max(height, 0.0)


def area(scored: list[tuple[float, bool]], objects: int) -> float:
    hits, curve = 0, []
    for count, (_, right) in enumerate(sorted(scored, key=lambda item: -item[0]), start=1):
        hits += right
        curve.append((hits / objects, hits / count))
    total, last = 0.0, 0.0
    for place, (recall, _) in enumerate(curve):
        total += (recall - last) * max(precision for _, precision in curve[place:])
        last = recall
    return total


def test_equals_the_plain_form() -> None:
    values = []
    for seed in range(120):
        truth, detections = odd_case(seed)
        detections = Predictions(
            *detections.columns()[:3], detections.scores + 1e-7 * np.arange(len(detections))
        )
        result = openimages_metric.evaluate(truth, detections)
        expected = plain(truth, detections)
        assert result[1] == pytest.approx(expected, abs=1e-12), seed
        known = [value for value in expected.values() if value >= 0]
        assert result[0] == pytest.approx(np.mean(known) if known else -1.0, abs=1e-12)
        values.append(result[0])
    assert len(set(values)) > 50


def scene(boxes, crowd=None, labels=None, classes=1) -> Truth:
    count = len(boxes)
    boxes = np.array(boxes, float).reshape(count, 4)
    return Truth(
        [{"id": 0, "width": 500, "height": 500}],
        [{"id": i, "name": f"class {i}"} for i in range(classes)],
        np.zeros(count, int),
        np.array(labels or [0] * count),
        boxes,
        boxes[:, 2] * boxes[:, 3],
        np.array(crowd or [False] * count),
    )


def detections(boxes, scores, labels=None) -> Predictions:
    count = len(boxes)
    columns = np.zeros(count, int), np.array(labels or [0] * count), np.array(boxes, float), np.array(scores)
    return Predictions(*columns)


def test_objects_count_for_the_classes_above() -> None:
    truth = scene([[0, 0, 50, 50]], labels=[2], classes=3)
    animal = detections([[0, 0, 50, 50]], [0.9], labels=[0])
    assert openimages_metric.evaluate(truth, animal)[1] == {"class 0": -1, "class 1": -1, "class 2": 0}
    result = openimages_metric.evaluate(truth, animal, ancestors={2: [1, 0, 77]})
    assert result[1] == {"class 0": 1, "class 1": 0, "class 2": 0}


def test_predictions_of_unverified_classes_are_ignored() -> None:
    truth = scene([[0, 0, 50, 50], [100, 100, 50, 50]], labels=[0, 1], classes=2)
    boxes = [[0, 0, 50, 50], [300, 300, 50, 50], [100, 100, 50, 50], [200, 200, 50, 50]]
    four = detections(boxes, [0.5, 0.9, 0.5, 0.9], labels=[0, 0, 1, 1])
    everything = openimages_metric.evaluate(truth, four)
    assert everything[1] == {"class 0": 0.5, "class 1": 0.5}
    # Both classes have an object in the image: verified without a label.
    none = np.zeros((0, 2), int)
    assert openimages_metric.evaluate(truth, four, verified=none)[1] == everything[1]
    elsewhere = Truth([*truth.images, {"id": 7}], *(getattr(truth, name) for name in (
        "categories", "image_ids", "labels", "boxes", "areas", "crowd")))  # fmt: skip
    wrong = Predictions(np.array([0, 7]), np.array([0, 0]), np.array(boxes[:2], float), np.array([0.5, 0.9]))
    assert openimages_metric.evaluate(elsewhere, wrong)[1]["class 0"] == 0.5
    assert openimages_metric.evaluate(elsewhere, wrong, verified=none)[1]["class 0"] == 1.0
    absent = np.array([[7, 0]])
    assert openimages_metric.evaluate(elsewhere, wrong, verified=absent)[1]["class 0"] == 0.5


def test_a_published_case_of_the_challenges_evaluator() -> None:
    """Images, boxes and results of OpenImagesChallengeEvaluatorTest in TensorFlow's models,
    research/object_detection/utils/object_detection_evaluation_test.py (Apache 2.0), where a group
    weighs half an object: https://github.com/tensorflow/models. Boxes there are corners.
    """
    cat, dog, elephant = 1, 2, 3
    objects = [  # image, class, box, group
        (1, cat, (0, 0, 1, 1), False), (1, elephant, (0, 0, 2, 2), False), (1, cat, (0, 0, 3, 3), True),
        (2, cat, (10, 10, 11, 11), False), (2, cat, (500, 500, 510, 510), False),
        (2, elephant, (10, 10, 12, 12), True), (3, dog, (0, 0, 1, 1), False),
    ]  # fmt: skip
    detections = [  # image, class, box, score
        (1, dog, (10, 10, 11, 11), 0.7), (1, dog, (100, 100, 120, 120), 0.8),
        (2, cat, (10, 10, 11, 11), 0.7), (2, cat, (100, 100, 120, 120), 0.8),
        (2, dog, (100, 100, 220, 220), 0.5), (2, elephant, (10, 10, 11, 11), 0.9),
        (3, dog, (0, 0, 1, 1), 0.5),
    ]  # fmt: skip

    def columns(rows):
        images, labels, corners, last = (np.array(column) for column in zip(*rows, strict=True))
        boxes = np.hstack([corners[:, :2], corners[:, 2:] - corners[:, :2]]).astype(float)
        return images, labels, boxes, last

    images, labels, boxes, groups = columns(objects)
    truth = Truth(
        [{"id": 1, "verified": [cat, dog, elephant]}, {"id": 2}, {"id": 3}],
        [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}, {"id": 3, "name": "elephant"}],
        images,
        labels,
        boxes,
        boxes[:, 2] * boxes[:, 3],
        groups,
    )
    verified, above = openimages_metric.read_image_labels({"images": truth.images})
    predictions = Predictions(*columns(detections))
    result = openimages_metric.evaluate(
        truth, predictions, verified=verified, ancestors=above, group_weight=0.5
    )
    # Of three objects and a group (3.5) one cat is found, second; nobody looked for dogs in image 2.
    assert result[1] == pytest.approx({"cat": 0.5 / 3.5, "dog": 1 / 3, "elephant": 0.5 / 1.5})
    assert result[0] == pytest.approx(0.269841269, abs=1e-9)


def test_verified_labels_and_hierarchy_are_read_from_the_data() -> None:
    verified, above = openimages_metric.read_image_labels(
        {"images": [{"id": 4, "verified": [1, 0]}, {"id": 5, "verified": []}], "hierarchy": {"2": [1, 0]}}
    )
    assert verified.tolist() == [[4, 1], [4, 0]] and above == {2: [1, 0]}
    assert openimages_metric.read_image_labels({"images": [{"id": 4}]}) == (None, {})
    nothing, _ = openimages_metric.read_image_labels({"images": [{"id": 5, "verified": []}]})
    assert nothing.shape == (0, 2)
