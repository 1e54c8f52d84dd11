"""`kubedet compile`: the pipeline as the one file that a cluster takes."""

import argparse
from pathlib import Path

from pipelines.commands import Commands


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser("compile", help="write the pipeline as a cluster takes it")
    parser.add_argument("-o", "--output", default="pipeline.yaml", metavar="FILE", help="%(default)s")
    parser.set_defaults(command=_compile)


def _compile(options: argparse.Namespace) -> int:
    from pipelines.compile import compile_pipeline

    compile_pipeline(Path(options.output))
    print(f"wrote {options.output}")
    return 0
