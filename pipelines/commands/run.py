"""`kubedet run`: the whole pipeline on this machine."""

import argparse
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from pipelines import parameters
from pipelines.commands import Commands, option
from pipelines.commands.options import add_overrides, add_parameter, add_prices, read_recipe, use_prices
from trainer.config.schema import MINUTES, QUICK_MINUTES


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "run",
        description="Download, shard, train, evaluate, and export on this machine. If it is stopped or "
        "killed, repeat the command with the same --name to continue. Exit code 0 also if the gate fails.",
    )
    for name, item in parameters.LOCAL.items():
        if name == "overrides":
            add_overrides(parser)
        else:
            add_parameter(parser, item)
    option(parser, "--name NAME", "name of the run (default: the recipe and the time)")
    option(
        parser, "--quick", f"train for about {QUICK_MINUTES} minutes: short for --set "
        f"{MINUTES}={QUICK_MINUTES}; image size, epochs and batch size are chosen for you unless set",
    )  # fmt: skip
    add_prices(parser)
    option(parser, "--verbose", "show the local runner's own log too")
    parser.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    from pipelines.run import Options, run

    overrides = read_recipe(options)
    if options.quick:
        overrides = {MINUTES: QUICK_MINUTES} | overrides
    values = {name: getattr(options, name) for name in parameters.LOCAL} | {"overrides": overrides}
    # Without importing torch, which takes seconds, on a machine without GPUs.
    if options.nproc is None and any(Path("/dev").glob("nvidia[0-9]*")):
        import torch

        values["nproc"] = torch.cuda.device_count() or None
    values = {name: value for name, value in values.items() if value is not None}
    request = Options(options.name, values, options.verbose, use_prices(options))
    if not request.name:
        request = replace(request, name=f"{request['recipe']}-{datetime.now():%Y%m%d-%H%M%S}")
    return run(request)
