"""When a training saves and validates."""

import dataclasses
import time
from types import SimpleNamespace

import pytest
import torch

from trainer.config.schema import TrainConfig
from trainer.launching.distributed import World
from trainer.training.loop import Cadence

IMAGES, BATCH = 10, 4


@pytest.fixture
def after():
    """The cadence of two and a half steps an epoch, after so many steps."""

    def make(step, *, validated=0, **options):
        config = dataclasses.replace(TrainConfig(epochs=3), **options)
        world = World(0, 1, torch.device("cpu"))
        state = SimpleNamespace(step=step, samples=step * BATCH, validated=validated, world=world)
        return Cadence(config, state, images=IMAGES, global_batch=BATCH)

    return make


def steps_where(told, after, **options):
    return [step for step in range(9) if getattr(after(step, **options), told)()]


def test_steps_and_epochs(after):
    assert after(0).steps == 8
    assert [after(step).epoch for step in range(9)] == [0, 0, 0, 1, 1, 2, 2, 2, 3]
    assert steps_where("epoch_ended", after) == [3, 5, 8]
    assert [after(7).is_at_the_end, after(8).is_at_the_end] == [False, True]


def test_validations(after):
    assert steps_where("validation_due", after) == [3, 5, 8]
    assert steps_where("validation_due", after, validate_every=2) == [5, 8]
    assert steps_where("validation_due", after, validated=5) == [8], "a step is validated once"


def test_weights_of_epochs_that_are_kept(after):
    assert steps_where("weights_are_kept", after) == []
    assert steps_where("weights_are_kept", after, keep_every=1) == [3, 5, 8]
    assert steps_where("weights_are_kept", after, keep_every=2) == [5]


def test_checkpoints_within_an_epoch(after):
    now = time.monotonic()
    assert after(4, checkpoint_steps=2).checkpoint_due(now)
    assert not after(5, checkpoint_steps=2).checkpoint_due(now)
    assert not after(4, checkpoint_minutes=10, log_every=4).checkpoint_due(now)
    assert after(4, checkpoint_minutes=10, log_every=4).checkpoint_due(now - 601)
    assert not after(5, checkpoint_minutes=10, log_every=4).checkpoint_due(now - 601), "it costs a message"
    assert not after(4, checkpoint_minutes=0, log_every=4).checkpoint_due(now - 601)
