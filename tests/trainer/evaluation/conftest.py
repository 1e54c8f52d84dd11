"""What the tests of evaluation share."""

import pytest
import torch

from trainer import checkpoint
from trainer.configuration import to_json
from trainer.data.shard_index import ShardDataset
from trainer.model.detector import build


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
