"""A training with all that changes the pictures: resumed bit for bit, on any number of processes."""

import logging

import pytest
import torch
from finished_runs import assert_same_weights, final_weights, losses, stop_after
from steps import steps_of

from trainer.base.errors import Interrupted
from trainer.launching.distributed import World
from trainer.trackers.training_log import read_rows
from trainer.training.loop import train
from trainer.training.optim import learning_rate

STRONG = {
    "loader__sizes": [96, 128], "loader__mosaic": 0.5, "loader__mixup": 0.3, "loader__plain_epochs": 1,
    "loader__sampling": "repeat_factor", "loader__repeat_threshold": 0.9, "train__epochs": 3,
}  # fmt: skip


@pytest.mark.slow
def test_resumed_bit_for_bit(shards, tiny, tmp_path, monkeypatch):
    """Stopped within the plain epoch, after those with mosaics."""
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    config = tiny(**{**STRONG, "train__epochs": 2})
    first = train(config, shards, whole)
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        stop_after(patch, 7)
        train(config, shards, parts)
    result = train(config, shards, parts)
    assert result["resumed_from"] == 8 and result["metrics"] == first["metrics"]
    assert losses(parts) == losses(whole)
    assert_same_weights(final_weights(parts), final_weights(whole))


def test_ranks_share_steps_of_one_size(shards, tiny, tmp_path):
    """What two processes read of some steps is what one reads, size for size."""
    config = tiny(**STRONG, train__global_batch=4, train__batch_size=2)

    def read(rank, size):
        world = World(rank, size, torch.device("cpu"))
        with steps_of(config, shards, str(tmp_path / f"{size}-{rank}")) as (run, _):
            run.loader._world, run.loader.passes = world, 4 // size // 2
            batches = run.loader.batches(0)
            read = [[next(batches) for _ in range(run.loader.passes)] for _ in range(14)]
            batches.close()
        return read

    alone, ranks = read(0, 1), [read(rank, 2) for rank in (0, 1)]
    sizes = [step[0].images.shape[-1] for step in alone]
    assert set(sizes) == {96, 128} and sizes[0] == 128 and set(sizes[12:]) == {96}
    for step, whole in enumerate(alone):
        parts = [batch for rank in ranks for batch in rank[step]]
        assert torch.equal(torch.cat([b.images for b in whole]), torch.cat([b.images for b in parts]))


def test_the_scaled_learning_rate_is_told_and_used(shards, tiny, tmp_path, caplog):
    caplog.set_level(logging.INFO, "train")
    config = tiny(train__epochs=1, train__optimizer="adamw", train__lr=1e-3, train__lr_batch=1)
    train(config, shards, str(tmp_path))
    assert "the learning rate's peak is 0.002 for 4 images a step: 0.001 for 1" in caplog.text
    rates = [row["lr"] for row in read_rows(str(tmp_path)) if row["kind"] == "train"]
    assert rates == [pytest.approx(2 * learning_rate(step, 6, config.train)) for step in range(6)]
