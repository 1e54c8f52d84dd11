"""A detector's whole life: trained, stopped, resumed, evaluated, exported; its weights out and in again."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from finished_runs import assert_same_weights, final_weights, losses, stop_after

from trainer.base.errors import Interrupted
from trainer.config.schema import Config
from trainer.evaluation.evaluate import evaluate
from trainer.export.export import export
from trainer.model.architecture import build
from trainer.model.pretrained import load_pretrained
from trainer.training import checkpoint
from trainer.training.loop import train


def live(config: Config, shards: str, folder: Path, stop: int, formats: list[str]) -> dict[str, Any]:
    """Train, once without a break and once with one; evaluate, export, write weights and load them."""
    whole, broken = str(folder / "whole"), str(folder / "broken")
    first = train(config, shards, whole)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        stop_after(patch, stop)
        train(config, shards, broken)
    second = train(config, shards, broken)
    assert stop <= second["resumed_from"] < second["steps"]
    assert losses(broken) == losses(whole) and second["metrics"] == first["metrics"]
    assert_same_weights(final_weights(whole), final_weights(broken))
    evaluate(first["checkpoint"], shards, str(folder / "evaluation"), config)
    config = replace(config, export=replace(config.export, formats=formats))
    made = export(first["checkpoint"], shards, str(folder / "model"), config)
    given = checkpoint.write_weights(first["checkpoint"], str(folder / "weights.safetensors"))
    trained, _ = checkpoint.load_model(first["checkpoint"])
    again = build(config.model, trained.num_classes)
    load_pretrained(again, given["weights"])
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in trained.state_dict().items())
    return made
