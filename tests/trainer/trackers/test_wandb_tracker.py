"""A training's metrics at Weights & Biases, in its offline files, by its own client."""

import pytest

from trainer import storage
from trainer.training.loop import train

wandb = pytest.importorskip("wandb")


@pytest.fixture
def clean(monkeypatch, tmp_path):
    """No settings of this machine's user."""
    for name in ("WANDB_API_KEY", "WANDB_PROJECT", "WANDB_RUN_ID", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    for name in ("NETRC", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    yield
    wandb.teardown()  # Else its settings last as long as the process.


@pytest.mark.slow
@pytest.mark.extra
def test_an_offline_run_is_written_to_the_runs_folder(clean, tiny, shards, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "cells")
    output = tmp_path / "first/train"
    train(tiny(train__epochs=1, train__trackers=["wandb"]), shards, str(output))
    wandb.teardown()  # Its process may still be writing.
    run_id = storage.read_json(str(output / "trackers.json"))["ids"]["wandb"]
    (path,) = output.glob(f"wandb/offline-run-*/run-{run_id}.wandb")
    content = path.read_bytes()
    for text in (b"cells", b"first", b"train/loss", b"val/AP", b"train.epochs"):
        assert text in content


def test_without_a_key_there_is_one_warning_and_a_whole_training(clean, tiny, shards, tmp_path, caplog):
    result = train(tiny(train__epochs=1, train__trackers=["wandb"]), shards, str(tmp_path / "train"))
    assert result["steps"] == 6
    warnings = [record.message for record in caplog.records if record.name == "trackers"]
    assert len(warnings) == 1 and "cannot send metrics to wandb" in warnings[0] and "key" in warnings[0]
