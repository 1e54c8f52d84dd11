"""`kubedet compile`: the pipeline as the one file that a cluster takes."""

import argparse
from pathlib import Path

from pipelines.commands import Commands


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "compile",
        help="write the pipeline as a cluster takes it",
        description="Write the pipeline as one YAML file, to be uploaded in the UI or given to `kfp run "
        "create`. KUBEDET_IMAGE names the container image of its steps.",
    )
    parser.add_argument(
        "-o", "--output", default="pipeline.yaml", metavar="FILE", help="file to write (default: %(default)s)"
    )
    parser.add_argument(
        "--volume", action="store_true",
        help="keep the data on a shared volume instead of in a bucket: every step mounts the "
        "PersistentVolumeClaim that the run's parameter `claim` names, at /data",
    )  # fmt: skip
    parser.set_defaults(command=_compile)


def _compile(options: argparse.Namespace) -> int:
    from pipelines.compile import compile_pipeline

    compile_pipeline(Path(options.output), volume=options.volume)
    print(f"wrote {options.output}")
    return 0
