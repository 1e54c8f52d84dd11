"""What was trained and exported before there was `model.architecture` is a RetinaNet, everywhere."""

import json
import urllib.request

import pytest
from finished_runs import assert_same_weights, final_weights, losses, stop_after
from PIL import Image
from served_model import served

from pipelines import cli
from trainer import storage
from trainer.base.errors import Interrupted
from trainer.data.shard_index import ShardDataset
from trainer.evaluation.evaluate import evaluate
from trainer.export import bundle
from trainer.export.export import export
from trainer.training import checkpoint
from trainer.training.loop import train


def forget(tree):
    """Take out of a configuration what it had not then."""
    assert tree["model"].pop("architecture") == "retinanet"
    return tree


def forget_in_checkpoint(uri):
    state = checkpoint.read(uri)
    del state["version"]
    checkpoint.write({**state, "config": json.dumps(forget(json.loads(state["config"])))}, uri)


@pytest.fixture(scope="module")
def runs(tiny, shards, tmp_path_factory):
    """Configuration; a whole training, and one that was stopped, whose files are then made old: folders."""
    config = tiny(train__epochs=4, train__validate_every=2, model__score_threshold=0.03)
    whole, broken = (str(tmp_path_factory.mktemp(name)) for name in ("whole", "broken"))
    train(config, shards, whole)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        stop_after(patch, 7)
        train(config, shards, broken)
    for name in storage.list_files(f"{broken}/checkpoints"):
        forget_in_checkpoint(f"{broken}/checkpoints/{name}")
    return config, whole, broken


@pytest.fixture(scope="module")
def old_bundle(runs, shards, tmp_path_factory):
    """A bundle without the keys, sealed as it was; and the checkpoint that it is made from, of then too."""
    config, whole, _ = runs
    best, folder = f"{whole}/{checkpoint.BEST}", tmp_path_factory.mktemp("bundle")
    forget_in_checkpoint(best)
    export(best, shards, str(folder), config)
    path = folder / bundle.METADATA
    metadata = json.loads(path.read_text())
    del metadata["architecture"]
    path.write_text(json.dumps(metadata | {"config": forget(metadata["config"])}))
    (folder / bundle.CHECKSUMS).unlink()
    bundle.seal(folder)
    return str(folder), best


@pytest.fixture
def picture(shards, tmp_path):
    """A validation image as a file."""
    path = tmp_path / "picture.png"
    Image.new("RGB", (120, 90), (90, 20, 160)).save(path)
    return path


@pytest.mark.slow
def test_a_training_goes_on_to_the_same_bits(runs, shards):
    config, whole, broken = runs
    assert train(config, shards, broken)["resumed_from"] >= 7
    assert losses(broken) == losses(whole)
    assert_same_weights(final_weights(whole), final_weights(broken))


@pytest.mark.slow
@pytest.mark.extra
def test_checkpoint_weights_and_exported_file_are_scored_alike(old_bundle, runs, shards, tmp_path):
    folder, best = old_bundle
    uris = (best, f"{folder}/model.safetensors", f"{folder}/model.onnx")
    scores = [
        evaluate(uri, shards, str(tmp_path / str(number)), runs[0])["metrics"]["coco/AP"]
        for number, uri in enumerate(uris)
    ]
    assert scores[0] > 0 and scores == pytest.approx([scores[0]] * 3, abs=1e-3)


@pytest.mark.slow
def test_the_bundle_is_opened_listed_and_exported_again(old_bundle, shards, runs, picture, tmp_path, capsys):
    folder, best = old_bundle
    assert cli.main(["predict", folder, str(picture), "-o", str(tmp_path / "found")]) == 0
    assert "picture" in capsys.readouterr().out
    made = export(best, shards, str(tmp_path / "model"), runs[0])
    assert made["fingerprint"] == ShardDataset(shards, "val").fingerprint


@pytest.mark.slow
def test_the_bundle_is_served(old_bundle, picture):
    with served(old_bundle[0]) as (port, name):
        for path in ("/", f"/v2/models/{name}"):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
                assert answer.status == 200
