"""What a step launches and how often its host waits, by architecture: that keeps a GPU busy or not."""

import dataclasses

import pytest
import torch

from benchmarks.common import random_batch
from benchmarks.operators import Operators
from benchmarks.training import batch_of, step_of, without_weights
from trainer.launching.distributed import World
from trainer.model import recipes
from trainer.training.state import TrainState

# Of the waits one is for the guard's result of the step before, which a GPU has long sent.
MOST = {"small": (2500, 1), "dfine_s": (3000, 2), "dfine_l": (3500, 2)}
"""Operators beside views, and waits, of one step of four images in bf16."""


@pytest.mark.slow
@pytest.mark.parametrize("recipe", MOST)
def test_a_step_launches_few_operators_and_waits_seldom(recipe):
    config, device = without_weights(recipes.load(recipe)), torch.device("cpu")
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, compile="off"))
    state = TrainState(config, 80, World(0, 1, device))
    step, batch = step_of(state, config, 4), batch_of(*random_batch(4, 128, 80, device)[:3])
    step([batch])
    with Operators() as counted:
        step([batch])
    operators, waits = MOST[recipe]
    assert 500 < counted.operators <= operators and counted.waits <= waits
