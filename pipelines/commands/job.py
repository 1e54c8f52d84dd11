"""`kubedet job VERB`: one training job in a cluster, as its operator handles it."""

import argparse
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from pipelines.commands import Commands, job_ends
from pipelines.commands.job_options import (
    CommandParser,
    add_backend,
    add_specification,
    kinds,
    on_backend,
    specification,
)
from trainer.errors import ConfigError, KubedetError, LaunchError

if TYPE_CHECKING:
    from components.launchers.backend import JobStatus, PodStatus
    from components.launchers.cluster.backend import ClusterBackend
    from components.launchers.timings import Timings

Verbs: TypeAlias = "argparse._SubParsersAction[CommandParser]"

_PATIENCE_SECONDS = 15.0  # As long as a person likes to wait for an API server that does not answer.
_SPEC = "[--spec FILE] [--set FIELD=VALUE ...] [FLAGS] [-- COMMAND ...]"


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "job",
        help="submit, watch and stop training jobs in a cluster",
        description="Training jobs in the cluster and namespace of KUBECONFIG (or of the pod this runs in).",
    )
    add_backend(parser)
    verbs = parser.add_subparsers(required=True, metavar="VERB", parser_class=CommandParser)
    submit = _verb(
        verbs, "submit", _submit, "start a job, or take up the same one where it runs already",
        f"kubedet job submit {_SPEC} [--wait]",
    )  # fmt: skip
    add_specification(submit)
    submit.add_argument(
        "--wait", action="store_true",
        help="show its log to its end, and end with its result; Ctrl-C deletes the job",
    )  # fmt: skip
    render = _verb(
        verbs, "render", _render, "print a job for other tools, and send nothing",
        f"kubedet job render [--target TARGET] {_SPEC}",
    )  # fmt: skip
    render.add_argument(
        "--target", default="pytorchjob", metavar="TARGET",
        help="pytorchjob (default), trainjob, indexed-job, runai or runai-submit-dist",
    )  # fmt: skip
    add_specification(render)
    fields = verbs.add_parser(
        "fields", help="say what each field of a job means",
        description="Say what each field of a job means, and its default; * stands for a number.",
    )  # fmt: skip
    fields.add_argument("text", nargs="?", default="", metavar="TEXT", help="only those that name it")
    fields.set_defaults(command=_fields)
    _output(_verb(verbs, "list", _list, "list the jobs of the namespace"))
    _output(_named(_verb(verbs, "status", _status, "tell how a job and its pods are")))
    logs = _named(_verb(verbs, "logs", _logs, "print the log of a job"))
    logs.add_argument(
        "-f", "--follow", action="store_true", help="go on until the job has ended, with pods that fail"
    )
    _pod_options(logs)
    _named(_verb(verbs, "stop", _stop, "delete a job and its pods; its checkpoints stay"))
    execute = _named(
        _verb(
            verbs,
            "exec",
            _exec,
            "run a command in a pod of a job, on this terminal",
            "kubedet job exec NAME [--rank N] -- COMMAND ...",
        )
    )
    _pod_options(execute)
    execute.takes_command = True
    wait = _named(_verb(verbs, "wait", _wait, "wait for the end of a job, and end with its result"))
    wait.add_argument("--timeout", type=float, default=0.0, metavar="SECONDS", help="give up after so long")


def _verb(
    verbs: Verbs, name: str, run: Callable[[argparse.Namespace], int], text: str, usage: str | None = None
) -> CommandParser:
    parser = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", usage=usage)
    parser.add_argument("-n", "--namespace", default=None, metavar="NAME", help="default: KUBECONFIG's")
    add_backend(parser, argparse.SUPPRESS)
    parser.set_defaults(command=partial(on_backend, name, run))
    return parser


def _named(parser: CommandParser) -> CommandParser:
    parser.add_argument("name", metavar="NAME", help="name of the job")
    return parser


def _output(parser: CommandParser) -> None:
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table", help="default: table")


def _pod_options(parser: CommandParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--rank", type=int, default=None, metavar="N", help="the pod of this rank (default: 0)"
    )
    which.add_argument("--pod", default="", metavar="NAME", help="the pod of this name")


def _fields(options: argparse.Namespace) -> int:
    from components.launchers.spec import JobSpec
    from pipelines.commands.field_help import describe

    print(describe(JobSpec, options.text))
    return 0


def _submit(options: argparse.Namespace) -> int:
    from components.launchers.timings import Timings

    job = specification(options)
    backend = _backend(options, Timings(), job.namespace)
    if options.wait:
        from components.launchers.cluster import watch

        try:
            watch.run(backend, job)
        except BrokenPipeError:  # Whoever read the lines has gone; the job has not.
            print(f"the job {job.name} goes on: kubedet job logs -f {job.name}", file=sys.stderr)
            raise
        return 0
    place = f" -n {job.namespace}" if job.namespace else ""
    try:
        name = backend.submit(job)
    except KeyboardInterrupt:
        print(
            f"the job {job.name} may have been created: `kubedet job status{place} {job.name}` tells, and "
            f"`kubedet job stop{place} {job.name}` ends it", file=sys.stderr,
        )  # fmt: skip
        raise
    print(f"see `kubedet job status{place} {name}` and `kubedet job logs{place} -f {name}`")
    return 0


def _render(options: argparse.Namespace) -> int:
    from components.launchers.render import render

    print(render(options.target, specification(options)), end="")
    return 0


def _list(options: argparse.Namespace) -> int:
    from pipelines.commands import job_tables

    backend = _backend(options)
    statuses = [backend.with_progress(job) for job in backend.list_jobs()]
    if options.output == "json":
        print(job_tables.as_json(statuses))
    elif statuses:
        print(job_tables.jobs(statuses))
    else:
        print(f"no jobs of kubedet in namespace {backend.cluster.namespace}", file=sys.stderr)
    return 0


def _status(options: argparse.Namespace) -> int:
    from components.launchers.backend import Phase
    from components.launchers.cluster import kueue, kueue_setup
    from pipelines.commands import job_tables

    backend = _backend(options)
    job = backend.with_progress(_existing(backend, options.name))
    if options.output == "json":
        print(job_tables.as_json(job))
        return 0
    reasons = []
    if job.phase is Phase.PENDING:
        reasons = backend.explain(job)
    elif job.phase is Phase.SUSPENDED and kueue.in_vain(job, backend.timings.unserved):
        reasons = [*job_tables.why(job), *backend.explain(job), f"fix: {kueue_setup.remedy(job)}"]
    elif job.phase is Phase.FAILED:
        reasons = str(_failure(backend, job)).splitlines()
    print(job_tables.status(job, reasons))
    return 0


def _logs(options: argparse.Namespace) -> int:
    from components.launchers.cluster.pod_log import PodLog

    backend = _backend(options)
    job = _existing(backend, options.name)
    if options.pod or options.rank is not None:
        pod = _pod(job, options)
        log = PodLog(backend.cluster, pod.name, pod.uid, threading.Event())
        for text in log.lines(follow=options.follow):
            print(text, flush=True)
    else:
        for line in backend.logs(options.name, follow=options.follow):
            print(f"{line.pod}: {line.text}", flush=True)
    return 0


def _stop(options: argparse.Namespace) -> int:
    backend = _backend(options)
    return job_ends.stop(_existing(backend, options.name), backend.stop)


def _exec(options: argparse.Namespace) -> int:
    from components.launchers.cluster import pod_exec

    if not options.arguments:
        raise ConfigError(
            "no command is given", fix=f"write it last: kubedet job exec {options.name} -- bash"
        )
    backend = _backend(options)
    pod = _pod(_existing(backend, options.name), options)
    if pod.phase != "Running":
        why = f" ({pod.reason})" if pod.reason else ""
        raise LaunchError(f"{pod.name} is {pod.phase}{why}: nothing runs in it", fix="choose a pod that runs")
    return pod_exec.interactive(backend.cluster.core, backend.cluster.namespace, pod, options.arguments)


def _wait(options: argparse.Namespace) -> int:
    from components.launchers.backend import Phase
    from components.launchers.timings import Timings

    # Whoever waits for hours outlasts an API server that is away for minutes.
    backend = _backend(options, Timings(patience=Timings.outage))
    status = _existing(backend, options.name)
    job = job_ends.await_end(status, partial(backend.status, options.name), options.timeout)
    if job.phase is not Phase.SUCCEEDED:
        raise _failure(backend, job)
    return 0


def _failure(backend: "ClusterBackend", job: "JobStatus") -> KubedetError:
    """Make an error of a job that did not end well, with the last lines of the pod that is to blame."""
    from components.launchers.cluster.api_errors import ApiError
    from components.launchers.cluster.job_failure import culprit, of_job
    from components.launchers.cluster.log_hints import Hints
    from components.launchers.cluster.pod_log import PodLog
    from components.launchers.last_lines import LAST_LINES

    hints, lines = Hints(rdma=False), []
    if pod := culprit(job.pods):
        with suppress(ApiError):  # What is known without the log is told all the same.
            log = PodLog(backend.cluster, pod.name, pod.uid, threading.Event(), tail=LAST_LINES)
            lines = list(log.lines(follow=False))
    for line in lines:
        hints.line(line)
    return of_job(job, {pod.name: lines} if pod else {}, hints)


def _backend(
    options: argparse.Namespace, timings: "Timings | None" = None, namespace: str = ""
) -> "ClusterBackend":
    import logging

    from components.launchers.cluster.backend import ClusterBackend
    from components.launchers.timings import Timings

    # What the launcher does with a job that is there already, and that it tries again.
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("components").setLevel(logging.INFO)
    return ClusterBackend.connect(
        namespace or options.namespace or "",
        kinds=kinds(options.backend),
        timings=timings or Timings(patience=_PATIENCE_SECONDS),
    )


def _existing(backend: "ClusterBackend", name: str) -> "JobStatus":
    """Return how a job is, or refuse to go on where there is none."""
    from components.launchers.backend import Phase

    job = backend.status(name)
    if job.phase is Phase.GONE:
        raise ConfigError(
            f"namespace {backend.cluster.namespace} has no job {name!r}",
            fix=f"see `kubedet job list -n {backend.cluster.namespace}`",
        )
    return job


def _pod(job: "JobStatus", options: argparse.Namespace) -> "PodStatus":
    """Return the pod that is meant: by name, or by rank."""
    for pod in job.pods:
        if pod.name == options.pod or (not options.pod and pod.rank == (options.rank or 0)):
            return pod
    description = f"pod {options.pod}" if options.pod else f"pod of rank {options.rank or 0}"
    pods = ", ".join(pod.name for pod in job.pods)
    raise ConfigError(
        f"{job.name} has no {description}", fix=f"its pods: {pods}" if pods else "wait for its pods"
    )
