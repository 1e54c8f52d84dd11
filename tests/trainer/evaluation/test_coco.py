"""Files of detections of other detectors, against files of ground truth."""

import json
from pathlib import Path

import pytest

from tests.trainer.evaluation.test_coco_metrics import PERFECT, PUBLISHED, SHARED, TRUTH, detection
from trainer.base.errors import EvaluationError, MissingError
from trainer.evaluation.coco import evaluate_files
from trainer.evaluation.metrics import METRICS


@pytest.fixture
def files(tmp_path):
    def write(truth, detections):
        paths = tmp_path / "truth.json", tmp_path / "detections.json"
        for path, content in zip(paths, (truth, detections), strict=True):
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        return paths

    return write


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
    scored = evaluate_files(*paths)
    assert {name: round(scored[name], 6) for name in METRICS} == PUBLISHED
    assert [scored[name] for name in METRICS] == pycocotools(*paths)
    assert len(scored["per_class"]) == 80


@pytest.mark.parametrize(
    ("detections", "said"),
    [
        ([PERFECT[0], detection("0", 0, [0, 0, 5, 5])], "(item 1: image_id)"),
        (["text"], "(item 0: no JSON object)"),
        ({"images": []}, "detections are not a list"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_a_mistake_is_named_with_file_item_and_field(files, detections, said):
    paths = files(TRUTH, detections)
    with pytest.raises(EvaluationError) as caught:
        evaluate_files(*paths)
    assert said in caught.value.message and caught.value.message.startswith(str(paths[1]))
    assert caught.value.fix


def test_a_mistake_in_the_ground_truth_names_that_file(files):
    boxes = [{**TRUTH["annotations"][0], "area": "large"}]
    paths = files({**TRUTH, "annotations": boxes}, PERFECT)
    with pytest.raises(EvaluationError) as caught:
        evaluate_files(*paths)
    assert caught.value.message.startswith(f"{paths[0]}: ground truth") and "(item 0: area)" in str(
        caught.value
    )
    with pytest.raises(MissingError, match="absent"):
        evaluate_files(Path("absent.json"), paths[1])
