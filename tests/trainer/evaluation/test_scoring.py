"""Scores, thresholds and confusions, on cases that can be counted by hand."""

import dataclasses
import json

import numpy as np
import pytest
from PIL import Image

from tests.trainer.evaluation.test_engines import odd_case
from trainer.base.errors import EvaluationError
from trainer.data import shards as data_shards
from trainer.data.download import download
from trainer.data.shard_index import ShardDataset
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
        np.zeros(count, int),
        np.array(labels),
        boxes,
        np.full(count, 2500.0),
        np.zeros(count, bool),
    )


def predictions(rows: list[tuple[int, list[float], float]]) -> Predictions:
    items = [{"image_id": 0, "category_id": label, "bbox": box, "score": s} for label, box, s in rows]
    return Predictions.from_coco(items)


def place(truth: Truth, number: int) -> list[float]:
    return truth.boxes[number].tolist()


def scored(truth: Truth, detections: Predictions) -> scoring.Scores:
    return scoring.score({"images": truth.images}, truth, detections, "hotcoco")


def test_the_best_threshold_is_where_f1_is_largest() -> None:
    truth = scene([0, 0, 0, 1])
    detections = predictions(
        [
            (0, place(truth, 0), 0.9),
            (0, place(truth, 1), 0.6),
            (0, FAR, 0.5),
            (0, FAR, 0.4),
            (0, FAR, 0.3),
            (0, place(truth, 2), 0.2),
        ]
    )
    scores = scored(truth, detections)
    assert scores.operating_points == {"cat": scoring.OperatingPoint(0.6, pytest.approx(0.8))}


def test_equal_scores_are_above_a_threshold_together() -> None:
    truth = scene([0])
    detections = predictions([(0, place(truth, 0), 0.5), (0, FAR, 0.5), (0, FAR, 0.5)])
    assert scored(truth, detections).operating_points["cat"] == scoring.OperatingPoint(0.5, 0.5)


def test_thresholds_against_trying_every_score() -> None:
    for seed in range(30):
        truth, detections = odd_case(seed)
        scores = scored(truth, detections)
        for name, point in scores.operating_points.items():
            place = truth.class_names.index(name)
            rows, objects = scores.matches.class_rows(place), len(scores.matches.image_of_each_object(place))
            counted = ~scores.matches.ignored[rows, 0]
            found, right = scores.matches.scores[rows][counted], scores.matches.correct[rows, 0][counted]
            tried = [2 * right[found >= s].sum() / ((found >= s).sum() + objects) for s in found]
            assert point.f1 == pytest.approx(max(tried))


def test_confusion_and_its_background() -> None:
    truth = scene([0, 0, 1])
    detections = predictions(
        [
            (0, place(truth, 0), 0.9),
            (1, place(truth, 1), 0.8),
            (0, FAR, 0.7),
            (1, place(truth, 2), 0.1),
        ]
    )
    result = scored(truth, detections).confusion
    assert result.class_names == ["cat", "dog", "background"]
    assert result.counts.tolist() == [[1, 1, 0], [0, 0, 1], [1, 0, 0]]


def test_many_classes_are_named_by_their_number_of_objects() -> None:
    labels = [number for number in range(30) for _ in range(number + 1)]
    truth = scene(labels, classes=30)
    truth.images[0]["width"] = 60 * len(labels)
    detections = predictions([(29, place(truth, number), 0.9) for number in range(len(labels))])
    result = scored(truth, detections).confusion
    shown = result.top_classes(5)
    named = [f"class {number}" for number in range(29, 24, -1)]
    assert shown.class_names == [*named, "other (25)", "background"]
    assert shown.counts.sum() == result.counts.sum() == len(labels)
    assert shown.counts[:, 0].sum() <= 100  # COCO counts a hundred predictions an image.
    assert [result.top_classes(count).class_names[-2] for count in (29, 28)] == ["cat", "other (2)"]


def test_both_evaluators_agree_and_only_hotcoco_gives_confusions() -> None:
    truth, detections = odd_case(0)
    dataset = {"images": truth.images}
    ours = scoring.score(dataset, truth, detections, "hotcoco")
    oracle = scoring.score(dataset, truth, detections, "pycocotools")
    assert ours.metrics == pytest.approx(oracle.metrics, abs=1e-12) and len(ours.metrics) == 13
    assert ours.operating_points == oracle.operating_points
    assert ours.confusion is not None and oracle.confusion is None


def test_verified_labels_count_for_open_images_only() -> None:
    truth, detections = odd_case(0)
    verified = {"images": [{**image, "verified": []} for image in truth.images]}
    plain = scored(truth, detections)
    filtered = scoring.score(verified, truth, detections, "hotcoco")
    assert filtered.coco.metrics == plain.coco.metrics
    assert filtered.metrics[scoring.OPEN_IMAGES] > plain.metrics[scoring.OPEN_IMAGES]


def test_a_truth_of_crowds_alone_is_an_obstacle() -> None:
    truth = scene([0, 1])
    crowds = dataclasses.replace(truth, crowd=np.ones(2, bool))
    found = predictions([(0, place(truth, 0), 0.9)])
    compared = scoring.compare("first", "", found, crowds, scored(crowds, found), samples=5)
    assert compared.obstacle.endswith("first: no class has objects") and not compared.changes


def test_a_baseline_of_other_images_is_refused_with_examples() -> None:
    truth, detections = odd_case(0)
    scores = scored(truth, detections)
    other = Predictions(
        detections.image_ids + 100_000, detections.labels, detections.boxes, detections.scores
    )
    with pytest.raises(EvaluationError, match=f"{len(detections)} with an unknown image id: 100"):
        scoring.compare("first", "", other, truth, scores, samples=5)


def test_shards_keep_what_people_looked_for(tmp_path, tiny):
    """From a source in LVIS's form to the ground truth, by label."""
    config = tiny(data__processes=1, data__val_fraction=0.5).data
    categories = [{"id": 5, "name": "cat", "frequency": "r"}, {"id": 2, "name": "dog", "frequency": "f"}]
    categories += [{"id": 9, "name": "cow", "frequency": "c"}, {"id": 7, "name": "pig", "frequency": "c"}]
    form = {"images": [], "annotations": [], "categories": categories}
    (tmp_path / "images").mkdir()
    for number in range(1, 9):
        noise = np.random.RandomState(number).randint(0, 256, (60, 80, 3), np.uint8)
        Image.fromarray(noise).save(tmp_path / "images" / f"{number}.jpg")
        lists = {"neg_category_ids": [7], "not_exhaustive_category_ids": [5]}
        form["images"].append(
            {"id": number, "file_name": f"{number}.jpg", "width": 80, "height": 60, **lists}
        )
        for label in (5, 2):
            item = {"id": len(form["annotations"]) + 1, "image_id": number, "category_id": label}
            form["annotations"].append({**item, "bbox": [5, 5, 30, 30], "area": 900, "iscrowd": 0})
    source = tmp_path / "annotations.json"
    source.write_text(json.dumps(form))
    raw = download(f"coco:{source}", str(tmp_path), config)
    index = data_shards.shard(raw, str(tmp_path), config)
    dataset = ShardDataset(index.uri, "val")
    truth = dataset.annotations()
    names = [category["name"] for category in truth["categories"]]
    assert names == ["dog", "cat", "pig", "cow"]  # By their ids: the labels.
    assert [category["frequency"] for category in truth["categories"]] == ["f", "r", "c", "c"]
    assert {tuple(image["neg_category_ids"]) for image in truth["images"]} == {(2,)}
    assert {tuple(image["not_exhaustive_category_ids"]) for image in truth["images"]} == {(1,)}
    # Without the lists it is other data.
    for image in form["images"]:
        del image["neg_category_ids"], image["not_exhaustive_category_ids"]
    source.write_text(json.dumps(form))
    plain = download(f"coco:{source}", str(tmp_path), config)
    assert data_shards.shards_uri(plain, str(tmp_path), config) != index.uri
