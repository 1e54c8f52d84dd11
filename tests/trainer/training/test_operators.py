"""What a step launches and how often its host waits, by architecture: that keeps a GPU busy or not."""

import dataclasses

import pytest
import torch

from benchmarks.common import random_batch
from benchmarks.operators import OperatorCounter
from benchmarks.training import make_batch, make_step, without_weights
from trainer.launching.distributed import World
from trainer.model import recipes
from trainer.training.state import TrainState

_PYRAMID = {"model.backbone_width": 16, "model.fpn_channels": 32}
# One wait is for the guard's result of the step before, which a GPU has long sent. The others are of a pass.
MOST = {
    "coco_r50": (_PYRAMID, 1500, 1),
    "dfine_s": ({"model.width": 0.25}, 3100, 2),
    "rfdetr_finetune": ({"model.width": 0.25}, 3500, 2),
}
"""Overrides that leave the counts as they are; operators except views, and waits, of a step of one pass with
four images in bf16."""


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "passes"), [*((recipe, 1) for recipe in MOST), ("dfine_s", 3)])
def test_a_step_launches_few_operators_and_waits_seldom(recipe, passes):
    _, operators, waits = MOST[recipe]
    counted = counted_step(recipe, passes)
    print(f"{counted.operators} operators, {counted.waits} waits")
    assert counted.waits <= 1 + passes * (waits - 1)
    assert passes > 1 or 500 < counted.operators <= operators


def counted_step(recipe, passes):
    overrides = MOST[recipe][0]
    config, device = without_weights(recipes.load(recipe, overrides)), torch.device("cpu")
    config = dataclasses.replace(
        config, train=dataclasses.replace(config.train, compile="off", precision="bf16")
    )
    state = TrainState(config, 80, World(0, 1, device))
    step, batch = make_step(state, config, 4 * passes), make_batch(*random_batch(4, 128, 80, device)[:3])
    step([batch] * passes)
    with OperatorCounter() as counted:
        step([batch] * passes)
    return counted
