"""Training: resumed bit for bit, stopped cleanly, ended early, refused clearly."""

import dataclasses
import logging
import os
import shutil
import threading

import pytest
import torch
from finished_runs import assert_same_weights, final_weights, losses, stopped_after, train_in_parts

from trainer import storage
from trainer.base.errors import CheckpointError, ConfigError, StorageError
from trainer.config.parsing import to_json
from trainer.data.shard_index import ShardDataset
from trainer.model.architecture import build
from trainer.trackers.training_log import TrainingLog, read_rows
from trainer.training import checkpoint, run_recorder
from trainer.training.checkpoint import load_model
from trainer.training.loop import train

NAME = "backbone.body.layer4.0.conv1.weight"
FP32 = {"train__precision": "fp32"}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, shards, tiny):
    """A whole run of the tiny configuration that nothing disturbed."""
    output = str(tmp_path_factory.mktemp("unbroken"))
    return output, train(tiny(), shards, output)


def test_a_run_leaves_what_it_says(unbroken, shards):
    output, result = unbroken
    assert result == storage.read_json(f"{output}/result.json")
    assert result["steps"] == 12 and result["images_per_second"] > 0 and result["resumed_from"] is None
    rows = read_rows(output)
    assert [row["step"] for row in rows if row["kind"] == "train"] == list(range(1, 13))
    assert [row["epoch"] for row in rows if row["kind"] == "val"] == [1, 2]
    assert os.listdir(f"{output}/tensorboard")
    detector, meta = checkpoint.load_model(result["checkpoint"])
    assert meta["metrics"] == result["metrics"] and len(meta["categories"]) == 5
    assert not detector.training
    # Only the newest are kept.
    assert sorted(os.listdir(f"{output}/checkpoints")) == ["step-00000006.pt", "step-00000012.pt"]


@pytest.mark.slow
@pytest.mark.parametrize(("signalled", "stopped"), [(2, 3), (6, 6), (7, 8)])
def test_resumed_bit_for_bit(signalled, stopped, unbroken, shards, tiny, tmp_path):
    """Stopped within an epoch, at its end (before the validation), and after it."""
    output = str(tmp_path)
    with stopped_after(signalled):
        train(tiny(), shards, output)
    result = train(tiny(), shards, output)
    assert result["resumed_from"] == stopped
    assert losses(output) == losses(unbroken[0])
    assert [row for row in read_rows(output) if row["kind"] == "val"] == [
        row for row in read_rows(unbroken[0]) if row["kind"] == "val"
    ]
    assert_same_weights(final_weights(output), final_weights(unbroken[0]))
    assert result["metrics"] == unbroken[1]["metrics"]


def test_training_goes_on_while_a_validation_is_scored(unbroken, shards, tiny, tmp_path, monkeypatch):
    """The score of step 6 is held back until step 8 is logged: a loop that waits for it never gets there."""
    later, score, add = threading.Event(), run_recorder.evaluate_coco, TrainingLog.add

    def adding(self, kind, row):
        add(self, kind, row)
        if kind == "train" and row["step"] == 8:
            later.set()

    monkeypatch.setattr(TrainingLog, "add", adding)
    monkeypatch.setattr(run_recorder, "evaluate_coco", lambda *a, **o: later.wait(30) and score(*a, **o))
    result = train(tiny(), shards, str(tmp_path))
    assert result["metrics"] == unbroken[1]["metrics"] and result["best_step"] == unbroken[1]["best_step"]
    rows = [(row["kind"], row["step"]) for row in read_rows(str(tmp_path))]
    assert rows.index(("val", 6)) > rows.index(("train", 8))


@pytest.mark.slow
def test_a_validation_that_was_cut_off_is_repeated(unbroken, shards, tiny, tmp_path):
    """Killed after the state was saved and before it was scored, or in the middle of that."""
    output = shutil.copytree(unbroken[0], tmp_path / "run")
    before = checkpoint.read_step(f"{output}/checkpoints", 6)
    last = {**checkpoint.read_step(f"{output}/checkpoints", 12), "validated": 6, "best": before["best"]}
    checkpoint.write_step(last, f"{output}/checkpoints", 12, keep=2)
    result = train(tiny(), shards, str(output))
    assert result["resumed_from"] == 12 and result["metrics"] == unbroken[1]["metrics"]
    assert read_rows(str(output)) == read_rows(unbroken[0])
    assert checkpoint.read_step(f"{output}/checkpoints", 12)["validated"] == 12


def test_a_finished_run_is_found_finished(unbroken, shards, tiny):
    output, first = unbroken
    before = losses(output)
    again = train(tiny(), shards, output)
    assert again["resumed_from"] == 12 and again["metrics"] == first["metrics"]
    assert losses(output) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("whole", "parts"),
    [
        ({"train__batch_size": 4}, {"train__batch_size": 2, "train__global_batch": 4}),
        # Passes of 1, 2 and 2 images: each weighs as many images as it has.
        ({"train__batch_size": 5}, {"train__batch_size": 2, "train__global_batch": 5}),
    ],
)
def test_several_passes_equal_a_larger_batch(whole, parts, shards, tiny, tmp_path):
    # BatchNorm sees the smaller batches; without it the gradients are the same sums.
    common = {**FP32, "model__norm": "group", "train__epochs": 1}
    train(tiny(**common, **whole), shards, str(tmp_path / "whole"))
    train(tiny(**common, **parts), shards, str(tmp_path / "parts"))
    one, other = losses(str(tmp_path / "whole")), losses(str(tmp_path / "parts"))
    assert len(one) == len(other) >= 5
    for step in one:
        assert other[step] == pytest.approx(one[step], rel=2e-3), step


@pytest.mark.parametrize(
    "overrides",
    [
        {"train__precision": "fp16"},
        {"train__optimizer": "sgd", "train__schedule": "multistep", "train__ema_decay": 0.0},
        {"train__optimizer": "adam", "model__version": "v1", "train__warmup_epochs": 0.5},
    ],
)
def test_other_ways_to_train(overrides, shards, tiny, tmp_path):
    result = train(tiny(**overrides, train__epochs=1), shards, str(tmp_path))
    assert result["steps"] == 6 and len(result["metrics"]) == 12


def test_frozen_layers_of_pretrained_weights_stay_and_a_resumed_run_needs_no_weights(shards, tiny, tmp_path):
    weights = tmp_path / "weights.pt"
    frozen = {"model__norm": "frozen", "model__trainable_layers": 2, "model__weights": str(weights)}
    body = build(tiny().model, 1).state_dict()
    torch.save({name: value for name, value in body.items() if name.startswith("backbone.body.")}, weights)
    train(tiny(**frozen, train__epochs=1), shards, str(tmp_path / "run"))
    weights.unlink()
    train(tiny(**frozen, train__epochs=2), shards, str(tmp_path / "run"))
    trained = load_model(str(tmp_path / "run/best.pt"))[0].state_dict()
    for name, value in trained.items():
        part = name.removeprefix("backbone.body.").split(".")[0]
        if part in ("conv1", "bn1", "layer1", "layer2"):
            assert torch.equal(value, body[name]), name
    assert not torch.equal(trained[NAME], body[NAME])
    with pytest.raises(StorageError, match=r"model\.weights: .*weights\.pt"):
        train(tiny(**frozen), shards, str(tmp_path / "another"))


def test_another_configuration_does_not_take_up_a_checkpoint(unbroken, shards, tiny):
    with pytest.raises(CheckpointError, match=r"train\.lr: 0\.003 in the checkpoint, 0\.1 now"):
        train(tiny(train__lr=0.1), shards, unbroken[0])


def test_a_run_goes_on_with_its_global_batch_on_other_processes(unbroken, shards, tiny, tmp_path):
    """What two processes with batches of 2 began, one takes up: in two passes of 2, not one."""
    output = str(tmp_path)
    saved = {**checkpoint.read(f"{unbroken[0]}/checkpoints/step-00000006.pt")}
    saved["config"] = to_json(tiny(train__batch_size=2))
    checkpoint.write_step(saved, f"{output}/checkpoints", 6, keep=2)
    result = train(tiny(train__batch_size=2), shards, output)
    assert result["resumed_from"] == 6 and result["steps"] == 12
    assert final_weights(output)["samples"] == 48


def test_resume_none_starts_anew(shards, tiny, tmp_path):
    config = tiny(train__epochs=1)
    train(config, shards, str(tmp_path))
    assert train(config, shards, str(tmp_path), resume="none")["resumed_from"] is None


QUICK = {"train__epochs": 6, "train__batch_size": 8}
"""Three steps an epoch."""
SCORES = {1: 0.2, 2: 0.4, 3: 0.3, 4: 0.4, 5: 0.35, 6: 0.5}
"""By epoch: none after the second is better before the sixth."""


@pytest.fixture
def scored(monkeypatch):
    """Validations score as SCORES says."""
    evaluate, score, current = run_recorder.evaluate_coco, run_recorder.Recorder._score, []

    def noting(self, truth, predictions):
        current[:] = [SCORES[self._saved["epoch"]]]
        score(self, truth, predictions)

    def scoring(*given, **options):
        evaluated = evaluate(*given, **options)
        metrics = dict.fromkeys(("coco/AP", "coco/AP50"), current[0])
        return dataclasses.replace(evaluated, metrics={**evaluated.metrics, **metrics})

    monkeypatch.setattr(run_recorder.Recorder, "_score", noting)
    monkeypatch.setattr(run_recorder, "evaluate_coco", scoring)


@pytest.mark.slow
def test_it_ends_after_as_many_epochs_without_a_better_score(scored, shards, tiny, tmp_path, caplog):
    """Stopped and resumed it ends at the same step."""
    caplog.set_level(logging.INFO, "train")
    config = tiny(**QUICK, train__patience=2)
    whole, result = train_in_parts(config, shards, tmp_path, 7)
    assert whole["ended_early"] and (whole["steps"], whole["epochs"]) == (12, 4)
    assert whole["best_step"] == 6 and whole["metrics"]["coco/AP"] == 0.4
    assert "no better coco/AP since epoch 2: stopping after epoch 4 of 6" in caplog.text
    rows = read_rows(str(tmp_path / "whole"))
    assert [row["epoch"] for row in rows if row["kind"] == "val"] == [1, 2, 3, 4]
    assert {**result, "seconds": 0, "images_per_second": 0, "checkpoint": "", "resumed_from": 0} == {
        **whole,
        "seconds": 0,
        "images_per_second": 0,
        "checkpoint": "",
        "resumed_from": 0,
    }


def test_without_a_validation_split_it_is_refused(shards, tiny, tmp_path, monkeypatch):
    opened = ShardDataset.__init__

    def without_val(self, *given):
        opened(self, *given)
        self.index = dataclasses.replace(self.index, splits={"train": self.index.splits["train"]})

    monkeypatch.setattr(ShardDataset, "__init__", without_val)
    with pytest.raises(ConfigError, match=r"train\.patience=2 needs a validation split") as caught:
        train(tiny(train__patience=2), shards, str(tmp_path))
    assert "data.val_fraction" in caught.value.fix


STRONG = {
    "loader__sizes": [96, 128], "loader__mosaic": 0.5, "loader__mixup": 0.3, "loader__plain_epochs": 1,
    "loader__sampling": "repeat_factor", "loader__repeat_threshold": 0.9, "train__epochs": 3,
    "loader__resize": "squash", "loader__zoom_out": 0.5, "loader__iou_crop": 0.8, "loader__fill": 0,
    "loader__brightness": 0.2, "loader__color_probability": 0.5, "loader__channel_shuffle": 0.5,
    "train__lr_batch": 8, "train__lr_scaling": "linear", "train__scale_steps": True,
    "train__ema_decay": 0.9, "train__ema_ramp": "exponential", "train__ema_steps": 20,
}  # fmt: skip


@pytest.mark.slow
def test_strongly_augmented_it_is_resumed_bit_for_bit(shards, tiny, tmp_path):
    """Stopped within the plain epoch, after those with mosaics."""
    _, result = train_in_parts(tiny(**{**STRONG, "train__epochs": 2}), shards, tmp_path, 7)
    assert result["resumed_from"] == 8
