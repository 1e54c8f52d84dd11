"""`kubedet job menu`: an interactive menu for the jobs of a namespace."""

import sys

from kubedet.display import format_columns, print_safe
from kubedet.display.jobs import JOB_COLUMNS, job_row
from pipelines import JobTarget
from trainer.base.errors import ConfigError

_SHELL = ("sh", "-c", "if command -v bash >/dev/null; then exec bash; else exec sh; fi")
_HIDDEN_COLUMNS = ("KIND", "RESTARTS")  # A terminal of 80 columns has no room for them.
_KEYS_HELP = "i N details, l N log, e N [RANK] shell, d N delete, s FILE submit, Enter list again, q quit"


def job_menu(*, target: JobTarget = JobTarget()) -> None:
    """List the jobs, and show, stop or submit jobs interactively until you enter q.

    Args:
        target: where the jobs are
    """
    from components.launchers.runai import RunaiBackend
    from kubedet import cli
    from pipelines import jobs

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(
            "the menu needs a terminal", fix="in scripts use the other commands of `kubedet job`"
        )
    backend = jobs.connect(target)
    if isinstance(backend, RunaiBackend):
        raise ConfigError("the menu cannot show jobs of Run:ai", fix="omit --backend runai")
    where = ["--namespace", backend.cluster.namespace, "--backend", target.backend]
    while True:
        found = [backend.with_progress(job) for job in backend.list_jobs()]
        rows = [("", *JOB_COLUMNS), *((str(number), *job_row(job)) for number, job in enumerate(found, 1))]
        shown = [column for column in zip(*rows, strict=True) if column[0] not in _HIDDEN_COLUMNS]
        print_safe(f"{backend.place}\n{format_columns([*zip(*shown, strict=True)])}\n{_KEYS_HELP}")
        try:
            key, *rest = input("> ").split() or [""]
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
            if key == "d" and input(f"{question} [y/n] ") != "y":
                continue
        elif key:
            print(f"{' '.join([key, *rest])}: enter a key and the number of a job")
        if command:  # A user error, a failed job or Ctrl-C ends the command, not the menu.
            cli.main(["job", command[0], *where, *command[1:]])
