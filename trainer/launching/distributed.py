"""The processes of a run: ranks, process group, and collectives outside of a step."""

import datetime
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from trainer.base.errors import ConfigError

_TIMEOUT = datetime.timedelta(minutes=30)
"""Timeout of a collective. A rank may be late because it compiles, or waits for storage."""
_CONNECT_TIMEOUT = datetime.timedelta(minutes=5)
"""Timeout of the first connection. All ranks start at the same time, so a missing rank has failed."""


@dataclass(frozen=True)
class World:
    """One process of a run."""

    rank: int  # from 0
    size: int  # number of processes
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which logs and writes."""
        return self.rank == 0


SINGLE = World(rank=0, size=1, device=torch.device("cpu"))  # one process on the CPU, with no process group


@contextmanager
def process_group() -> Iterator[World]:
    """Join the process group of torchrun's workers, with NCCL on GPUs and gloo otherwise.

    Outside torchrun the world is this process, on the first GPU if there is one. Calls may be nested.
    """
    rank, local_rank = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
    size = int(os.environ.get("WORLD_SIZE", "1"))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        count = torch.cuda.device_count()
        if local_rank >= count:
            raise ConfigError(
                f"process {local_rank + 1} of this machine has no GPU: only {count} are visible",
                fix=f"start {count} processes on each machine, or make more GPUs available "
                "(CUDA_VISIBLE_DEVICES, or gpus of the job)",
            )
        torch.cuda.set_device(device)
    if "RANK" not in os.environ or dist.is_initialized():
        yield World(rank, size, device)
        return
    init_process_group("nccl" if cuda else "gloo", device if cuda else None)
    try:
        yield World(rank, size, device)
    finally:
        # No barrier: after an error the other ranks may be gone.
        dist.destroy_process_group()


def init_process_group(
    backend: str, device: torch.device | None = None, timeout: datetime.timedelta = _TIMEOUT
) -> dist.Store:
    """Connect torchrun's workers and return their store; `timeout` applies to later collectives.

    Raises:
        torch.distributed.DistNetworkError, DistStoreError, RuntimeError: a rank does not connect within
            minutes, for example because its pod is gone.
    """
    store: dist.Store
    store, rank, size = next(dist.rendezvous("env://", timeout=_CONNECT_TIMEOUT))
    group = dist.PrefixStore("group", store)
    dist.init_process_group(
        backend, store=group, rank=rank, world_size=size, timeout=_CONNECT_TIMEOUT, device_id=device
    )
    store.set_timeout(timeout)
    # The second name is that of torch before 2.15.
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(timeout)
    return store


def gather(value: Any, world: World) -> list[Any]:
    """Collect a small picklable value from each rank, on every rank, in rank order."""
    if world.size == 1:
        return [value]
    values: list[Any] = [None] * world.size
    dist.all_gather_object(values, value)
    return values


def gather_integers(values: Sequence[int], world: World) -> np.ndarray:
    """Collect the same number of integers from each rank, on every rank: int64 [ranks, values].

    It waits for the other processes, but not for the GPU.
    """
    own = np.array(values)
    if world.size == 1:
        return own[None]
    all_values = np.empty((world.size, len(own)), np.int64)
    default = dist.group.WORLD
    group = default if world.device.type == "cpu" else _gloo_group(default)
    dist.all_gather_into_tensor(torch.from_numpy(all_values).view(-1), torch.from_numpy(own), group=group)
    return all_values


@functools.lru_cache(maxsize=1)
def _gloo_group(default: dist.ProcessGroup | None) -> Any:
    """Return a gloo group of all ranks, which does not use GPUs. A collective."""
    return dist.new_group(timeout=_TIMEOUT, backend="gloo")


def gather_on_main(value: Any, world: World) -> list[Any]:
    """Collect a picklable value from each rank on rank 0, in rank order; other ranks return [value]."""
    if world.size == 1:
        return [value]
    values: list[Any] | None = [None] * world.size if world.is_main else None
    dist.gather_object(value, values, dst=0)
    return [value] if values is None else values


def broadcast(value: Any, world: World) -> Any:
    """Return rank 0's value on every rank."""
    if world.size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def all_reduce_sum(values: torch.Tensor, world: World) -> torch.Tensor:
    """Sum elementwise over all ranks, in place."""
    if world.size > 1:
        dist.all_reduce(values)
    return values


def start_all_reduce_max(values: torch.Tensor, world: World) -> Callable[[], torch.Tensor]:
    """Start an elementwise all-reduce of the maximum over all ranks, in place.

    The returned function waits for it (on a GPU, in the current stream) and returns the values.
    """
    if world.size == 1:
        return lambda: values
    work = dist.all_reduce(values, dist.ReduceOp.MAX, async_op=True)

    def wait() -> torch.Tensor:
        work.wait()
        return values

    return wait
