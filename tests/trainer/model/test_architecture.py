"""The protocol: a detector that nobody knows goes all the way."""

import dataclasses
import json
from dataclasses import asdict

import pytest
from life import live
from toy_detector import ToyOptions

from trainer.base.errors import CheckpointError, ConfigError
from trainer.config import architectures
from trainer.config.architectures import Entry
from trainer.config.parsing import from_json, with_overrides
from trainer.model import recipes
from trainer.trackers.training_log import read_rows
from trainer.training.loop import train


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    """Register the toy, which is one line."""
    monkeypatch.setitem(
        architectures.ARCHITECTURES, "toy", Entry("toy_detector:ToyOptions", "toy_detector:Toy")
    )


@pytest.fixture
def config(tiny):
    """A tiny training of the toy."""
    return dataclasses.replace(tiny(), model=ToyOptions(score_threshold=0.1))


@pytest.mark.slow
def test_a_toy_of_one_file_and_one_line_lives_the_whole_life(config, shards, tmp_path):
    lived = live(config, shards, tmp_path, 7)
    assert set(lived["formats"]) == {"onnx"}
    rows = [row for row in read_rows(str(tmp_path / "whole")) if row["kind"] == "train"]
    assert all(row["loss"] == pytest.approx(row["loss_objects"] + row["loss_boxes"]) for row in rows)
    described = json.loads((tmp_path / "model" / "model_metadata.json").read_text())
    assert described["architecture"] == {"name": "toy", "title": "a toy"}
    assert described["thresholds"] == {"score": 0.1, "detections_per_image": 100}
    assert described["outputs"]["rows"] == 36
    card = (tmp_path / "model" / "MODEL_CARD.md").read_text()
    assert "An object detector: a toy, 5 classes" in card and "suppressed" not in card
    assert "loss_objects" not in card and "objects" in (tmp_path / "evaluation" / "report.html").read_text()


def test_options_of_another_architecture_are_refused_by_name(config):
    tree = asdict(config)
    tree["model"] |= {"aspect_ratios": [1.0], "depth": 3}
    with pytest.raises(ConfigError) as caught:
        from_json(json.dumps(tree))
    assert "model.aspect_ratios: an option of retinanet, not of toy" in caught.value.message
    assert "model.depth: no such key" in caught.value.message
    with pytest.raises(ConfigError, match=r"'model\.width': it is an option of .*toy, not of retina"):
        recipes.load("debug", {"model.width": 3})


def test_another_architecture_brings_its_own_defaults(config):
    changed = recipes.load("finetune", {"model.architecture": "toy", "model.width": 5})
    assert changed.model == ToyOptions(width=5)
    assert with_overrides(config, {"model.architecture": "toy"}).model == config.model


def test_sizes_that_it_cannot_do_are_told_with_the_configuration(config):
    with pytest.raises(ConfigError) as caught:
        with_overrides(config, {"loader.image_size": 100})
    assert "loader.image_size: toy needs a multiple of 16, not 100; the nearest are 96 and 112" in str(
        caught.value
    )


def test_what_is_not_installed_is_told_before_anything_is_built(monkeypatch, config, shards, tmp_path):
    toy_line = architectures.ARCHITECTURES["toy"]
    monkeypatch.setitem(
        architectures.ARCHITECTURES, "toy", toy_line._replace(extra="detr", packages=("no_such_package",))
    )
    assert from_json("{}") and with_overrides(config, {"model.width": 3}).model.width == 3
    with pytest.raises(ConfigError) as caught:
        train(config, shards, str(tmp_path))
    assert "toy needs packages that are not installed: no_such_package" in str(caught.value)
    assert "[detr]" in caught.value.fix


def test_a_checkpoint_of_another_architecture_is_refused(config, tiny, shards, tmp_path):
    train(
        dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=1)), shards, str(tmp_path)
    )
    with pytest.raises(
        CheckpointError, match=r"model\.architecture: 'toy' in the checkpoint, 'retinanet' now"
    ):
        train(tiny(), shards, str(tmp_path))


def test_weights_of_another_library_are_told_with_the_configuration():
    with pytest.raises(ConfigError, match=r"model\.weights: hf:a/b has weights of transformers, which ret"):
        recipes.load("finetune", {"model.weights": "hf:a/b"})
