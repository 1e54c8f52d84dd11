"""Who the processes of a run are."""

import datetime
import multiprocessing
import os
import socket
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trainer.base.errors import ConfigError
from trainer.launching import distributed, worker_failures
from trainer.launching.distributed import all_reduce_sum, process_group


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
        pytest.raises(ConfigError, match=r"process 3 .* has no GPU: only 2 are visible") as caught,
        process_group(),
    ):
        pass
    assert "start 2 processes" in caught.value.fix and chosen == []
    monkeypatch.setenv("LOCAL_RANK", "1")
    with process_group() as world:
        assert world.device == torch.device("cuda", 1) and chosen == [world.device]


def connect(rank: int, port: int, behavior: str, outcomes: Any) -> None:
    """One of two processes: `late` to its first collective, or `gone` before it has connected to its peer."""
    variables = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.environ[worker_failures.ERROR_FILE] = "/dev/null"
    distributed._CONNECT_TIMEOUT = datetime.timedelta(seconds=3)
    if behavior == "gone":
        store = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=20)))[0]
        store.wait(["never"], datetime.timedelta(seconds=8))
    try:
        with process_group() as world:
            if behavior == "late":
                time.sleep(6)
            outcomes.put(all_reduce_sum(torch.ones(1), world).item())
    except Exception as error:
        outcomes.put(worker_failures.is_lost_peer(error))


@pytest.mark.slow
@pytest.mark.parametrize(("behavior", "expected"), [("late", [2, 2]), ("gone", [True])])
def test_a_missing_rank_is_noticed_soon_and_a_late_one_is_waited_for(behavior, expected):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    outcomes = context.SimpleQueue()
    processes = [
        context.Process(target=connect, args=(rank, port, behavior if rank else "", outcomes))
        for rank in (0, 1)
    ]
    for process in processes:
        process.start()
    assert [outcomes.get() for _ in expected] == expected
    for process in processes:
        process.kill()
        process.join()
