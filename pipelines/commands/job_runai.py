"""`kubedet job VERB --backend runai`: the same verbs through Run:ai's command line."""

import argparse
import json
import sys
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from pipelines.commands import job_ends
from pipelines.commands.job_options import set_project, specification
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from components.launchers.backend import JobStatus
    from components.launchers.runai.backend import RunaiBackend


def _submit(options: argparse.Namespace) -> int:
    from components.launchers.runai import watch

    set_project(options)
    job = specification(options)
    backend = _backend(options)
    if options.wait:
        watch.run(backend, job, lambda text: print(text, flush=True))
        return 0
    name = backend.submit(job)
    place = f" --project {job.runai_queue}" if job.runai_queue else ""
    shown = [f"`kubedet job {verb} --backend runai{place} {name}`" for verb in ("status", "logs -f")]
    print(f"see {' and '.join(shown)}")
    return 0


def _list(options: argparse.Namespace) -> int:
    from pipelines.commands import job_tables

    jobs = _backend(options).list_jobs()
    if options.output == "json":
        print(json.dumps([asdict(job.status) | {"running": job.running} for job in jobs], indent=2))
    elif jobs:
        rows = []
        for job in jobs:
            name, kind, phase, done, _, _, age, reason = job_tables.row(job.status)
            running = "-" if job.running is None else str(job.running)
            rows.append((name, kind, phase, done, f"{running}/{job.status.nodes}", "-", age, reason))
        print(job_tables.columns([job_tables.JOBS, *rows]))
    else:
        print("no trainings in Run:ai's project", file=sys.stderr)
    return 0


def _status(options: argparse.Namespace) -> int:
    from components.launchers.backend import Phase
    from components.launchers.runai.watch import failure
    from pipelines.commands import job_tables

    backend = _backend(options)
    job = _existing(backend, options.name)
    if options.output == "json":
        print(job_tables.as_json(job))
        return 0
    reasons = str(failure(backend, job)).splitlines() if job.phase is Phase.FAILED else []
    print(job_tables.status(job, reasons))
    return 0


def _logs(options: argparse.Namespace) -> int:
    backend = _backend(options)
    pod = _pod(_existing(backend, options.name), options)
    for line in backend.logs(options.name, follow=options.follow, pod=pod):
        print(line.text if pod else f"{line.pod}: {line.text}", flush=True)
    return 0


def _stop(options: argparse.Namespace) -> int:
    backend = _backend(options)
    return job_ends.stop(_existing(backend, options.name), backend.stop)


def _exec(options: argparse.Namespace) -> int:
    if not options.arguments:
        raise ConfigError(
            "no command is given",
            fix=f"write it last: kubedet job exec --backend runai {options.name} -- bash",
        )
    backend = _backend(options)
    pod = _pod(_existing(backend, options.name), options)
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    return backend.execute(options.name, options.arguments, pod=pod, terminal=terminal)


def _wait(options: argparse.Namespace) -> int:
    from components.launchers.backend import Phase
    from components.launchers.runai.watch import failure

    backend = _backend(options)
    now = _existing(backend, options.name)
    job = job_ends.await_end(now, partial(backend.status, options.name), options.timeout)
    if job.phase is not Phase.SUCCEEDED:
        raise failure(backend, job)
    return 0


VERBS = {
    "submit": _submit, "list": _list, "status": _status, "logs": _logs, "stop": _stop, "exec": _exec,
    "wait": _wait,
}  # fmt: skip
"""What each verb of `kubedet job` does here; those that are not named need no cluster."""


def _backend(options: argparse.Namespace) -> "RunaiBackend":
    import logging

    from components.launchers.runai.backend import RunaiBackend
    from components.launchers.runai.cli import Cli

    if options.namespace is not None:
        raise ConfigError(
            "Run:ai puts a job into its project's namespace", fix="leave --namespace out; name --project"
        )
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("components").setLevel(logging.INFO)
    return RunaiBackend(Cli(options.project))


def _existing(backend: "RunaiBackend", name: str) -> "JobStatus":
    """Return how a job is, or refuse to go on where there is none."""
    from components.launchers.backend import Phase

    job = backend.status(name)
    if job.phase is Phase.GONE:
        raise ConfigError(
            f"Run:ai's project {backend.cli.project or 'of this user'} has no training {name!r}",
            fix="see `kubedet job list --backend runai`, and name --project if it is another",
        )
    return job


def _pod(job: "JobStatus", options: argparse.Namespace) -> str:
    """Return the name of the pod that is meant, nothing for the first node's."""
    if options.pod or options.rank is None:
        return options.pod
    for pod in job.pods:
        if pod.rank == options.rank:
            return pod.name
    pods = ", ".join(pod.name for pod in job.pods)
    raise ConfigError(
        f"{job.name} has no pod of rank {options.rank}",
        fix=f"its pods: {pods}" if pods else "name it with --pod: this version of runai does not list pods",
    )
