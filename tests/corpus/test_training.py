"""Public reports about training and resuming: each situation, and what kubedet answers."""

from pathlib import Path

import pytest
import torch
from batches import take
from finished_runs import stopped_after
from steps import steps_of

from trainer.data.batch import PADDING
from trainer.data.shard_index import ShardDataset
from trainer.launching.distributed import SINGLE
from trainer.model import recipes
from trainer.trackers.training_log import read_rows
from trainer.training import checkpoint
from trainer.training.loop import train

DETRS = {
    "rtdetr": {"model.architecture": "rtdetr", "model.size": "r18", "model.denoising": 10},
    "rfdetr_finetune": {"model.groups": 2},
}
"""Overrides by detector: narrow ones."""


@pytest.mark.slow
def test_ultralytics_22363_a_resumed_run_skips_no_epoch(shards, tiny, tmp_path):
    """After an interruption the training went on one epoch too late; here each step is done once."""
    for stop in (2, 5):
        with stopped_after(stop):
            train(tiny(), shards, str(tmp_path))
    assert train(tiny(), shards, str(tmp_path))["steps"] == 12
    rows = read_rows(str(tmp_path))
    assert [row["step"] for row in rows if row["kind"] == "train"] == list(range(1, 13))
    assert [row["epoch"] for row in rows if row["kind"] == "val"] == [1, 2]


@pytest.mark.slow
def test_rf_detr_969_best_ema_survives_a_resume(shards, tiny, tmp_path):
    """The best score was forgotten, so that the first validation after a resume replaced better weights."""
    config, output = tiny(train__ema_decay=0.9), str(tmp_path)
    with stopped_after(7):  # The validation of step 6 is done.
        train(config, shards, output)
    saved = checkpoint.read_latest(f"{output}/checkpoints")
    assert saved["best"]["step"] == 6
    metrics = dict.fromkeys(saved["best"]["metrics"], 0.99)
    saved = {**saved, "best": {**saved["best"], "metrics": metrics}}
    checkpoint.write_step(saved, f"{output}/checkpoints", saved["step"], keep=2)
    before = Path(output, "best.pt").read_bytes()
    assert train(config, shards, output)["best_step"] == 6
    assert Path(output, "best.pt").read_bytes() == before


def without_gradient(name, shards, output, empty):
    """Names of the parameters without a gradient after a pass; `empty` has an image without targets."""
    overrides = {
        "loader.image_size": 160, "loader.sizes": [], "loader.workers": 1, "model.width": 0.25,
        "model.queries": 20, "model.weights": "", "model.sync_batchnorm": False, "train.batch_size": 2,
        "train.global_batch": 4, "train.precision": "fp32",
    }  # fmt: skip
    recipe = name if name in recipes.RECIPES else "debug"
    with steps_of(recipes.load(recipe, overrides | DETRS[name]), shards, output) as (run, _):
        batches = run.loader.batches(0)
        pair = [next(batches), next(batches)]
        batches.close()
        if empty:
            nothing = torch.full_like(pair[1].labels, PADDING)
            pair[1] = pair[1]._replace(labels=nothing, counts=[0] * len(pair[1].counts))
        losses = run.train_step.losses(pair[1], run.train_step._make_contexts(pair, 4, SINGLE)[1])
        assert all(torch.isfinite(loss) for loss in losses.values())
        sum(losses.values()).backward()
        parameters = run.state.detector.named_parameters()
        return [key for key, value in parameters if value.requires_grad and value.grad is None]


@pytest.mark.slow
def test_rf_detr_1093_every_parameter_takes_part_in_a_step(shards, tmp_path):
    """DDP ended with "unused parameters"; here each one that is trained has a gradient."""
    assert without_gradient("rfdetr_finetune", shards, str(tmp_path), empty=False) == []


@pytest.mark.slow
def test_rt_detr_672_a_rank_whose_images_have_no_objects(shards, tmp_path):
    """Its denoising queries were left out, and the other ranks waited for their gradients for ever."""
    assert without_gradient("rtdetr", shards, str(tmp_path), empty=True) == []


def test_rf_detr_916_every_step_has_the_whole_batch(shards, tiny):
    """The last step of an epoch had as few images as were left; here a step goes on in the next epoch."""
    dataset = ShardDataset(shards, "train")
    passes = take(dataset, tiny().loader, 3 * 6, global_batch=5, batch_size=2)
    sizes = [len(batch.image_ids) for batch in passes]
    assert len(dataset) == 24 and [sum(sizes[start : start + 3]) for start in range(0, 18, 3)] == [5] * 6
