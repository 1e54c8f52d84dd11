"""A detector's whole life: trained, stopped, resumed, evaluated, exported; its weights out and in again."""

from pathlib import Path
from typing import Any

import torch
from finished_runs import train_in_parts

from trainer.config.schema import Config
from trainer.evaluators.shards import evaluate
from trainer.export.export import export
from trainer.model.architecture import build
from trainer.model.pretrained import load_pretrained
from trainer.training import checkpoint


def live(config: Config, shards: str, folder: Path, stop: int) -> dict[str, Any]:
    """Train, once without a break and once with one; evaluate, export, write weights and load them."""
    first, _ = train_in_parts(config, shards, folder, stop)
    evaluate(first["checkpoint"], shards, str(folder / "evaluation"), config)
    made = export(first["checkpoint"], shards, str(folder / "model"), config)
    given = checkpoint.write_weights(first["checkpoint"], str(folder / "weights.safetensors"))
    trained, _ = checkpoint.load_model(first["checkpoint"])
    again = build(config.model, trained.num_classes)
    load_pretrained(again, given["weights"])
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in trained.state_dict().items())
    return made
