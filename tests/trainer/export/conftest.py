"""What the tests of the export share."""

import json
from dataclasses import asdict

import pytest
from bundles import make_bundle

from trainer import checkpoint
from trainer.data.shard_index import ShardDataset
from trainer.model.detector import build


@pytest.fixture
def made(tmp_path):
    """URI of a whole bundle."""
    return make_bundle(tmp_path / "made")


@pytest.fixture
def untrained(tiny, shards, tmp_path):
    """Write a checkpoint of random weights, changed as asked."""

    def write(**changes):
        config = tiny()
        detector = build(config.model, 5)
        state = {
            "model": detector.state_dict(), "config": json.dumps(asdict(config)), "step": 0, "epoch": 0,
            "categories": ShardDataset(shards, "val").categories, "metrics": {}, "fingerprint": "f",
        }  # fmt: skip
        checkpoint.write({**state, **changes}, str(tmp_path / "best.pt"))
        return str(tmp_path / "best.pt")

    return write
