"""A training's metrics at Weights & Biases, in its offline files, by its own client."""

import json
import struct

import pytest

from trainer import storage
from trainer.trackers.training_log import read_rows
from trainer.training.loop import train

wandb = pytest.importorskip("wandb")

BLOCK = 32768


@pytest.fixture
def clean(monkeypatch, tmp_path):
    """No settings of this machine's user."""
    for name in ("WANDB_API_KEY", "WANDB_PROJECT", "WANDB_RUN_ID", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    for name in ("NETRC", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    yield
    wandb.teardown()  # Else its settings last as long as the process.


def records_of(content):
    """The records of an offline file: a log of LevelDB's form after seven bytes of W&B's own.

    https://github.com/google/leveldb/blob/main/doc/log_format.md
    """
    place, record = 7, b""
    while place + 7 <= len(content):
        left = BLOCK - place % BLOCK
        if left < 7:  # The rest of a block that holds no header.
            place += left
            continue
        length, kind = struct.unpack("<HB", content[place + 4 : place + 7])
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # A whole record, or the end of one.
            yield record
            record = b""


def history_of(folder):
    """The rows and the run of an offline file, in W&B's own messages."""
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # Its own process may still be writing.
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    rows, run = [], None
    for data in records_of(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            items = record.history.item
            rows.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in items})
        if record.HasField("run"):
            run = run or record.run
    return rows, run


@pytest.mark.slow
def test_an_offline_run_holds_every_row_and_the_configuration(clean, tiny, shards, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "cells")
    output = tmp_path / "first/train"
    train(tiny(train__epochs=1, train__trackers=["wandb"]), shards, str(output))
    rows, run = history_of(output)
    assert run.project == "cells" and run.display_name == "first"
    assert run.run_id == storage.read_json(str(output / "trackers.json"))["ids"]["wandb"]
    losses = {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}
    assert losses == {row["step"]: row["loss"] for row in read_rows(str(output)) if row["kind"] == "train"}
    assert any("val/AP" in row for row in rows)


def test_without_a_key_there_is_one_warning_and_a_whole_training(clean, tiny, shards, tmp_path, caplog):
    result = train(tiny(train__epochs=1, train__trackers=["wandb"]), shards, str(tmp_path / "train"))
    assert result["steps"] == 6
    warnings = [record.message for record in caplog.records if record.name == "trackers"]
    assert len(warnings) == 1 and "wandb does not accept metrics" in warnings[0] and "key" in warnings[0]
