"""Files of detections as whole evaluations, and two evaluations side by side."""

import csv
import dataclasses
import json

import numpy as np
import pytest
from PIL import Image
from score_files import evaluate_files

from trainer import storage
from trainer.base.errors import EvaluationError
from trainer.config.schema import EvaluationConfig
from trainer.evaluation.metrics import METRICS
from trainer.evaluation.truth_and_predictions import Predictions
from trainer.evaluators import files as scored_files

CONFIG = EvaluationConfig(bootstrap=40)
IMAGES = 40


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """Ground truth of 40 images of two classes, and the files of a good and of a bad detector."""
    folder = tmp_path_factory.mktemp("drawn")
    random = np.random.default_rng(3)
    images = [{"id": i, "file_name": f"{i}.jpg", "width": 100, "height": 100} for i in range(IMAGES)]
    boxes = [
        {
            "id": n,
            "image_id": n % IMAGES,
            "category_id": 1 + n % 2,
            "bbox": [*map(float, corner), 25.0, 30.0],
            "area": 750.0,
            "iscrowd": 0,
        }
        for n, corner in enumerate(random.integers(0, 70, (3 * IMAGES, 2)))
    ]
    categories = [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}]
    truth = {"images": images, "annotations": boxes, "categories": categories}
    (folder / "truth.json").write_text(json.dumps(truth))
    for name, shift, share in (("good", 1.0, 0.95), ("bad", 6.0, 0.6)):
        detections = [
            {
                "image_id": box["image_id"],
                "category_id": box["category_id"],
                "score": float(random.random()),
                "bbox": [box["bbox"][0] + float(random.random() * shift), *box["bbox"][1:3], 25.0],
            }
            for box in boxes
            if random.random() < share
        ]
        (folder / f"{name}.json").write_text(json.dumps(detections))
    return folder


@pytest.fixture(scope="module")
def evaluated(drawn):
    """Both detectors' evaluations."""
    for name in ("good", "bad"):
        uri = str(drawn / f"{name}.json")
        scored_files.evaluate(str(drawn / "truth.json"), uri, str(drawn / name), CONFIG)
    return drawn


def test_an_evaluation_of_a_file_has_what_one_of_a_model_has(drawn, tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(IMAGES):
        Image.new("RGB", (100, 100), (number, 90, 200)).save(folder / f"{number}.jpg")
    paths = str(drawn / "truth.json"), str(drawn / "bad.json")
    rules = ["coco/AP50 >= 0.99", "AP[cat] >= 0.01"]
    summary = scored_files.evaluate(*paths, str(tmp_path / "e"), CONFIG, rules=rules, images_uri=str(folder))
    scored = evaluate_files(*paths)
    assert all(summary["metrics"][name] == scored[name] for name in METRICS)
    assert summary["images"] == IMAGES and not summary["verdict"]["passed"]
    assert storage.read_json(str(tmp_path / "e" / "metrics.json")) == summary
    page = (tmp_path / "e" / "report.html").read_text()
    parts = (
        "bad on truth",
        "Gate failed",
        "Classes, weakest first",
        "Confusions",
        "Worst images",
        "bad.json",
    )
    assert not [part for part in parts if part not in page]
    assert page.count("data:image/jpeg") == 12


def test_classes_and_confusions_are_written_as_csv(evaluated):
    with (evaluated / "bad" / "classes.csv").open(newline="") as file:
        classes = {row["class"]: row for row in csv.DictReader(file)}
    summary = storage.read_json(str(evaluated / "bad" / "metrics.json"))
    assert list(classes) == sorted(classes, key=lambda name: summary["per_class"][name]["AP"])
    assert float(classes["cat"]["AP50"]) == summary["per_class"]["cat"]["AP50"]
    assert classes["cat"]["APl"] == "" and int(classes["dog"]["boxes"]) == 60
    with (evaluated / "bad" / "confusions.csv").open(newline="") as file:
        confusions = list(csv.DictReader(file))
    found = {(row["true class"], row["predicted class"]): int(row["boxes"]) for row in confusions}
    assert found["cat", "cat"] > 0 and all(found.values())
    assert sum(boxes for (true, _), boxes in found.items() if true == "cat") == 60


def test_boxes_that_leave_their_image_are_clipped_on_request(drawn, tmp_path):
    truth, leaving = str(drawn / "truth.json"), tmp_path / "leaving.json"
    detections = json.loads((drawn / "good.json").read_text())
    for item in detections[:5]:
        item["bbox"] = [-5.0, 90.0, 30.0, 40.0]
    leaving.write_text(json.dumps(detections))
    with pytest.raises(EvaluationError, match="5 with a box outside of its image"):
        scored_files.evaluate(truth, str(leaving), str(tmp_path / "e"), CONFIG)
    summary = scored_files.evaluate(truth, str(leaving), str(tmp_path / "e"), CONFIG, clip=True)
    written = Predictions.read(summary["predictions"])[0]
    assert (written.boxes == [0.0, 90.0, 25.0, 10.0]).all(axis=1).sum() == 5
    for bbox in ([float("nan"), 0, 5, 5], [0, 0, -5, 5], [float("inf"), 0, 5, 5]):
        detections[0]["bbox"] = bbox
        leaving.write_text(json.dumps(detections))
        with pytest.raises(EvaluationError, match="cannot be scored"):
            scored_files.evaluate(truth, str(leaving), str(tmp_path / "f"), CONFIG, clip=True)


@pytest.mark.slow
def test_a_baseline_may_be_a_file_or_an_evaluation(evaluated, tmp_path):
    paths = str(evaluated / "truth.json"), str(evaluated / "good.json")
    summaries = [
        scored_files.evaluate(
            *paths,
            str(tmp_path / name),
            EvaluationConfig(bootstrap=40, baseline=str(evaluated / name)),
            rules=["coco/AP > baseline"],
        )
        for name in ("bad", "bad.json")
    ]
    assert all(summary["verdict"]["passed"] for summary in summaries)
    assert summaries[0]["comparison"]["changes"] == summaries[1]["comparison"]["changes"]
    assert "Against the baseline" in (tmp_path / "bad" / "report.md").read_text()


@pytest.mark.slow
def test_two_evaluations_are_compared_with_confidence(evaluated, tmp_path):
    bad, good = str(evaluated / "bad"), str(evaluated / "good")
    comparison = scored_files.compare(bad, good, samples=40, output_uri=str(tmp_path / "c"))
    assert comparison["verdict"] == "better"
    assert scored_files.compare(good, bad, samples=40)["verdict"] == "worse"
    assert scored_files.compare(good, good, samples=40)["verdict"] == "not sure"
    base, new, low, high, _ = comparison["changes"]["coco/AP"]
    assert [base, new] == pytest.approx(comparison["metrics"]["coco/AP"], abs=1e-9)
    assert 0 < low < new - base < high
    assert set(comparison["changes"]) == {"coco/AP", "coco/AP50", "AP[cat]", "AP[dog]"}
    assert storage.read_json(str(tmp_path / "c" / "comparison.json")) == comparison
    page = (tmp_path / "c" / "report.html").read_text()
    assert "2 better, 0 worse, 0 not sure, 0 too few to tell" in page and "Gate" not in page


def test_a_split_with_only_crowds_passes_no_rule(drawn, tmp_path):
    truth, uri = json.loads((drawn / "truth.json").read_text()), tmp_path / "crowds.json"
    crowds = [{**annotation, "iscrowd": 1} for annotation in truth["annotations"]]
    uri.write_text(json.dumps({**truth, "annotations": crowds}))
    rules = ["coco/AP >= baseline", "AP[*] >= 0.1", "AP[*] >= baseline", "coco/AP >= 0.0"]
    config = EvaluationConfig(bootstrap=20, baseline=str(drawn / "bad.json"))
    verdict = scored_files.evaluate(
        str(uri), str(drawn / "good.json"), str(tmp_path / "e"), config, rules=rules
    )["verdict"]
    reasons = verdict["reason"].splitlines()
    assert not verdict["passed"] and [": failed, " in reason for reason in reasons] == [True] * 4
    assert reasons[0].endswith("bad.json: no class has objects") and "no ground truth" in reasons[1]
    for name in ("report.html", "report.md"):
        assert "no class has objects" in (tmp_path / "e" / name).read_text()


def test_files_are_compared_against_a_named_ground_truth(evaluated):
    files = [str(evaluated / f"{name}.json") for name in ("bad", "good")]
    truth = str(evaluated / "truth.json")
    of_files = scored_files.compare(*files, truth_uri=truth, samples=40)
    mixed = scored_files.compare(str(evaluated / "bad"), files[1], samples=40)
    assert of_files["changes"] == mixed["changes"]
    with pytest.raises(EvaluationError, match="ground truth of these detections is unknown") as caught:
        scored_files.compare(*files)
    assert "--truth GT.json" in caught.value.fix
    with pytest.raises(EvaluationError, match="neither an evaluation nor a file of detections"):
        scored_files.compare(files[0], str(evaluated / "absent.json"), truth_uri=truth)


def test_evaluations_of_other_images_are_not_compared(evaluated, tmp_path):
    truth = json.loads((evaluated / "truth.json").read_text())
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**truth, "annotations": truth["annotations"][:-1]}))
    scored_files.evaluate(str(other), str(evaluated / "good.json"), str(tmp_path / "e"), CONFIG)
    with pytest.raises(EvaluationError, match="of different images"):
        scored_files.compare(str(evaluated / "bad"), str(tmp_path / "e"))
    config = EvaluationConfig(baseline=str(tmp_path / "e"))
    with pytest.raises(EvaluationError, match="was not scored on this ground truth"):
        scored_files.evaluate(
            str(evaluated / "truth.json"), str(evaluated / "bad.json"), str(tmp_path / "f"), config
        )


@pytest.mark.slow
@pytest.mark.parametrize("form", ["parquet", "json"])
def test_predictions_of_another_model_are_not_compared(evaluated, tmp_path, form):
    """As a kill after the predictions, or a copied file, leaves them next to the metrics of another model."""
    config = EvaluationConfig(bootstrap=40, predictions=form)
    for name in ("good", "bad"):
        paths = str(evaluated / "truth.json"), str(evaluated / f"{name}.json")
        scored_files.evaluate(*paths, str(tmp_path / name), config)
    scored_files.compare(str(tmp_path / "bad"), str(tmp_path / "good"), samples=40)
    (tmp_path / f"good/predictions.{form}").write_bytes((tmp_path / f"bad/predictions.{form}").read_bytes())
    with pytest.raises(EvaluationError, match=f"{tmp_path}/good/predictions.{form}"):
        scored_files.compare(str(tmp_path / "bad"), str(tmp_path / "good"), samples=40)
    with pytest.raises(EvaluationError, match="no baseline"):
        scored_files.evaluate(*paths, str(tmp_path / "e"), config, rules=["coco/AP >= baseline"])
    baseline = dataclasses.replace(config, baseline=str(tmp_path / "good"))
    with pytest.raises(EvaluationError, match=f"{tmp_path}/good/predictions.{form}"):
        scored_files.evaluate(*paths, str(tmp_path / "e"), baseline)


def test_missing_images_are_refused_before_anything_is_scored(drawn, tmp_path):
    paths = str(drawn / "truth.json"), str(drawn / "bad.json")
    with pytest.raises(EvaluationError, match=r"there is no image .*0\.jpg"):
        scored_files.evaluate(*paths, str(tmp_path / "e"), CONFIG, images_uri=str(tmp_path))
    assert not (tmp_path / "e").exists()
