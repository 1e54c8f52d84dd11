import copy
import math
import re
from contextlib import nullcontext
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.base.errors import EvaluationError
from trainer.evaluation import coco_metrics
from trainer.evaluation.truth_and_predictions import Predictions

SHARED = Path(__file__).parents[4] / "shared" / "data" / "coco_eval"
PUBLISHED = {
    "coco/AP": 0.504581, "coco/AP50": 0.696973, "coco/AP75": 0.572982,
    "coco/APs": 0.585626, "coco/APm": 0.519400, "coco/APl": 0.501398,
    "coco/AR1": 0.386813, "coco/AR10": 0.593680, "coco/AR100": 0.595353,
    "coco/ARs": 0.639811, "coco/ARm": 0.566421, "coco/ARl": 0.564291,
}  # fmt: skip


def truth(boxes, *, images=2, names=("cat", "dog")):
    """Ground truth of (image, category, box) triples."""
    return {
        "images": [{"id": i, "file_name": f"{i}.jpg", "width": 200, "height": 200} for i in range(images)],
        "categories": [{"id": i, "name": name, "original_id": i + 7} for i, name in enumerate(names)],
        "annotations": [
            {"id": i, "image_id": image, "category_id": category, "bbox": box, "area": box[2] * box[3],
             "iscrowd": 0}
            for i, (image, category, box) in enumerate(boxes)
        ],
    }  # fmt: skip


def detection(image, category, box, score=0.9):
    return {"image_id": image, "category_id": category, "bbox": box, "score": score}


TRUTH = truth([(0, 0, [10, 10, 50, 50]), (0, 1, [100, 100, 40, 40]), (1, 0, [20, 20, 20, 20])])
PERFECT = [detection(item["image_id"], item["category_id"], item["bbox"]) for item in TRUTH["annotations"]]


def test_label_0_and_annotation_0_count():
    """pycocotools takes a match with annotation id 0 for none; TRUTH has one, of label 0."""
    result = coco_metrics.evaluate(TRUTH, PERFECT)
    assert result.metrics["coco/AP"] == pytest.approx(1.0)
    assert result.per_class["cat"]["AP"] == pytest.approx(1.0)
    only_label_0 = [item for item in PERFECT if item["category_id"] == 0]
    result = coco_metrics.evaluate(TRUTH, only_label_0)
    assert (result.per_class["cat"]["AP"], result.per_class["dog"]["AP"]) == (pytest.approx(1.0), 0.0)
    assert [row["boxes"] for row in result.per_class.values()] == [2, 1]


def test_known_average_precision():
    """A false positive above the only match: precision is 1/2 at every recall."""
    result = coco_metrics.evaluate(
        truth([(0, 0, [10, 10, 50, 50])]),
        [detection(0, 0, [120, 120, 50, 50], 0.9), detection(0, 0, [10, 10, 50, 50], 0.4)],
    )
    assert result.metrics["coco/AP"] == pytest.approx(0.5)
    assert result.metrics["coco/AR1"] == 0.0
    assert result.metrics["coco/AR10"] == pytest.approx(1.0)
    assert result.precision.shape == (10, 101, 2)
    assert coco_metrics.IOU_THRESHOLDS[0] == 0.5 and coco_metrics.RECALLS[50] == 0.5


def test_no_detections_score_zero():
    result = coco_metrics.evaluate(TRUTH, [])
    assert result.metrics["coco/AP"] == 0.0
    assert result.metrics["coco/APl"] == -1.0
    assert result.per_class["dog"]["AP"] == result.per_class["dog"]["AR100"] == 0.0
    assert (result.per_class["dog"]["APl"], result.per_class["dog"]["boxes"]) == (-1.0, 1)


def test_class_without_boxes_is_left_out():
    ground_truth = truth([(0, 0, [10, 10, 50, 50])])
    result = coco_metrics.evaluate(
        ground_truth, [detection(0, 0, [10, 10, 50, 50]), detection(1, 1, [5, 5, 9, 9])]
    )
    assert result.metrics["coco/AP"] == pytest.approx(1.0)
    assert result.per_class["dog"].pop("boxes") == 0
    assert set(result.per_class["dog"].values()) == {-1.0}


def test_crowds_are_neither_counted_nor_false():
    ground_truth = truth([(0, 0, [10, 10, 50, 50]), (0, 0, [80, 80, 100, 100])])
    ground_truth["annotations"][1]["iscrowd"] = 1
    detections = [detection(0, 0, [10, 10, 50, 50]), detection(0, 0, [90, 90, 20, 20], 0.95)]
    result = coco_metrics.evaluate(ground_truth, detections)
    assert result.metrics["coco/AP"] == pytest.approx(1.0)
    assert result.per_class["cat"]["boxes"] == 1


def test_optional_fields_may_be_missing_and_nothing_is_changed():
    ground_truth, detections = copy.deepcopy(TRUTH), copy.deepcopy(PERFECT)
    for item in ground_truth["annotations"]:
        del item["area"], item["iscrowd"]
    before = copy.deepcopy((ground_truth, detections))
    expected = coco_metrics.evaluate(TRUTH, PERFECT).metrics
    assert coco_metrics.evaluate(ground_truth, detections).metrics == expected
    assert (ground_truth, detections) == before


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (detection(0, 5, [0, 0, 5, 5]), "1 with an unknown category id: 5"),
        (detection(0, 0, [0, 0, 5, 5], math.nan), "1 with a non-finite score: nan"),
        (detection(0, 0, [0, 0, 5, 5], "0.5"), "1 with missing or malformed fields"),
        (detection(0, 0, [0, math.nan, 5, 5]), "1 with a non-finite box"),
        (detection(0, 0, None), "1 with missing or malformed fields"),
        (detection(0, 0, [0, 0, -5, 5]), "1 with a box of negative size"),
        (detection(10**30, 0, [0, 0, 5, 5]), "1 with missing or malformed fields"),
        (detection(0, 0, [0, 0, 5, 10**400]), "1 with missing or malformed fields"),
        (detection([0], 0, [0, 0, 5, 5]), "1 with missing or malformed fields"),
    ],
)
def test_bad_detections_are_refused(bad, message):
    with pytest.raises(EvaluationError, match=message):
        coco_metrics.evaluate(TRUTH, [*PERFECT, bad])


@pytest.mark.parametrize(("by", "refused"), [(0.0, False), (0.9, False), (1.1, True)])
def test_a_box_may_lie_outside_by_a_pixel(by, refused):
    for box in ([-by, 5, 9, 9], [5, -by, 9, 9], [150, 5, 50 + by, 9], [5, 150, 9, 50 + by]):
        with pytest.raises(EvaluationError, match="outside") if refused else nullcontext():
            coco_metrics.evaluate(TRUTH, [detection(0, 0, box)])


def test_error_counts_all_and_shows_the_first():
    bad = [detection(100 + i, 0, [0, 0, 5, 5]) for i in range(50)] + [detection(0, 0, [0, 0, 5, 5], math.nan)]
    with pytest.raises(EvaluationError) as error:
        coco_metrics.evaluate(TRUTH, bad)
    message = error.value.message
    assert "detections (51 in all)" in message
    assert "50 with an unknown image id: 100 (item 0)" in message and "104 (item 4)" in message
    assert "105" not in message
    assert "1 with a non-finite score" in message
    assert error.value.fix


@pytest.mark.parametrize("key", ["images", "annotations", "categories"])
def test_empty_ground_truth_is_refused(key):
    with pytest.raises(EvaluationError, match=f"ground truth has no {key}"):
        coco_metrics.evaluate({**TRUTH, key: []}, PERFECT)


def test_bad_ground_truth_is_refused():
    ground_truth = copy.deepcopy(TRUTH)
    ground_truth["images"][1]["id"] = 0
    with pytest.raises(
        EvaluationError, match="1 images without id or with one that occurs more than once: 0"
    ):
        coco_metrics.evaluate(ground_truth, [])
    ground_truth = copy.deepcopy(TRUTH)
    ground_truth["annotations"][2]["image_id"] = 7
    with pytest.raises(EvaluationError, match=r"ground truth \(3 in all\).*\n.*unknown image id: 7"):
        coco_metrics.evaluate(ground_truth, [])


def test_parquet_files_with_other_columns_are_refused(tmp_path):
    uri = str(tmp_path / "p.parquet")
    Predictions.from_coco(PERFECT).write(uri, {})
    table = pq.read_table(uri)
    for name, column in (("x", [1.0, None, 2.0]), ("category_id", ["a", "b", "c"])):
        pq.write_table(table.set_column(table.column_names.index(name), name, pa.array(column)), uri)
        with pytest.raises(EvaluationError, match=r"p\.parquet is damaged"):
            Predictions.read(uri)


def test_table_shows_numbers_and_shortens_many_classes():
    text = coco_metrics.table(coco_metrics.evaluate(TRUTH, PERFECT[:1]))
    assert re.search(r"^cat +2 +0\.50\d +0\.50\d +█{10}$", text, re.MULTILINE)
    assert re.search(r"^dog +1 +0\.000 +0\.000$", text, re.MULTILINE)
    assert "-1" not in text
    assert max(map(len, text.splitlines())) <= 80
    names = [f"class {i}" for i in range(601)]
    many = truth([(0, i, [10, 10, 50, 50]) for i in range(601)], names=names)
    lines = coco_metrics.table(
        coco_metrics.evaluate(many, [detection(0, 3, [10, 10, 50, 50])]), rows=10
    ).splitlines()
    assert len(lines) == 4 + 2 + 11
    assert lines[6].startswith("class 3 ") and "591 classes between" in lines[11]
