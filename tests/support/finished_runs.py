"""What a training has left in its folder, and how one is stopped on the way."""

import os
import signal
from contextlib import contextmanager

import pytest
import torch

from trainer.base.errors import Interrupted
from trainer.trackers.training_log import TrainingLog, read_rows
from trainer.training import checkpoint
from trainer.training.loop import train


def losses(output):
    """Loss and gradient norm of each step that a run has logged."""
    return {
        row["step"]: (row["loss"], row["gradient_norm"])
        for row in read_rows(output)
        if row["kind"] == "train"
    }


def final_weights(output):
    return checkpoint.read_latest(f"{output}/checkpoints")


def assert_same_weights(one, other):
    for part in ("model", "ema"):
        assert one[part].keys() == other[part].keys()
        for name, value in one[part].items():
            assert torch.equal(value, other[part][name]), (part, name)


@contextmanager
def stopped_after(step):
    """Send this process SIGTERM when the training within has logged a step; expect it to save and end."""
    add = TrainingLog.add

    def adding(self, kind, row):
        add(self, kind, row)
        if kind == "train" and row["step"] == step:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted) as caught:
        patch.setattr(TrainingLog, "add", adding)
        yield
    assert caught.value.exit_code == 143


def train_in_parts(config, shards, folder, stop):
    """Train without a break and, stopped after a step, with one: all is the same; return both results."""
    whole, parts = f"{folder}/whole", f"{folder}/parts"
    first = train(config, shards, whole)
    with stopped_after(stop):
        train(config, shards, parts)
    second = train(config, shards, parts)
    assert stop <= second["resumed_from"] < second["steps"]
    assert losses(parts) == losses(whole) and second["metrics"] == first["metrics"]
    assert_same_weights(final_weights(whole), final_weights(parts))
    return first, second
