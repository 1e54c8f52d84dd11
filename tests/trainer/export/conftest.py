"""What the tests of the export share."""

import json
from dataclasses import asdict

import pytest
from bundles import make_bundle
from served_model import served

from trainer import checkpoint
from trainer.data.shard_index import ShardDataset
from trainer.model.architecture import build


@pytest.fixture
def bundle_uri(tmp_path):
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


@pytest.fixture
def address(bundle_uri):
    """Host and port of a running server of the small model."""
    with served(bundle_uri) as (port, _):
        yield "127.0.0.1", port
