"""`kubedet menu`: the jobs of a namespace on the whole terminal, and what can be done with them."""

import argparse
import sys
from functools import partial
from typing import TYPE_CHECKING

from pipelines.commands import Commands
from trainer.base.errors import ConfigError

if TYPE_CHECKING:
    from components.launchers.cluster.backend import ClusterBackend


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "menu",
        help="handle training jobs in an interactive menu",
        description="The training jobs of a namespace in the cluster of KUBECONFIG: submit, status, logs, "
        "delete, a shell in a pod.",
    )
    parser.add_argument("-n", "--namespace", default="", metavar="NAME", help="default: KUBECONFIG's")
    parser.set_defaults(command=_menu)


def _menu(options: argparse.Namespace) -> int:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("the menu needs a terminal", fix="use `kubedet job` in scripts")
    from pipelines.menu.app import Menu

    if error := Menu(partial(_connect, options.namespace)).run():
        raise error
    return 0


def _connect(namespace: str) -> "ClusterBackend":
    from components.launchers.cluster.backend import (
        ClusterBackend,  # Takes a second: the menu shows meanwhile.
    )

    return ClusterBackend.connect(namespace=namespace)
