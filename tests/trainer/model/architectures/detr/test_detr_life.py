"""D-FINE in our loop. Its whole life: test_life.py."""

import dataclasses

import pytest
import torch
from finished_runs import losses

from trainer.model import recipes
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
