"""`kubedet job menu`: the jobs of a namespace, handled by keys."""

import sys

from kubedet.display.jobs import JOB_COLUMNS, job_row
from pipelines import JobPlace
from trainer.base.errors import ConfigError

_SHELL = ("sh", "-c", "if command -v bash >/dev/null; then exec bash; else exec sh; fi")
_KEYS_HELP = "i N details, l N log, e N [RANK] shell, d N delete, s FILE submit, Enter list again, q quit"


def job_menu(*, place: JobPlace = JobPlace()) -> None:
    """List the jobs, and handle one of them by keys, until `q` or the end of input.

    Args:
        place: where the jobs are
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.prompt import Confirm
    from rich.table import Table
    from rich.text import Text

    from components.launchers.runai import RunaiBackend
    from kubedet import cli
    from pipelines import jobs

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(
            "the menu needs a terminal", fix="in scripts use the other commands of `kubedet job`"
        )
    backend = jobs.connect(place)
    if isinstance(backend, RunaiBackend):
        raise ConfigError("the menu shows the jobs of a cluster", fix="omit --backend runai")
    where = ["--namespace", backend.cluster.namespace, "--backend", place.backend]
    console = Console()
    while True:
        found = [backend.with_progress(job) for job in backend.list_jobs()]
        table = Table(
            "", title=Text(str(backend.place)), caption=_KEYS_HELP, box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
        )
        shown = [title for title in JOB_COLUMNS if title not in ("KIND", "RESTARTS")]  # Key i shows them.
        for title in shown:  # On a narrow terminal only the reason is folded.
            table.add_column(title, no_wrap=title != "REASON", overflow="fold")
        for number, job in enumerate(found, start=1):
            row = dict(zip(JOB_COLUMNS, job_row(job), strict=True))
            table.add_row(str(number), *(Text(row[title]) for title in shown))
        console.print(table)
        try:
            key, *rest = console.input("> ").split() or [""]
        except EOFError:
            return
        if key == "q":
            return
        command: list[str] = []
        if key == "s" and len(rest) == 1:
            command = ["submit", "--spec", rest[0]]
        elif key in ("i", "l", "e", "d") and rest and rest[0] in map(str, range(1, len(found) + 1)):
            job = found[int(rest[0]) - 1]
            command = {
                "i": ["status", job.name],
                "l": ["logs", job.name] if job.phase.final else ["logs", "--follow", job.name],
                "e": ["exec", job.name, "--rank", (rest[1:] or ["0"])[0], "--", *_SHELL],
                "d": ["stop", job.name],
            }[key]
            question = f"Delete {job.name}, which is {job.phase}, and its pods? Its checkpoints stay."
            if key == "d" and not Confirm.ask(question, default=False):
                continue
        elif key:
            print(f"{' '.join([key, *rest])}: not a key and the number of a job")
        if command:  # A mistake, a failed job or Ctrl-C ends the command, not the menu.
            cli.main(["job", command[0], *where, *command[1:]])
