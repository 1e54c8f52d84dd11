"""Public reports about scores: each situation, and what kubedet answers."""

import subprocess
import sys

import pytest
import torch

from trainer.config.parsing import to_json
from trainer.data.loader import EvalLoader
from trainer.data.shard_index import ShardDataset
from trainer.evaluation import coco
from trainer.evaluation.engines import ENGINES
from trainer.evaluation.inference import predict_share
from trainer.evaluation.truth_and_predictions import Predictions
from trainer.launching.distributed import SINGLE, World
from trainer.model.architecture import build
from trainer.trackers.training_log import read_rows

BOX = [10, 20, 40, 60]
ROW = [(0, 0, [50 * number, 20, 40, 60]) for number in range(7)]


def truth(boxes, ids=None, images=2, **image):
    """Ground truth of (image, category, bbox); `ids` are those of the annotations."""
    return {
        "images": [{"id": i, "width": 900, "height": 900, **image} for i in range(images)],
        "categories": [{"id": i, "name": f"class {i}", "frequency": "f"} for i in range(2)],
        "annotations": [
            {"id": number, "image_id": i, "category_id": category, "bbox": bbox, "area": bbox[2] * bbox[3]}
            for number, (i, category, bbox) in zip(ids or range(1, 1 + len(boxes)), boxes, strict=True)
        ],
    }


def found(boxes, score=0.9):
    """Detections with falling scores."""
    return [
        {"image_id": i, "category_id": category, "bbox": bbox, "score": score - number / 1000}
        for number, (i, category, bbox) in enumerate(boxes)
    ]


def ap(ground_truth, detections, engine="hotcoco"):
    return coco.evaluate(ground_truth, detections, engine=engine).metrics["coco/AP"]


def test_cocoapi_507_the_ground_truth_scores_one_against_itself():
    """An annotation with id 0 counted as not found; here ids start where they like, also with class 0."""
    result = coco.evaluate(truth([*ROW, (1, 1, BOX)], ids=range(8)), found([*ROW, (1, 1, BOX)]))
    assert result.metrics["coco/AP"] == pytest.approx(1)
    result = coco.evaluate(truth([*ROW, (1, 1, BOX)], ids=range(8)), found(ROW))
    assert [(row["AP"], row["boxes"]) for row in result.per_class.values()] == [(pytest.approx(1), 7), (0, 1)]


@pytest.mark.parametrize("objects", [1, 2])
def test_supervision_1895_faster_coco_eval_77_the_first_object_is_found(objects):
    """The first object had id 0, which stood for "no match": of a single one none was found, of two one."""
    boxes = ROW[:objects]
    assert ap(truth(boxes, ids=range(objects)), found(boxes)) == pytest.approx(1)


def test_rt_detr_232_ids_that_start_again_in_each_image():
    """Annotation ids that are unique in their image only made AP 0; the ids take no part in scores here."""
    boxes = [(image, 0, box) for image in range(2) for _, _, box in ROW]
    assert ap(truth(boxes, ids=[*range(7), *range(7)]), found(boxes)) == pytest.approx(1)


@pytest.mark.parametrize("engine", ENGINES)
def test_faster_coco_eval_32_ids_beyond_32_bits(engine):
    """Ids above 2**31 lost their upper half and with it their matches."""
    assert ap(truth(ROW, ids=range(2**40, 2**40 + 7)), found(ROW), engine) == pytest.approx(1)


@pytest.mark.parametrize("engine", ENGINES)
def test_torchmetrics_794_detections_in_images_without_objects(engine):
    """They were ignored if the empty image came last, and no detections at all were an error."""
    for right, empty in ((0, 1), (1, 0)):
        assert ap(
            truth([(right, 0, BOX)]), found([(empty, 0, BOX), (right, 0, BOX)]), engine
        ) == pytest.approx(0.5)
        assert ap(truth([(right, 0, BOX)]), [], engine) == 0


def test_torchmetrics_1153_more_objects_than_detections_count():
    """With a limit other than 100 the mean AP was -1; COCO counts 100 of an image."""
    crowded = [(0, 0, [45 * (number % 20), 45 * (number // 20), 40, 40]) for number in range(150)]
    metrics = coco.evaluate(truth(crowded, images=1), found(crowded)).metrics
    assert metrics["coco/AR100"] == pytest.approx(100 / 150) and 0.6 < metrics["coco/AP"] < 0.7


def test_torchmetrics_1144_ranks_with_unequal_numbers_of_detections():
    """Gathering them in DDP was an error; the parts are joined here whatever their sizes, also none."""
    parts = [Predictions.from_coco(found(part)) for part in (ROW[:4], [], ROW[4:])]
    assert ap(truth(ROW), Predictions.join(parts)) == pytest.approx(1)


@pytest.mark.slow
def test_lightning_10508_rf_detr_931_ranks_without_objects_or_images(sets, tiny, tmp_path):
    """Validation waited forever if a rank had found nothing, or if its images had no objects.

    Of three ranks the first has an image with an object, the second one without, and the third none.
    """
    sets.coco([(f"t{number}", 1, [4, 4, 20, 20]) for number in range(4)], {1: "cat"})
    empty = {"id": "w", "file_name": "w.jpg", "width": 40, "height": 30}
    sets.coco(
        [("v", 1, [4, 4, 20, 20])], {1: "cat"}, split="val", change=lambda form: form["images"].append(empty)
    )
    sets.picture("val/w.jpg")
    config = tmp_path / "config.json"
    config.write_text(to_json(tiny(train__epochs=1, train__batch_size=1, model__score_threshold=0.99)))
    command = [sys.executable, "-m", "trainer", "launch", "--nproc", "3", "--", "train", "--config", config]
    command += ["--shards", sets.shards("coco"), "--output", tmp_path / "run"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    assert read_rows(str(tmp_path / "run"))[-1]["coco/AP"] == 0


def test_rf_detr_1507_no_image_is_counted_twice(shards, tiny):
    """Images that pad the share of the last rank were scored twice; here ranks have unequal numbers."""
    dataset, ids = ShardDataset(shards, "train"), []
    for rank in range(5):
        world = World(rank, 5, torch.device("cpu"))
        loader = EvalLoader(dataset, tiny().loader, batch_size=2, world=world, max_bad_fraction=0.0)
        ids += [image for batch in loader for image in batch.image_ids]
    assert len(dataset) % 5 and sorted(ids) == sorted(dataset.image_ids)


@pytest.mark.parametrize("engine", ENGINES)
def test_ultralytics_17270_a_higher_threshold_raises_no_ap(engine):
    """Precision was carried on to recall 1, so that AP rose with the confidence threshold."""
    detections = found(ROW[:3]) + found([(0, 0, [500 + 50 * n, 500, 40, 60]) for n in range(4)], 0.5)
    whole, cut = (ap(truth(ROW), detections[:count], engine) for count in (7, 3))
    assert cut == pytest.approx(whole) and cut < 3 / 7 + 0.01


def test_yolov5_5168_the_batch_size_changes_no_detection(shards, tiny):
    """Images were padded to the largest of their batch, so that AP depended on the size of batches."""
    torch.manual_seed(0)
    dataset, results = ShardDataset(shards, "train"), []
    detector = build(tiny(model__score_threshold=0.0).model, 5).eval()
    for size in (1, 5):
        config = tiny(evaluation__batch_size=size)
        results.append(predict_share(detector.predict, dataset, config, SINGLE, reentrant=False))
    one, five = results
    assert one.image_ids.tolist() == five.image_ids.tolist() and len(one) > 100
    assert one.scores == pytest.approx(five.scores, abs=1e-5)
