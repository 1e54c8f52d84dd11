"""A training on two processes beside the same one on one: what must come out alike."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from finished_runs import final_weights, losses

from trainer.config.parsing import to_json
from trainer.config.schema import Config
from trainer.training.loop import train

LIKE_PASSES = {
    "train__precision": "fp32", "train__epochs": 1, "train__lr": 1e-4, "train__clip_norm": 1.0,
    "train__global_batch": 6, "train__batch_size": 3,
}  # fmt: skip
"""Overrides: each of two processes has three of six images, of which one has three in each of two passes."""


def assert_two_equal_one(
    config: Config, shards: str, folder: Path, steps: int, weights: float, near: float = 1e-3
) -> None:
    """Train with one process, and beside it with two that launch's own agent starts.

    Args:
        config: of a training whose passes have as many images on both sides, so that BatchNorm sees the same.
        shards: data.
        folder: where all of it goes.
        steps: that it takes.
        weights: how far a tensor of the end may be from the other's, relative to its largest number.
        near: how far a loss may be from the other's, relative to it.
    """
    path = folder / "config.json"
    path.write_text(to_json(config))
    command = [sys.executable, "-m", "trainer", "launch", "--nproc", "2", "--", "train"]
    command += ["--config", str(path), "--shards", shards, "--output", str(folder / "two")]
    two = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ}
    )
    try:
        train(config, shards, str(folder / "one"))
        output = two.communicate(timeout=240)[0]
    finally:
        two.kill()
    assert two.returncode == 0, output
    one, other = losses(str(folder / "one")), losses(str(folder / "two"))
    assert len(one) == len(other) == steps
    for step in one:
        assert other[step] == pytest.approx(one[step], rel=near), step
    single, double = (final_weights(str(folder / name)) for name in ("one", "two"))
    for name, value in single["model"].items():
        scale = value.float().abs().max().clamp(min=1e-2)
        assert (value - double["model"][name]).float().abs().max() / scale < weights, name
