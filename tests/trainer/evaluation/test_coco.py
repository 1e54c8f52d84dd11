"""The COCO metrics, of arrays and of files."""

import copy
import json
import math
import random
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.base.errors import EvaluationError
from trainer.evaluation import coco
from trainer.evaluation.metrics import METRICS
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
            {
                "id": i,
                "image_id": image,
                "category_id": category,
                "bbox": box,
                "area": box[2] * box[3],
                "iscrowd": 0,
            }
            for i, (image, category, box) in enumerate(boxes)
        ],
    }


def detection(image, category, box, score=0.9):
    return {"image_id": image, "category_id": category, "bbox": box, "score": score}


TRUTH = truth([(0, 0, [10, 10, 50, 50]), (0, 1, [100, 100, 40, 40]), (1, 0, [20, 20, 20, 20])])
PERFECT = [detection(item["image_id"], item["category_id"], item["bbox"]) for item in TRUTH["annotations"]]


def test_known_average_precision():
    """A false positive above the only match: precision is 1/2 at every recall."""
    result = coco.evaluate(
        truth([(0, 0, [10, 10, 50, 50])]),
        [detection(0, 0, [120, 120, 50, 50], 0.9), detection(0, 0, [10, 10, 50, 50], 0.4)],
    )
    assert result.metrics["coco/AP"] == pytest.approx(0.5)
    assert result.metrics["coco/AR1"] == 0.0
    assert result.metrics["coco/AR10"] == pytest.approx(1.0)
    assert result.precision.shape == (10, 101, 2)
    assert coco.IOU_THRESHOLDS[0] == 0.5 and coco.RECALLS[50] == 0.5


def test_no_detections_score_zero():
    result = coco.evaluate(TRUTH, [])
    assert (result.metrics["coco/AP"], result.metrics["coco/APl"]) == (0.0, -1.0)
    dog = result.per_class["dog"]
    assert (dog["AP"], dog["AR100"], dog["APl"], dog["boxes"]) == (0.0, 0.0, -1.0, 1)


def test_optional_fields_may_be_missing_and_nothing_is_changed():
    ground_truth, detections = copy.deepcopy(TRUTH), copy.deepcopy(PERFECT)
    for item in ground_truth["annotations"]:
        del item["area"], item["iscrowd"]
    before = copy.deepcopy((ground_truth, detections))
    expected = coco.evaluate(TRUTH, PERFECT).metrics
    assert coco.evaluate(ground_truth, detections).metrics == expected
    assert (ground_truth, detections) == before


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (detection(0, 5, [0, 0, 5, 5]), "1 with an unknown category id: 5"),
        (detection(0, 0, [0, 0, 5, 5], math.nan), "1 with a non-finite score: nan"),
        (detection(0, 0, [0, math.nan, 5, 5]), "1 with a non-finite box"),
        (detection(0, 0, [0, 0, -5, 5]), "1 with a box of negative size"),
    ],
)
def test_bad_detections_are_refused(bad, message):
    with pytest.raises(EvaluationError, match=message):
        coco.evaluate(TRUTH, [*PERFECT, bad])


def test_error_counts_all_and_shows_the_first():
    bad = [detection(100 + i, 0, [0, 0, 5, 5]) for i in range(50)] + [detection(0, 0, [0, 0, 5, 5], math.nan)]
    with pytest.raises(EvaluationError) as error:
        coco.evaluate(TRUTH, bad)
    message = error.value.message
    assert "detections (51 in total)" in message
    assert "50 with an unknown image id: 100 (item 0)" in message and "104 (item 4)" in message
    assert "105" not in message
    assert "1 with a non-finite score" in message
    assert error.value.fix


def test_bad_ground_truth_is_refused():
    with pytest.raises(EvaluationError, match="have no boxes"):
        coco.evaluate({**TRUTH, "annotations": []}, PERFECT)
    ground_truth = copy.deepcopy(TRUTH)
    ground_truth["annotations"][2]["image_id"] = 7
    with pytest.raises(EvaluationError, match=r"ground truth \(3 in total\).*\n.*unknown image id: 7"):
        coco.evaluate(ground_truth, [])


def test_parquet_files_with_other_columns_are_refused(tmp_path):
    uri = str(tmp_path / "p.parquet")
    Predictions.from_coco(PERFECT).write(uri, {})
    table = pq.read_table(uri)
    for name, column in (("x", [1.0, None, 2.0]), ("category_id", ["a", "b", "c"])):
        pq.write_table(table.set_column(table.column_names.index(name), name, pa.array(column)), uri)
        with pytest.raises(EvaluationError, match=r"p\.parquet is damaged"):
            Predictions.read(uri)


def test_table_shows_numbers_and_shortens_many_classes():
    text = coco.format_table(coco.evaluate(TRUTH, PERFECT[:1]))
    assert re.search(r"^cat +2 +0\.50\d +0\.50\d +█{10}$", text, re.MULTILINE)
    assert re.search(r"^dog +1 +0\.000 +0\.000$", text, re.MULTILINE)
    assert "-1" not in text
    assert max(map(len, text.splitlines())) <= 80
    names = [f"class {i}" for i in range(601)]
    many = truth([(0, i, [10, 10, 50, 50]) for i in range(601)], names=names)
    lines = coco.format_table(coco.evaluate(many, [detection(0, 3, [10, 10, 50, 50])]), rows=10).splitlines()
    assert len(lines) == 4 + 2 + 11
    assert lines[6].startswith("class 3 ") and "591 classes between" in lines[11]


def pycocotools(truth, detections):
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    oracle = COCO(str(truth))
    oracle = COCOeval(oracle, oracle.loadRes(str(detections)), "bbox")
    oracle.evaluate()
    oracle.accumulate()
    oracle.summarize()
    return oracle.stats.tolist()


@pytest.mark.skipif(not SHARED.exists(), reason="the COCO evaluation sample is not beside the repository")
def test_published_figures_and_those_of_pycocotools():
    names = ("instances_val2014_100.json", "instances_val2014_fakebbox100_results.json")
    paths = [SHARED / name for name in names]
    scored = coco.evaluate(*(json.loads(path.read_text()) for path in paths))
    assert {name: round(scored.metrics[name], 6) for name in METRICS} == PUBLISHED
    assert [scored.metrics[name] for name in METRICS] == pycocotools(*paths)
    assert len(scored.per_class) == 80


@pytest.mark.slow
def test_no_flipped_bit_is_believed(tmp_path):
    chance = np.random.default_rng(1)
    found = Predictions(
        np.arange(40), np.arange(40) % 3, chance.uniform(0, 90, (40, 4)), chance.uniform(0, 1, 40)
    )
    path = tmp_path / "predictions.parquet"
    origin = {"fingerprint": "f00d", "split": "test"}
    found.write(str(path), origin)
    data, random_bits = path.read_bytes(), random.Random(2)
    read, made_of = Predictions.read(str(path))
    assert made_of == origin and read.digest() == found.digest()
    refused = 0
    for _ in range(300):
        damaged = bytearray(data)
        damaged[random_bits.randrange(len(data))] ^= 1 << random_bits.randrange(8)
        path.write_bytes(damaged)
        try:
            assert Predictions.read(str(path))[0].digest() == found.digest()
        except EvaluationError as error:
            refused += 1
            assert path.name in error.message
    assert refused > 100
