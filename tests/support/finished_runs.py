"""What a training has left in its folder, and how one is stopped on the way."""

import os
import signal

import torch

from trainer.trackers.training_log import TrainingLog, read_rows
from trainer.training import checkpoint


def losses(output):
    """Loss and gradient norm of each step that a run has logged."""
    return {
        row["step"]: (row["loss"], row["gradient_norm"])
        for row in read_rows(output)
        if row["kind"] == "train"
    }


def final_weights(output):
    """The newest checkpoint of a run."""
    return checkpoint.read_latest(f"{output}/checkpoints")


def assert_same_weights(one, other):
    for part in ("model", "ema"):
        assert one[part].keys() == other[part].keys()
        for name, value in one[part].items():
            assert torch.equal(value, other[part][name]), (part, name)


def stop_after(monkeypatch, step):
    """Send this process SIGTERM when it has logged a step, as a cluster would at any moment."""
    add = TrainingLog.add

    def adding(self, kind, row):
        add(self, kind, row)
        if kind == "train" and row["step"] == step:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(TrainingLog, "add", adding)
