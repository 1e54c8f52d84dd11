"""`kubedet manifests`: the cluster's files, for whoever installed a wheel and has no checkout."""

import argparse
import shutil
from pathlib import Path

from pipelines.commands import Commands
from trainer.base.errors import ConfigError, StorageError

FILES = Path(__file__).parents[1] / "deploy"
"""`deploy/`, as the wheel carries it; in a checkout a link to it."""


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "manifests",
        help="write the files that a cluster needs, for kubectl",
        description="Write the folder deploy/ of this version: permissions, a volume, the runtime of "
        "TrainJobs, overlays for each kind of installation and example jobs. Its README.md says which of "
        "them to apply.",
    )
    parser.add_argument(
        "-o", "--output", default="deploy", metavar="DIR", help="folder to write (default: %(default)s)"
    )
    parser.set_defaults(command=_manifests)


def _manifests(options: argparse.Namespace) -> int:
    folder = Path(options.output)
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(
                f"{folder} is there already, perhaps with changes of yours",
                fix="choose another folder with -o, or delete this one",
            )
        shutil.copytree(FILES, folder, dirs_exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"cannot write {folder}: {error.strerror or error}", fix="choose another folder"
        ) from error
    print(f"wrote {folder}: see {folder / 'README.md'}")
    return 0
