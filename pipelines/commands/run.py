"""`kubedet run`: the whole pipeline on this machine."""

import argparse
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from pipelines import parameters
from pipelines.commands import Commands
from pipelines.commands.options import add_overrides, add_parameter, add_prices, read_recipe, use_prices
from trainer.config.schema import MINUTES, QUICK_MINUTES


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "run",
        description="Download, shard, train, evaluate, and export on this machine. Stopped with Ctrl-C or "
        "killed, the same command with the same --name goes on. Exit code: 0, also where the gate held the "
        "export back; 2 for a mistake in what was asked or given; 143 when stopped; 1 otherwise.",
    )
    for name, item in parameters.LOCAL.items():
        if name == "overrides":
            add_overrides(parser)
        else:
            add_parameter(parser, item)
    parser.add_argument("--name", default="", help="name of the run (default: the recipe and the time)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"for a first look, in about {QUICK_MINUTES} minutes from the training's start on: short for "
        f"--set {MINUTES}={QUICK_MINUTES}, which chooses image size, epochs and batch that are not set",
    )
    add_prices(parser)
    parser.add_argument("--verbose", action="store_true", help="show the local runner's own log too")
    parser.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    from pipelines.run import Options, run

    overrides = read_recipe(options)
    values = {name: getattr(options, name) for name in parameters.LOCAL}
    if options.quick:
        overrides = {MINUTES: QUICK_MINUTES} | overrides
    values |= {"overrides": overrides}
    values |= {"nproc": _processes()} if options.nproc is None else {}
    values = {name: value for name, value in values.items() if value is not None}
    request = Options(options.name, values, options.verbose, use_prices(options))
    if not request.name:
        request = replace(request, name=f"{request['recipe']}-{datetime.now():%Y%m%d-%H%M%S}")
    return run(request)


def _processes(devices: Path = Path("/dev")) -> int:
    """Return how many processes train where nobody says: one for each GPU that PyTorch can use."""
    without: int = parameters.LOCAL["nproc"].default
    if not any(devices.glob("nvidia[0-9]*")):
        return without  # Without importing torch, which takes seconds: the steps do that.
    import torch

    return torch.cuda.device_count() or without
