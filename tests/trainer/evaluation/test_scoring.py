"""Scores, thresholds, calibration, errors and confusions, on cases that can be counted by hand."""

import numpy as np
import pytest

from tests.trainer.evaluation.test_engines import matched, odd_case
from trainer.base.errors import EvaluationError
from trainer.evaluation import scoring
from trainer.evaluation.truth_and_predictions import Predictions, Truth

FAR = [300.0, 300.0, 20.0, 20.0]


def scene(labels: list[int], classes: int = 2) -> Truth:
    """Objects side by side in one image, one of each label."""
    boxes = np.array([[60.0 * place, 0.0, 50.0, 50.0] for place in range(len(labels))])
    count = len(labels)
    return Truth(
        [{"id": 0, "file_name": "0.jpg", "width": 2000, "height": 400}],
        [{"id": i, "name": ["cat", "dog", "owl"][i] if i < 3 else f"class {i}"} for i in range(classes)],
        np.zeros(count, int), np.array(labels), boxes, np.full(count, 2500.0), np.zeros(count, bool),
    )  # fmt: skip


def predictions(rows: list[tuple[int, list[float], float]]) -> Predictions:
    items = [{"image_id": 0, "category_id": label, "bbox": box, "score": s} for label, box, s in rows]
    return Predictions.from_coco(items)


def place(truth: Truth, number: int) -> list[float]:
    return truth.boxes[number].tolist()


def scored(truth: Truth, detections: Predictions) -> scoring.Scores:
    return scoring.score({"images": truth.images}, truth, detections, "hotcoco")


def test_the_best_threshold_is_where_f1_is_largest() -> None:
    truth = scene([0, 0, 0, 1])
    detections = predictions([
        (0, place(truth, 0), 0.9), (0, place(truth, 1), 0.6), (0, FAR, 0.5), (0, FAR, 0.4), (0, FAR, 0.3),
        (0, place(truth, 2), 0.2),
    ])  # fmt: skip
    scores = scored(truth, detections)
    assert scores.points == {"cat": scoring.OperatingPoint(0.6, pytest.approx(0.8))}
    assert scores.f1["cat"][60] == pytest.approx(0.8) and scores.f1["cat"][95] == 0
    assert scores.f1["cat"][0] == pytest.approx(6 / 9) and not scores.f1["dog"].any()


def test_equal_scores_are_above_a_threshold_together() -> None:
    truth = scene([0])
    detections = predictions([(0, place(truth, 0), 0.5), (0, FAR, 0.5), (0, FAR, 0.5)])
    assert scored(truth, detections).points["cat"] == scoring.OperatingPoint(0.5, 0.5)


def test_thresholds_against_trying_every_score() -> None:
    for seed in range(30):
        truth, detections = odd_case(seed)
        scores = scored(truth, detections)
        for name, point in scores.points.items():
            place = truth.names.index(name)
            rows, objects = scores.matches.of_class(place), len(scores.matches.objects(place))
            counted = ~scores.matches.ignored[rows, 0]
            found, right = scores.matches.scores[rows][counted], scores.matches.right[rows, 0][counted]
            tried = [2 * right[found >= s].sum() / ((found >= s).sum() + objects) for s in found]
            assert point.f1 == pytest.approx(max(tried))


def test_calibration_of_an_honest_and_a_boastful_detector() -> None:
    truth = scene([0] * 10, classes=1)
    right = [(0, place(truth, number), 0.75) for number in range(3)]
    honest = scoring.calibrate(matched(truth, predictions([*right, (0, FAR, 0.75)])))
    assert honest.error == pytest.approx(0)
    assert honest.count[7] == 4 and np.isnan(honest.precision[0])
    boastful = scoring.calibrate(matched(truth, predictions([(0, FAR, 0.95), (0, place(truth, 0), 0.95)])))
    assert boastful.error == pytest.approx(0.45)
    assert scoring.calibrate(matched(truth, predictions([]))).error == 0


def test_kinds_of_errors() -> None:
    truth = scene([0, 0, 0, 0, 1])
    shifted = [place(truth, 1)[0] + 25, *place(truth, 1)[1:]]
    detections = predictions([
        (0, place(truth, 0), 0.9), (0, place(truth, 0), 0.8), (0, shifted, 0.7), (1, place(truth, 2), 0.6),
        (0, FAR, 0.5),
    ])  # fmt: skip
    errors = scored(truth, detections).tide
    assert {kind: count for kind, (_, count) in errors.items()} == {
        "Cls": 1, "Loc": 1, "Both": 0, "Dupe": 1, "Bkg": 1, "Miss": 2,
    }  # fmt: skip
    assert all(cost >= 0 for cost, _ in errors.values()) and errors["Miss"][0] > 0


def test_confusion_and_its_background() -> None:
    truth = scene([0, 0, 1])
    detections = predictions([
        (0, place(truth, 0), 0.9), (1, place(truth, 1), 0.8), (0, FAR, 0.7), (1, place(truth, 2), 0.1),
    ])  # fmt: skip
    result = scored(truth, detections).confusion
    assert result.names == ["cat", "dog", "background"]
    assert result.counts.tolist() == [[1, 1, 0], [0, 0, 1], [1, 0, 0]]


def test_many_classes_are_named_by_their_number_of_objects() -> None:
    labels = [number for number in range(30) for _ in range(number + 1)]
    truth = scene(labels, classes=30)
    truth.images[0]["width"] = 60 * len(labels)
    detections = predictions([(29, place(truth, number), 0.9) for number in range(len(labels))])
    result = scored(truth, detections).confusion
    shown = result.largest(5)
    named = [f"class {number}" for number in range(29, 24, -1)]
    assert shown.names == [*named, "other (25)", "background"]
    assert shown.counts.sum() == result.counts.sum() == len(labels)
    assert shown.counts[:, 0].sum() <= 100  # COCO counts a hundred predictions an image.
    assert result.largest(29).names[-2] == "cat" and result.largest(28).names[-2] == "other (2)"


def test_both_evaluators_agree_and_only_hotcoco_gives_errors_and_confusions() -> None:
    truth, detections = odd_case(0)
    dataset = {"images": truth.images}
    ours = scoring.score(dataset, truth, detections, "hotcoco")
    oracle = scoring.score(dataset, truth, detections, "pycocotools")
    assert ours.metrics == pytest.approx(oracle.metrics, abs=1e-12) and len(ours.metrics) == 13
    assert ours.points == oracle.points
    assert ours.tide is not None and ours.confusion is not None
    assert oracle.tide is None and oracle.confusion is None


def test_verified_labels_count_for_open_images_only() -> None:
    truth, detections = odd_case(0)
    verified = {"images": [{**image, "verified": []} for image in truth.images]}
    plain = scored(truth, detections)
    filtered = scoring.score(verified, truth, detections, "hotcoco")
    assert filtered.coco.metrics == plain.coco.metrics
    assert filtered.metrics[scoring.OPEN_IMAGES] > plain.metrics[scoring.OPEN_IMAGES]


def test_a_baseline_of_other_images_is_refused_with_examples() -> None:
    truth, detections = odd_case(0)
    scores = scored(truth, detections)
    other = Predictions(
        detections.image_ids + 100_000, detections.labels, detections.boxes, detections.scores
    )
    with pytest.raises(EvaluationError, match=f"{len(detections)} with an unknown image id: 100"):
        scoring.compare("first", "", other, truth, scores, samples=5)
