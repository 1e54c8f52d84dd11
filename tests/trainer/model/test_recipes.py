"""What recipes promise of themselves."""

import pytest
import torch

from trainer.base.errors import ConfigError
from trainer.data.shard_index import ShardDataset
from trainer.evaluation import coco_metrics, gate
from trainer.evaluation.inference import predict_split
from trainer.launching.distributed import process_group
from trainer.model import recipes
from trainer.model.architecture import build

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


def test_a_file_stands_for_a_recipe_and_overrides(tmp_path):
    file = tmp_path / "best.yaml"
    overrides = {"train.lr": 1e-05, "loader.scale": [0.9, 1.0], "train.epochs": 3}
    file.write_text(recipes.file_text("debug", overrides))
    assert recipes.named(str(file)) == ("debug", overrides)
    assert recipes.named("debug") == ("debug", {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("recipe: [", "not YAML"),
        ("- debug", "not a recipe's file"),
        ("set: {train.lr: 0.1}", "not a recipe's file"),
        ("recipe: debug\nsets: {}", "not a recipe's file"),
        ("recipe: debug\nset: [1]", "not a recipe's file"),
        ("recipe: debug\nset: {train.rate: 1}", "no key 'train.rate'"),
        ("recipe: best", "no recipe 'best'"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path, text, said):
    file = tmp_path / "best.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        recipes.named(str(file))
