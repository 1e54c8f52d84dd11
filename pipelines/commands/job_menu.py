"""`kubedet job menu`: the jobs of a namespace as a numbered list, and keys for the commands of one."""

import argparse
import sys
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.prompt import Confirm
from rich.table import Table
from rich.text import Text

from pipelines.commands import job_tables
from trainer.base.errors import ConfigError

if TYPE_CHECKING:
    from components.launchers.backend import JobStatus
    from components.launchers.cluster.backend import ClusterBackend

_SHELL = ("sh", "-c", "if command -v bash >/dev/null; then exec bash; else exec sh; fi")
"""Runs in a pod: the better shell that its image has."""

_KEYS = "i N details, l N log, e N [RANK] shell, d N delete, s FILE submit, Enter list again, q quit"


def run(options: argparse.Namespace, backend: "ClusterBackend") -> int:
    """List the jobs, run what is asked for as `kubedet job` does, and again, until `q` or the end of input.

    Raises:
        ConfigError: stdin or stdout is not a terminal.
        KubedetError: the cluster does not answer.
    """
    from pipelines import cli

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("the menu needs a terminal", fix="use the other verbs of `kubedet job` in scripts")
    where = ["--namespace", backend.cluster.namespace, "--backend", options.backend]
    console = Console()
    while True:
        jobs = job_tables.newest([backend.with_progress(job) for job in backend.list_jobs()])
        table = Table("", *job_tables.JOBS, title=Text(str(backend.place)), caption=_KEYS, box=SIMPLE_HEAD)
        for number, job in enumerate(jobs, start=1):
            table.add_row(str(number), *map(Text, job_tables.row(job)))
        console.print(table)
        try:
            words = console.input("> ").split()
        except EOFError:
            return 0
        if words == ["q"]:
            return 0
        if words and (command := _command(words, jobs)):
            # A mistake, a failed job or Ctrl-C ends the command, not the menu.
            cli.main(["job", command[0], *where, *command[1:]])


def _command(words: list[str], jobs: "list[JobStatus]") -> list[str]:
    """Return the words of a `kubedet job` command; empty if there is nothing to do."""
    key, *rest = words
    if key == "s" and len(rest) == 1:
        return ["submit", "--spec", rest[0]]
    job = jobs[int(rest[0]) - 1] if rest and rest[0] in map(str, range(1, len(jobs) + 1)) else None
    if job is None:
        print(f"{' '.join(words)}: not a key and the number of a job")
        return []
    if key == "d":
        question = f"Delete {job.name}, which is {job.phase}, and its pods? Its checkpoints stay."
        return ["stop", job.name] if Confirm.ask(Text(question), default=False) else []
    commands = {
        "i": ["status", job.name],
        # The log of a job that goes on is followed until Ctrl-C.
        "l": ["logs", job.name] if job.phase.final else ["logs", "--follow", job.name],
        "e": ["exec", job.name, "--rank", (rest[1:] or ["0"])[0], "--", *_SHELL],
    }
    if key not in commands:
        print(f"{key}: no such key")
    return commands.get(key, [])
