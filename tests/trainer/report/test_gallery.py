import io

import numpy as np
import pytest
from PIL import Image

from trainer.evaluation.box_matching import match_boxes
from trainer.evaluation.truth_and_predictions import Predictions, Truth
from trainer.report import gallery


def truth(*annotations, images=1):
    return {
        "images": [{"id": i, "file_name": f"{i}.jpg", "width": 100, "height": 80} for i in range(images)],
        "categories": [{"id": 0, "name": "cat"}, {"id": 1, "name": "dog"}],
        "annotations": [
            {"id": n, "image_id": image, "category_id": category, "bbox": box, "iscrowd": crowd}
            for n, (image, category, box, crowd) in enumerate(annotations, start=1)
        ],
    }


def detection(image, category, box, score=0.9):
    return {"image_id": image, "category_id": category, "bbox": box, "score": score}


BOX = [10, 10, 20, 20]
PICTURE = io.BytesIO()
Image.new("RGB", (100, 80)).save(PICTURE, "PNG")


def worst_images(dataset, detections, count=12):
    ground_truth, predictions = Truth.from_coco(dataset), Predictions.from_coco(detections)
    matches = match_boxes(ground_truth, predictions, np.array([gallery.IOU]))
    return gallery.worst_images(ground_truth, predictions, matches, lambda _: PICTURE.getvalue(), count)


def test_counts_right_false_and_missed():
    ground_truth = truth((0, 0, BOX, 0), (0, 1, [50, 50, 20, 20], 0))
    detections = [
        detection(0, 0, [11, 10, 20, 20]),
        detection(0, 0, [12, 10, 20, 20], 0.8),
        detection(0, 0, BOX, 0.1),
    ]
    (image,) = worst_images(ground_truth, detections)
    assert (image.missed_count, image.false_count) == (1, 1)
    assert image.f1 == pytest.approx(2 / 4)
    assert [(item.name, item.matched) for item in image.truth] == [("cat", True), ("dog", False)]
    assert [(item.score, item.matched) for item in image.predictions] == [(0.9, True), (0.8, False)]


def test_class_must_agree_and_detections_in_a_crowd_are_left_out():
    (image,) = worst_images(truth((0, 0, BOX, 0)), [detection(0, 1, BOX)])
    assert (image.f1, image.missed_count, image.false_count) == (0.0, 1, 1)
    crowd = truth((0, 0, [0, 0, 100, 80], 1))
    assert worst_images(crowd, [detection(0, 0, BOX)]) == []
    assert worst_images(crowd, [detection(0, 1, BOX)])[0].false_count == 1


def test_worst_come_first_and_faultless_images_not_at_all():
    annotations = [(image, 0, BOX, 0) for image in range(4)] + [(2, 0, [60, 10, 20, 20], 0)]
    detections = [detection(1, 0, BOX), detection(3, 0, BOX), detection(3, 0, [60, 10, 20, 20])]
    images = worst_images(truth(*annotations, images=5), detections, count=3)
    # 0 and 2 have F1 0, 2 with more errors; 3 has one false detection; 1 and the empty 4 are right.
    assert [image.image_id for image in images] == [2, 0, 3]
    assert [image.image_id for image in worst_images(truth(*annotations, images=5), detections, 1)] == [2]
