"""`kubedet cluster`: the files for a cluster: its manifests and the compiled pipeline."""

import argparse
import shutil
from dataclasses import fields
from pathlib import Path

from pipelines.commands import Commands, option, options, verb
from pipelines.parameters import PARALLELISM, CompileOptions
from trainer.base.errors import StorageError
from trainer.storage import outputs

MANIFESTS = Path(__file__).parents[1] / "deploy"  # `deploy/` in the wheel; in a checkout a link to it.


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "cluster", description="Write the files for a cluster: its manifests, and the compiled pipeline."
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    manifests = verb(
        verbs,
        "manifests",
        _manifests,
        "write the manifests of a cluster, for kubectl",
        "Write the folder deploy/ of this version: permissions, a volume, the runtime of TrainJobs, overlays "
        "for each kind of installation and example jobs. Its README.md explains which to apply.",
    )
    option(manifests, "-o --output DIR", "folder to write", "deploy")
    compiled = verb(
        verbs,
        "compile",
        _compile,
        "write the compiled pipeline",
        "Write the pipeline as one YAML file for the UI or `kfp run create`. KUBEDET_IMAGE names the image "
        "of its steps.",
    )
    option(compiled, "-o --output FILE", "file to write", "pipeline.yaml")
    option(
        compiled,
        "--volume",
        "keep the data on a shared volume: every step mounts the PersistentVolumeClaim "
        "of the parameter `claim` at /data",
    )
    text = "skip training if fewer images have changed than the run's parameter `min_new_images`"
    option(compiled, "--conditional", text)
    option(compiled, "--trials N", "search hyper-parameters with N trials, like `kubedet tune`", 0)
    option(compiled, "--parallelism N", "number of concurrent trials; 0 means no limit", PARALLELISM)
    option(compiled, "--gpus N", "GPUs of each trial's pod (default: 0)", 0)
    options.add_compile_options(compiled)


def _compile(options: argparse.Namespace) -> int:
    print(f"wrote {write_pipeline(options)}")
    return 0


def write_pipeline(options: argparse.Namespace) -> Path:
    """Write the pipeline that the options of `compile` describe; return the file."""
    from pipelines.compiler import compile_pipeline

    chosen = {item.name: getattr(options, item.name) for item in fields(CompileOptions)}
    outputs.claim_file(options.output)
    compile_pipeline(path := Path(options.output), CompileOptions(**chosen))
    return path


def _manifests(options: argparse.Namespace) -> int:
    folder = Path(options.output)
    try:
        outputs.require_new(str(folder))
        shutil.copytree(MANIFESTS, folder, dirs_exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"cannot write {folder}: {error.strerror or error}", fix="choose another folder"
        ) from error
    print(f"wrote {folder}: see {folder / 'README.md'}")
    return 0
