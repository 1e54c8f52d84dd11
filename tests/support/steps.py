"""Single steps of the training loop, with nothing around them."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.base.errors import TrainingError
from trainer.config.schema import Config
from trainer.data.batch import Batch
from trainer.launching.distributed import SINGLE, World
from trainer.model.global_batch import BatchContext
from trainer.training import checkpoint
from trainer.training.checkpoint import State
from trainer.training.loop import _Run


@contextmanager
def steps_of(
    config: Config, shards: str, output: str, world: World = SINGLE
) -> Iterator[tuple[_Run, Callable[[], Tensor]]]:
    """A run, and a function that does its next step and gives the step's sums."""
    run = _Run(config, shards, output, world, "none")
    batches = run.loader.batches(0)

    def step() -> Tensor:
        sums, _ = run.train_step([next(batches) for _ in range(run.loader.pass_count)])
        return sums

    try:
        yield run, step
    finally:
        run.close()


@contextmanager
def losing(run: _Run, more: float) -> Iterator[None]:
    forward = run.train_step.losses

    def losses(batch: Batch, part: BatchContext | None = None) -> dict[str, Tensor]:
        values = forward(batch, part)
        return {**values, "boxes": values["boxes"] + more}

    run.train_step.losses = losses
    yield
    run.train_step.losses = forward


def with_one_broken_loss(rank: int, config: Config, shards: str, folder: str) -> None:
    """One of two ranks; the second's loss is infinite in step 2. Writes down what it says after that."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    output = f"{folder}/{rank}"
    with steps_of(config, shards, output, World(rank, 2, torch.device("cpu"))) as (run, step):
        step()
        before = [parameter.detach().clone() for parameter in run.state.parameters]
        with losing(run, math.inf if rank == 1 else 0.0):
            step()
        try:
            step()
        except TrainingError as error:
            same = all(map(torch.equal, before, run.state.parameters))
            Path(folder, f"{rank}.txt").write_text(f"{same} {error}")
    dist.destroy_process_group()


def run_in_parts(config: Config, shards: str, folder: Path, processes: Sequence[int]) -> State:
    """The state after two steps on each of these numbers of processes, each resumed from the one before."""
    folder.mkdir()
    for part, size in enumerate(processes):
        torch.multiprocessing.start_processes(
            _two_steps, (size, part, config, shards, str(folder)), nprocs=size, start_method="forkserver"
        )
    return checkpoint.read_latest(f"{folder}/checkpoints")


def _two_steps(rank: int, size: int, part: int, config: Config, shards: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{part}", rank=rank, world_size=size)
    run = _Run(config, shards, folder, World(rank, size, torch.device("cpu")), "auto")
    batches = run.loader.batches(run.state.samples)
    for _ in range(2):
        run.train_step([next(batches) for _ in range(run.loader.pass_count)])
    run.train_step.wait()
    run._save()
    run.wait_for_writes()
    run.close()
    dist.destroy_process_group()
