"""Who the processes of a run are."""

import pytest
import torch

from trainer.base.errors import ConfigError
from trainer.launching.distributed import process_group


def test_outside_torchrun_it_is_one_process(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with process_group() as world:
        assert (world.rank, world.size, world.device.type, world.is_main) == (0, 1, "cpu", True)


def test_more_processes_than_gpus_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.delenv("RANK", raising=False)
    with (
        pytest.raises(ConfigError, match="process 3 of this machine has no GPU: it sees 2") as caught,
        process_group(),
    ):
        pass
    assert "start 2 processes" in caught.value.fix and chosen == []
    monkeypatch.setenv("LOCAL_RANK", "1")
    with process_group() as world:
        assert world.device == torch.device("cuda", 1) and chosen == [world.device]
