"""Scoring a checkpoint on a split: every image once, boxes in the image's pixels, the right classes."""

import json

import numpy as np
import pytest
import torch

from trainer import checkpoint
from trainer.config import to_json
from trainer.data.shard_index import ShardDataset
from trainer.distributed import SINGLE
from trainer.errors import EvaluationError
from trainer.evaluation import coco
from trainer.evaluation.evaluate import evaluate
from trainer.evaluation.inference import in_images, predict_split
from trainer.evaluation.tables import Predictions
from trainer.model.detector import build
from trainer.model.postprocess import Detections


@pytest.fixture(scope="module")
def config(tiny):
    return tiny(model__score_threshold=0.0)


@pytest.fixture
def saved(config, shards, tmp_path):
    torch.manual_seed(0)
    dataset = ShardDataset(shards, "test")
    state = {
        "config": to_json(config), "categories": dataset.categories, "fingerprint": dataset.fingerprint,
        "global_batch": 8, "step": 7, "epoch": 1, "metrics": {}, "ema": None,
        "model": build(config.model, len(dataset.categories)).state_dict(),
    }  # fmt: skip
    uri = str(tmp_path / "train" / "best.pt")

    def save(**changes):
        checkpoint.write({**state, **changes}, uri)
        return uri

    return save


def test_everything_is_written_and_agrees(saved, shards, config, tmp_path):
    output = str(tmp_path / "evaluation")
    summary = evaluate(saved(), shards, output, config)
    assert summary["split"] == "test" and summary["images"] == 4 and summary["step"] == 7
    written = {path.name for path in (tmp_path / "evaluation").iterdir()}
    assert written == {"metrics.json", "predictions.parquet", "table.txt", "report.html", "report.md"}
    assert json.loads((tmp_path / "evaluation" / "metrics.json").read_text()) == summary
    predictions, made_of = Predictions.read(str(tmp_path / "evaluation" / "predictions.parquet"))
    assert made_of["fingerprint"] == summary["fingerprint"]
    truth = ShardDataset(shards, "test").annotations()
    assert coco.evaluate(truth, predictions).metrics == summary["metrics"]
    assert set(predictions.image_ids.tolist()) == {image["id"] for image in truth["images"]}


def test_other_classes_are_refused_by_name(saved, shards, config, tmp_path):
    categories = [{"id": i, "name": n, "original_id": i} for i, n in enumerate("abcde")]
    with pytest.raises(EvaluationError, match="differ in"):
        evaluate(saved(categories=categories), shards, str(tmp_path / "e"), config)
    assert not (tmp_path / "e").exists()


def test_every_image_is_predicted_once_whatever_the_batch(shards, tiny):
    torch.manual_seed(0)
    dataset = ShardDataset(shards, "train")
    one, five = tiny(evaluation__batch_size=1), tiny(evaluation__batch_size=5)
    detector = build(one.model, 5).eval()
    first = predict_split(detector, dataset, one, SINGLE)
    second = predict_split(detector, dataset, five, SINGLE)
    assert len(first) == len(second)
    assert first.image_ids.tolist() == sorted(first.image_ids.tolist())
    assert first.scores == pytest.approx(second.scores, abs=1e-5)


def test_boxes_come_back_to_the_image_and_are_clipped():
    found = Detections(
        torch.tensor([[[10.0, 20.0, 30.0, 96.0], [0.0, 0.0, 0.0, 0.0]]]), torch.tensor([[0.5, 0.0]]),
        torch.tensor([[3, -1]]), torch.tensor([1]),
    )  # fmt: skip
    (result,) = in_images(found, [42], [0.5], {42: np.array([50, 150])}).to_coco()
    assert result == {"image_id": 42, "category_id": 3, "bbox": [20.0, 40.0, 30.0, 110.0], "score": 0.5}
