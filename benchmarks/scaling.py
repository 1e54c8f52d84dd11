"""Compare the speed of n processes with n times that of one process.

    python -m benchmarks.scaling                      # gloo, one core per process
    python -m benchmarks.scaling --device cuda --processes 0 --size 800 --images 16   # one process per GPU

In each round process 0 trains alone, then all processes train without communication (`apart`, the machine's
limit), then `together`, with gradient exchange. On a CPU each process is bound to a core. `ratio` is the rate
of n processes divided by n times that of process 0 alone. `--clock cpu` excludes waiting.
"""

import argparse
import os
import socket
import statistics
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from benchmarks.common import CLOCKS, arguments, random_batch, report, run, synchronize
from benchmarks.training import make_batch, make_step
from trainer.base.errors import ConfigError
from trainer.config.schema import Config
from trainer.launching.distributed import World
from trainer.model import fused_functions
from trainer.training.state import TrainState

GOAL = 0.85


def main() -> None:
    """Start the processes, measure, and print the figures."""
    options = arguments(__doc__, trains=True, processes=2, classes=91, size=256, images=4, steps=2)
    options.processes = process_count(options)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(_process, (options, port, results), nprocs=options.processes)
    seconds = results.get()
    images = options.steps * options.images
    figures: dict[str, Any] = {
        "processes": options.processes,
        "images_per_second_alone": images / seconds["alone"],
        "images_per_second_apart": options.processes * images / seconds["apart"],
        "images_per_second_together": options.processes * images / seconds["together"],
        "limit_of_the_machine": seconds["alone"] / seconds["apart"],
        "share_of_that_limit": seconds["apart"] / seconds["together"],
    }
    figures["ratio"] = seconds["alone"] / seconds["together"]
    report("scaling", figures["ratio"], figures, options, at_least={"ratio": GOAL})


def process_count(options: argparse.Namespace) -> int:
    """Return the number of processes, by default one per GPU; ConfigError if it is below 2 or too large."""
    gpus = torch.cuda.device_count() if options.device.type == "cuda" else None
    count: int = options.processes or gpus or 0
    if count < 2 or (gpus is not None and count > gpus):
        raise ConfigError(
            f"--processes {options.processes}: at least 2 processes are needed"
            + (f", each with its own GPU; GPUs found: {gpus}" if gpus is not None else ""),
            fix="run it on a machine with enough GPUs" if gpus else "set it to 2 or more",
        )
    return count


def _process(rank: int, options: argparse.Namespace, port: int, results: Any) -> None:
    torch.set_num_threads(options.threads)
    cuda = options.device.type == "cuda"
    device = torch.device("cuda", rank) if cuda else options.device
    if cuda:
        torch.cuda.set_device(device)
    else:
        _bind(rank, options.threads)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("nccl" if cuda else "gloo", rank=rank, world_size=options.processes)
    fused_functions.configure(options.compiled, device, log_result=rank == 0)
    batch = random_batch(options.images, options.size, options.classes, device)[:3]
    inputs = make_batch(*batch)
    own = TrainState(Config(), options.classes, World(rank, 1, device))
    shared = TrainState(Config(), options.classes, World(rank, options.processes, device))
    apart, together = (make_step(state, Config(), options.images) for state in (own, shared))
    ways = {"alone": (apart, rank == 0), "apart": (apart, True), "together": (together, True)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    now = CLOCKS[options.clock]
    for round_number in range(options.rounds + 1):
        for name, (step, trains) in ways.items():
            dist.barrier()
            start = now()
            if trains:
                for _ in range(options.steps):
                    step([inputs])
                synchronize(device)
            if round_number:
                seconds[name].append(now() - start)
    if rank == 0:
        results.put({name: statistics.median(values) for name, values in seconds.items()})
    dist.barrier()
    dist.destroy_process_group()


def _bind(rank: int, threads: int) -> None:
    """Bind a process to its own cores, if there are enough."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))[rank * threads : (rank + 1) * threads]
        if len(cores) == threads:
            os.sched_setaffinity(0, cores)


if __name__ == "__main__":
    sys.exit(run(main))
