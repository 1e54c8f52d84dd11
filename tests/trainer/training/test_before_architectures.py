"""A bundle that was written before `model.architecture` existed is a RetinaNet."""

import json

import pytest
from PIL import Image

from kubedet import cli
from trainer.export import bundle
from trainer.export.export import export
from trainer.training import checkpoint


def forget(tree):
    """Remove the key from a configuration."""
    assert tree["model"].pop("architecture") == "retinanet"
    return tree


@pytest.mark.slow
def test_an_old_checkpoint_is_exported_and_an_old_bundle_is_opened(saved, config, shards, tmp_path, capsys):
    best, folder = saved(), tmp_path / "bundle"
    state = checkpoint.read(best)
    del state["version"]
    checkpoint.write({**state, "config": json.dumps(forget(json.loads(state["config"])))}, best)
    export(best, shards, str(folder), config)
    path = folder / bundle.METADATA
    metadata = json.loads(path.read_text())
    del metadata["architecture"]
    path.write_text(json.dumps(metadata | {"config": forget(metadata["config"])}))
    (folder / bundle.CHECKSUMS).unlink()
    bundle.seal(folder)
    Image.new("RGB", (120, 90), (90, 20, 160)).save(tmp_path / "picture.png")
    picture = str(tmp_path / "picture.png")
    assert cli.main(["predict", str(folder), picture, "-o", str(tmp_path / "found")]) == 0
    assert "picture" in capsys.readouterr().out
