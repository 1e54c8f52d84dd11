"""Manifests for steps."""

import json

import pytest
from small_index import index

from trainer.steps.manifests import Shards


@pytest.fixture
def shards_manifest(tmp_path):
    """Returns the manifest of a folder with an index of 100 training images, of squares."""
    folder = tmp_path / "data" / "shards" / "f00d"
    folder.mkdir(parents=True)
    categories = [{"id": 0, "name": "square"}]
    source = "coco:/data/my cards/annotations/instances_train.json"
    (folder / "index.json").write_text(
        json.dumps(index({"train": 100}, categories=categories, source=source))
    )

    def make(recipe="debug", overrides=None, **fields):
        return Shards(
            data_root=str(tmp_path / "data"),
            uri=str(folder),
            fingerprint="f00d",
            samples={"train": 100},
            boxes={"train": 100},
            recipe=recipe,
            overrides=overrides or {},
            **fields,
        )

    return make
