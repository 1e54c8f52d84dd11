"""Checkpoints: whole or not at all, no code in them, and clear when they do not fit."""

import json
import pickle

import pytest
import safetensors.torch
import torch

from trainer.__main__ import main
from trainer.base.errors import CheckpointError, StorageError
from trainer.config.parsing import from_json, to_json
from trainer.model.architecture import build
from trainer.training import checkpoint


@pytest.fixture
def contents(tiny):
    config = tiny()
    detector = build(config.model, 2)
    return {
        "config": to_json(config),
        "categories": [{"id": 0, "name": "a"}, {"id": 1, "name": "b"}],
        "fingerprint": "f",
        "global_batch": 8,
        "step": 3,
        "epoch": 1,
        "metrics": {"coco/AP": 0.5},
        "model": detector.state_dict(),
        "ema": None,
    }


def test_a_model_comes_back_as_it_was(contents, tmp_path):
    uri = str(tmp_path / "best.pt")
    checkpoint.write(contents, uri)
    detector, meta = checkpoint.load_model(uri)
    assert all(torch.equal(value, contents["model"][name]) for name, value in detector.state_dict().items())
    assert meta["metrics"] == {"coco/AP": 0.5} and meta["config"]["recipe"] == "debug"


def test_the_moving_average_is_what_is_evaluated(contents, tmp_path):
    contents["ema"] = {
        name: value + 1 if value.is_floating_point() else value for name, value in contents["model"].items()
    }
    checkpoint.write(contents, str(tmp_path / "best.pt"))
    detector, _ = checkpoint.load_model(str(tmp_path / "best.pt"))
    name = "head.classification_head.cls_logits.bias"
    assert torch.equal(detector.state_dict()[name], contents["model"][name] + 1)


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_weights_for_torchvision_are_written(contents, suffix, tmp_path, capsys):
    checkpoint.write(contents, str(tmp_path / "best.pt"))
    path = tmp_path / f"weights.{suffix}"
    assert main(["weights", "--checkpoint", str(tmp_path / "best.pt"), "--output", str(path)]) == 0
    assert json.loads(capsys.readouterr().out) == {"weights": str(path), "num_classes": 3}
    load = safetensors.torch.load_file if suffix == "safetensors" else torch.load
    state, bias = load(path), "head.classification_head.cls_logits.bias"
    assert state.keys() == contents["model"].keys()
    assert torch.equal(state[bias].view(9, 3)[:, 1:].flatten(), contents["model"][bias])
    build(from_json(contents["config"]).model, 3).load_state_dict(state)


def test_the_newest_are_kept_and_found(contents, tmp_path):
    for step in (5, 900, 20):
        checkpoint.write_step({**contents, "step": step}, str(tmp_path), step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000020.pt", "step-00000900.pt"]
    assert checkpoint.read_latest(str(tmp_path))["step"] == 900
    assert checkpoint.read_latest(str(tmp_path / "none")) is None


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    class Trap:
        def __reduce__(self):
            return open, (str(tmp_path / "ran"), "w")

    (tmp_path / "trap.pt").write_bytes(pickle.dumps({"version": 1, "model": Trap()}))
    with pytest.raises(CheckpointError, match="cannot be read: it is damaged, or contains unsafe objects"):
        checkpoint.read(str(tmp_path / "trap.pt"))
    checkpoint.write({"model": Trap()}, str(tmp_path / "sealed.pt"))
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read(str(tmp_path / "sealed.pt"))
    assert "weights_only" not in str(caught.value) and not (tmp_path / "ran").exists()


def test_a_file_of_something_else_is_refused(tmp_path):
    torch.save({"weights": torch.zeros(1)}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="not a kubedet checkpoint"):
        checkpoint.read(str(tmp_path / "x.pt"))
    checkpoint.write({"version": checkpoint.VERSION + 1}, str(tmp_path / "newer.pt"))
    with pytest.raises(CheckpointError, match="has the format"):
        checkpoint.read(str(tmp_path / "newer.pt"))
    with pytest.raises(StorageError, match=r"gone\.pt"):
        checkpoint.read(str(tmp_path / "gone.pt"))


def test_weights_that_do_not_fit_their_configuration(contents, tmp_path):
    contents["categories"].append({"id": 2, "name": "c"})
    checkpoint.write(contents, str(tmp_path / "best.pt"))
    with pytest.raises(CheckpointError, match="do not fit"):
        checkpoint.load_model(str(tmp_path / "best.pt"))


def test_all_checkpoints_damaged_is_an_error(tmp_path):
    (tmp_path / "step-00000001.pt").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
        checkpoint.read_latest(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "named"),
    [({"fingerprint": "other"}, "shards: 'other'"), ({"global_batch": 9}, "global batch: 9 in")],
)
def test_other_data_or_batch_is_named(contents, tiny, change, named):
    with pytest.raises(CheckpointError, match=named):
        checkpoint.check_same_run({**contents, **change}, tiny(), "f", 8)


def test_harmless_changes_are_allowed(contents, tiny):
    changed = tiny(train__epochs=9, loader__workers=3, evaluation__batch_size=2, data__threads=2)
    checkpoint.check_same_run(contents, changed, "f", 8)


@pytest.mark.slow
def test_a_flip_in_the_seal_itself_is_noticed(contents, tmp_path):
    path = tmp_path / "best.pt"
    checkpoint.write(contents, str(path))
    whole = path.read_bytes()
    for place in range(len(whole) - 93, len(whole), 8):
        data = bytearray(whole)
        data[place] ^= 8
        path.write_bytes(data)
        with pytest.raises(checkpoint.DamagedCheckpoint):
            checkpoint.read(str(path))


def test_a_damaged_newest_gives_way_to_the_one_before_but_want_of_memory_does_not(
    contents, tmp_path, monkeypatch
):
    for step in (1, 2):
        checkpoint.write_step({**contents, "step": step}, str(tmp_path), step, keep=2)
    newest = tmp_path / "step-00000002.pt"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    whole, damaged = newest.read_bytes(), bytes(data)
    newest.write_bytes(damaged)
    assert checkpoint.read_latest(str(tmp_path))["step"] == 1
    newest.write_bytes(whole)

    def no_memory(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    def io_error(*_, **__):
        raise OSError(5, "Input/output error")

    for load, told in ((no_memory, "not enough memory"), (io_error, "Input/output error")):
        monkeypatch.setattr(torch, "load", load)
        with pytest.raises(StorageError, match=told) as caught:
            checkpoint.read_latest(str(tmp_path))
        assert "delete" not in str(caught.value) and "is damaged" not in str(caught.value)
