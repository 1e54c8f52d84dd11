"""D-FINE in our loop. Its whole life: test_life.py."""

import dataclasses

import pytest
import torch
from finished_runs import losses, stop_after

from trainer.base.errors import Interrupted
from trainer.model import recipes
from trainer.trackers.training_log import read_rows
from trainer.training import batch_fitting
from trainer.training.loop import train


@pytest.fixture
def narrow(tiny):
    """A tiny training of D-FINE."""

    def config(**overrides):
        model = {
            "model.architecture": "dfine", "model.size": "n", "model.width": 0.25,
            "model.queries": 20, "model.denoising": 10,
        }  # fmt: skip
        base = recipes.load("debug", model)
        others = tiny(**{"train__lr": 1e-3, "train__clip_norm": 0.5, **overrides})
        return dataclasses.replace(others, model=base.model)

    return config


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.extra)])
def test_trains_in_every_precision(precision, narrow, shards, tmp_path):
    changes = {"train__epochs": 2, "train__lr": 3e-3, "train__precision": precision}
    result = train(narrow(**changes), shards, str(tmp_path))
    assert result["steps"] == 12 and len(result["metrics"]) == 12
    rows = [row for row in read_rows(str(tmp_path)) if row["kind"] == "train"]
    for row in rows:
        parts = [row[f"loss_{name}"] for name in ("vfl", "bbox", "giou", "fgl", "ddf")]
        assert sum(parts) == pytest.approx(row["loss"], rel=1e-5)
    # What the sides cost differs more from batch to batch than they are learnt in twelve steps.
    assert rows[-1]["loss_vfl"] < rows[0]["loss_vfl"]


@pytest.mark.slow
def test_several_passes_equal_a_larger_batch(narrow, shards, tmp_path, monkeypatch):
    """Passes of 1, 2 and 2 images: boxes are counted over all five."""
    # A batch's own statistics are no sum over images.
    monkeypatch.setattr(
        torch.nn.BatchNorm2d, "train", lambda self, mode=True: torch.nn.Module.train(self, False)
    )
    common = {"train__precision": "fp32", "train__epochs": 1, "train__lr": 1e-5}
    train(narrow(**common, train__batch_size=5), shards, str(tmp_path / "whole"))
    split = {"train__batch_size": 2, "train__global_batch": 5}
    train(narrow(**common, **split), shards, str(tmp_path / "parts"))
    one, other = losses(str(tmp_path / "whole")), losses(str(tmp_path / "parts"))
    assert len(one) == len(other) >= 4
    for step in one:
        assert other[step] == pytest.approx(one[step], rel=2e-3), step


@pytest.mark.slow
@pytest.mark.extra
def test_squares_of_several_sizes_mosaics_and_mixed_images(narrow, shards, tmp_path, monkeypatch):
    """Resumed to the same bits too; the search for a batch size leaves the random numbers as they were."""
    config = narrow(
        train__epochs=1, train__batch_size=6, loader__sizes=[96, 128], loader__mosaic=0.5,
        loader__mixup=0.5,
    )  # fmt: skip
    train(config, shards, str(tmp_path / "whole"))
    searched = dataclasses.replace(config, train=dataclasses.replace(config.train, find_batch_size=True))
    monkeypatch.setattr(batch_fitting, "memory", lambda device: 2**30)
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        stop_after(patch, 1)
        train(searched, shards, str(tmp_path / "parts"))
    train(searched, shards, str(tmp_path / "parts"))
    assert losses(str(tmp_path / "parts")) == losses(str(tmp_path / "whole"))
