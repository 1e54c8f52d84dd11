"""A training with all that changes the pictures: resumed bit for bit, on any number of processes."""

import logging

import pytest
from finished_runs import train_in_parts

from trainer.trackers.training_log import read_rows
from trainer.training.loop import train
from trainer.training.optim import learning_rate

STRONG = {
    "loader__sizes": [96, 128], "loader__mosaic": 0.5, "loader__mixup": 0.3, "loader__plain_epochs": 1,
    "loader__sampling": "repeat_factor", "loader__repeat_threshold": 0.9, "train__epochs": 3,
    "loader__resize": "squash", "loader__zoom_out": 0.5, "loader__iou_crop": 0.8, "loader__fill": 0,
    "loader__brightness": 0.2, "loader__color_probability": 0.5, "loader__channel_shuffle": 0.5,
    "train__lr_batch": 8, "train__lr_scaling": "linear", "train__scale_steps": True,
    "train__ema_decay": 0.9, "train__ema_ramp": "exponential", "train__ema_steps": 20,
}  # fmt: skip


@pytest.mark.slow
def test_resumed_bit_for_bit(shards, tiny, tmp_path):
    """Stopped within the plain epoch, after those with mosaics."""
    _, result = train_in_parts(tiny(**{**STRONG, "train__epochs": 2}), shards, tmp_path, 7)
    assert result["resumed_from"] == 8


def test_the_scaled_learning_rate_is_told_and_used(shards, tiny, tmp_path, caplog):
    caplog.set_level(logging.INFO, "train")
    config = tiny(train__epochs=1, train__optimizer="adamw", train__lr=1e-3, train__lr_batch=1)
    train(config, shards, str(tmp_path))
    assert "peak learning rate 0.002 for 4 images a step: 0.001 for 1" in caplog.text
    rates = [row["lr"] for row in read_rows(str(tmp_path)) if row["kind"] == "train"]
    assert rates == [pytest.approx(2 * learning_rate(step, 6, config.train)) for step in range(6)]
