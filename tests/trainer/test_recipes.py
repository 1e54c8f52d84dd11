"""What recipes promise of themselves."""

import pytest
import torch
import torchvision

from trainer import recipes
from trainer.data.shard_index import ShardDataset
from trainer.distributed import process_group
from trainer.errors import CheckpointError
from trainer.evaluation import coco_metrics, gate
from trainer.evaluation.inference import predict_split
from trainer.model.architecture import build
from trainer.model.pretrained import check_pretrained

OWN = ["small", "finetune", "dfine_small", "dfine_finetune"]


@pytest.mark.parametrize("name", OWN)
def test_the_gate_of_recipes_for_own_sets_holds_a_model_back_that_finds_nothing(name):
    rules = recipes.load(name).evaluation.gate
    assert not gate.decide(gate.Evidence({"coco/AP": 0.0, "coco/AP50": 0.0}), rules).passed
    assert gate.decide(gate.Evidence({"coco/AP": 0.1, "coco/AP50": 0.2}), rules).passed


@pytest.mark.parametrize("name", ["small", "dfine_small"])
def test_an_untrained_detector_stays_below_the_gate_even_where_every_score_counts(name, shards):
    torch.manual_seed(0)
    config = recipes.load(name, {"model.score_threshold": 0.0, "loader.image_size": 128})
    train_set = ShardDataset(shards, "train")
    detector = build(config.model, len(train_set.categories)).eval()
    with process_group() as world:
        predictions = predict_split(detector, train_set, config, world)
    metrics = coco_metrics.evaluate(train_set.annotations(), predictions).metrics
    assert len(predictions.scores) and metrics["coco/AP50"] < 0.05
    assert not gate.decide(gate.Evidence(metrics), config.evaluation.gate).passed


def test_small_takes_published_weights_at_their_width(tmp_path):
    path = tmp_path / "resnet18.pth"
    torch.save(torchvision.models.resnet18().state_dict(), path)
    given = {"model.weights": str(path)}
    check_pretrained(recipes.load("small", given | {"model.backbone_width": 64}).model, str(tmp_path))
    with pytest.raises(CheckpointError, match=r"conv1\.weight: 64x3x7x7 in the file, 24x3x7x7 in the model"):
        check_pretrained(recipes.load("small", given).model, str(tmp_path))
