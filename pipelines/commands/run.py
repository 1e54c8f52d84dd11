"""`kubedet run`: the whole pipeline on this machine."""

import argparse
from datetime import datetime
from pathlib import Path

from pipelines.commands import Commands
from pipelines.commands.options import add_training
from trainer.configuration import parse_overrides


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "run",
        help="run the whole pipeline on this machine",
        description="Download, shard, train, evaluate, and export on this machine. Stopped with Ctrl-C or "
        "killed, the same command with the same --name goes on. Exit code: 0, also where the gate held the "
        "export back; 2 for a mistake in what was asked or given; 143 when stopped; 1 otherwise.",
    )
    add_training(parser)
    parser.add_argument(
        "--nproc", type=int, metavar="N",
        help="training processes (default: one for each GPU; 2 without GPUs)",
    )  # fmt: skip
    parser.add_argument(
        "--data-root", default="./data_root", metavar="URI", help="where data is kept (default: %(default)s)"
    )
    parser.add_argument(
        "--output", default="./runs", metavar="DIR", help="where runs go (default: %(default)s)"
    )
    parser.add_argument("--name", default="", help="name of the run (default: the recipe and the time)")
    parser.add_argument("--verbose", action="store_true", help="show the local runner's own log too")
    parser.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    from pipelines.options import Options
    from pipelines.run import run

    return run(
        Options(
            name=options.name or f"{options.recipe}-{datetime.now():%Y%m%d-%H%M%S}",
            source=options.source,
            recipe=options.recipe,
            overrides=parse_overrides(options.overrides),
            nproc=_processes() if options.nproc is None else options.nproc,
            data_root=options.data_root,
            output=options.output,
            gate=options.gate,
            verbose=options.verbose,
        )
    )


def _processes(devices: Path = Path("/dev")) -> int:
    """Return how many processes train where nobody says: one for each GPU that PyTorch can use."""
    if not any(devices.glob("nvidia[0-9]*")):
        return 2  # Without importing torch, which takes seconds: the steps do that.
    import torch

    return torch.cuda.device_count() or 2
