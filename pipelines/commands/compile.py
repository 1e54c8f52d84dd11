"""`kubedet compile`: the pipeline as the one file that a cluster takes."""

import argparse
from dataclasses import fields
from pathlib import Path

from pipelines.commands import Commands, cluster_options
from pipelines.forms import PARALLELISM, Form


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
    parser.add_argument(
        "--conditional", action="store_true",
        help="end a run at once where fewer images are new than its parameter `min_new_images` says",
    )  # fmt: skip
    parser.add_argument(
        "--trials", type=int, default=0, metavar="N",
        help="search for hyper-parameters, as `kubedet tune` does, by so many trials",
    )  # fmt: skip
    parser.add_argument(
        "--parallelism", type=int, default=PARALLELISM, metavar="N",
        help="trials that train at the same time; 0 is no limit (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--gpus", type=int, default=0, metavar="N", help="GPUs of each trial's pod (default: %(default)s)"
    )
    cluster_options.add_form(parser)
    parser.set_defaults(command=_compile)


def _compile(options: argparse.Namespace) -> int:
    from pipelines.compile import compile_pipeline

    form = Form(**{item.name: getattr(options, item.name) for item in fields(Form)})
    compile_pipeline(Path(options.output), form)
    print(f"wrote {options.output}")
    return 0
