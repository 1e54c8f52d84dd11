"""`kubedet evaluate`."""

import json

import pytest
import torch

from trainer import checkpoint, configuration
from trainer.data.shard_index import ShardDataset
from trainer.model.detector import build


@pytest.fixture
def model(tiny, shards, tmp_path):
    torch.manual_seed(0)
    config = tiny(model__score_threshold=0.0)
    dataset = ShardDataset(shards, "test")
    uri = str(tmp_path / "best.pt")
    checkpoint.write(
        {
            "config": configuration.to_json(config), "categories": dataset.categories, "step": 7, "epoch": 1,
            "metrics": {}, "fingerprint": dataset.fingerprint, "global_batch": 8,
            "model": build(config.model, len(dataset.categories)).state_dict(),
        },
        uri,
    )  # fmt: skip
    return uri


@pytest.mark.slow
def test_a_checkpoint_is_scored_alone(kubedet, model, shards, tmp_path):
    output = tmp_path / "evaluation"
    words = ("evaluate", model, "--shards", shards, "-o", output, "--split", "val")
    code, out, _ = kubedet(*words, "--gate", "coco/AP >= 0.99", "--set", "evaluation.predictions=json")
    assert code == 1
    assert "precision      AP    AP50" in out and "gate: failed\n  coco/AP 0." in out
    assert f"report: {output}/report.html" in out
    summary = json.loads((output / "metrics.json").read_text())
    assert summary["split"] == "val" and summary["predictions"] == f"{output}/predictions.json"
    assert isinstance(json.loads((output / "predictions.json").read_text()), list)


def test_mistakes_are_told_before_any_work(kubedet, model, shards, tmp_path):
    words = ("evaluate", model, "--shards", shards, "-o", tmp_path / "e")
    code, _, err = kubedet(*words, "--gate", "coco/AP == 1")
    assert code == 2 and "gate rule 'coco/AP == 1' cannot be read" in err
    code, _, err = kubedet(*words, "--set", "evaluation.bootstap=5")
    assert code == 2 and "did you mean evaluation.bootstrap" in err
    code, _, err = kubedet("evaluate", tmp_path / "no.pt", *words[2:])
    assert code == 2 and "no.pt" in err
    assert not (tmp_path / "e").exists()
