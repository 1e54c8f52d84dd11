"""`kubedet job VERB`: one training job in a cluster, as its operator handles it."""

import argparse
import json
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeAlias

from components.launchers import obstacles
from components.launchers.backend import JobStatus, Phase, PodStatus, Timings
from components.launchers.cluster.kinds import KINDS
from components.launchers.output import LAST_LINES, Hints
from components.launchers.runai import RunaiBackend
from components.launchers.spec import JobSpec
from pipelines.commands import Commands, columns, option, verb
from pipelines.commands.job_options import CommandParser, add_specification, specification
from trainer.base.errors import ConfigError, KubedetError, LaunchError
from trainer.launching.job_status import AP, LOSS, SPEED

if TYPE_CHECKING:
    from components.launchers.cluster.backend import ClusterBackend

Backends: TypeAlias = "ClusterBackend | RunaiBackend"

_PATIENCE_SECONDS = 15.0  # For an API server that does not answer.
_POLL_SECONDS = 5.0  # Of `wait`.
_SPEC = "[--spec FILE] [--set FIELD=VALUE ...] [FLAGS] [-- COMMAND ...]"
_BACKENDS = ("kubernetes", "pytorchjob", "trainjob", "runai")

_SHELL = ("sh", "-c", "if command -v bash >/dev/null; then exec bash; else exec sh; fi")
_JOB_COLUMNS = ("NAME", "KIND", "PHASE", "DONE", "PODS", "RESTARTS", "AGE", "REASON")
_POD_COLUMNS = ("RANK", "POD", "PHASE", "RESTARTS", "EXIT", "NODE", "REASON")
_METRICS = {LOSS: "loss", SPEED: "images/s", AP: "AP"}
_KEYS_HELP = "i N details, l N log, e N [RANK] shell, d N delete, s FILE submit, Enter list again, q quit"


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "job",
        description="Training jobs in the cluster and namespace of KUBECONFIG (or of the pod this runs in).",
    )
    _add_backend(parser)
    verbs = parser.add_subparsers(required=True, metavar="VERB", parser_class=CommandParser)
    submit = _verb(
        verbs,
        "submit",
        _submit,
        "start a job, or adopt the same one if it runs already",
        usage=f"kubedet job submit {_SPEC} [--wait]",
    )
    add_specification(submit)
    option(submit, "--wait", "print its log and exit with its result; Ctrl-C deletes the job")
    render = _verb(
        verbs,
        "render",
        _render,
        "print a job for other tools, and send nothing",
        usage=f"kubedet job render [--target TARGET] {_SPEC}",
    )
    option(
        render,
        "--target TARGET",
        "pytorchjob, trainjob, indexed-job, runai, runai-submit-dist or runai-submit-pytorch",
        "pytorchjob",
    )
    add_specification(render)
    fields = verb(
        verbs,
        "fields",
        _fields,
        "explain the fields of a job",
        "Explain each field of a job, with its default; * stands for a number.",
    )
    fields.add_argument(
        "text", nargs="?", default="", metavar="TEXT", help="only fields that contain this text"
    )
    listing = _verb(verbs, "list", _list, "list the jobs of the namespace")
    status = _verb(verbs, "status", _status, "show the state of a job and its pods")
    logs = _verb(verbs, "logs", _logs, "print the log of a job")
    option(logs, "-f --follow", "follow the log until the job ends, also across failed pods")
    stop = _verb(verbs, "stop", _stop, "delete a job and its pods; its checkpoints stay")
    execute = _verb(
        verbs,
        "exec",
        _exec,
        "run a command in a pod of a job, on this terminal",
        usage="kubedet job exec NAME [--rank N] -- COMMAND ...",
    )
    execute.takes_command = True
    wait = _verb(verbs, "wait", _wait, "wait for the end of a job, and exit with its result")
    option(wait, "--timeout SECONDS", "give up after this time", 0.0)
    _verb(verbs, "menu", _menu, "list the jobs, and handle one of them by keys")
    for parser in (status, logs, stop, execute, wait):
        parser.add_argument("name", metavar="NAME", help="name of the job")
    for parser in (listing, status):
        option(parser, "-o --output table|json", "default: table", "table")
    for parser in (logs, execute):
        which = parser.add_mutually_exclusive_group()
        option(which, "--rank N", "the pod of this rank (default: 0)", None, type=int)
        option(which, "--pod NAME", "the pod of this name")


def _verb(
    verbs: Any, name: str, run: Callable[[argparse.Namespace], int], text: str, **settings: Any
) -> CommandParser:
    parser: CommandParser = verb(verbs, name, run, text, **settings)
    option(parser, "-n --namespace NAME", "default: KUBECONFIG's", None)
    _add_backend(parser, default=argparse.SUPPRESS)
    return parser


def _add_backend(parser: argparse.ArgumentParser, **settings: Any) -> None:
    """Declare --backend and --project before the verb, or after it with argparse.SUPPRESS as default."""
    option(
        parser,
        f"--backend {'|'.join(_BACKENDS)}",
        "kubernetes: all kinds of jobs in the cluster; "
        "pytorchjob or trainjob: only that kind; runai: Run:ai's command line",
        **{"default": _BACKENDS[0]} | settings,
    )
    text = "Run:ai project, with --backend runai (default: set by `runai project set`)"
    option(parser, "--project NAME", text, **settings)


def _fields(options: argparse.Namespace) -> int:
    from pipelines.commands.recipes import describe

    print(describe(JobSpec, options.text))
    return 0


def _submit(options: argparse.Namespace) -> int:
    job = specification(options)
    backend = _backend(options, patience=Timings.patience, namespace=job.namespace)
    if options.wait:
        from components.launchers.cluster import watch

        try:
            watch.run(backend, job)
        except BrokenPipeError:
            print(f"the job continues: kubedet job logs{backend.options} -f {job.name}", file=sys.stderr)
            raise
        return 0
    try:
        backend.submit(job)
    except KeyboardInterrupt:
        command = f"`kubedet job status{backend.options} {job.name}`"
        print(f"the job {job.name} may have been created: see {command}", file=sys.stderr)
        raise
    words = backend.options
    print(f"see `kubedet job status{words} {job.name}` and `kubedet job logs{words} -f {job.name}`")
    return 0


def _render(options: argparse.Namespace) -> int:
    from components.launchers.render import render

    print(render(options.target, specification(options)), end="")
    return 0


def _list(options: argparse.Namespace) -> int:
    backend = _backend(options)
    if isinstance(backend, RunaiBackend):
        print(backend.listing(as_json=options.output == "json"), end="")
        return 0
    jobs = [backend.with_progress(job) for job in backend.list_jobs()]
    if options.output == "json":
        print(json.dumps([asdict(job) for job in jobs], indent=2))
    elif jobs:
        print(columns([_JOB_COLUMNS, *map(job_row, jobs)]))
    else:
        print(f"no jobs of kubedet in {backend.place}", file=sys.stderr)
    return 0


def _status(options: argparse.Namespace) -> int:
    from components.launchers.cluster import kueue

    backend = _backend(options)
    job = backend.with_progress(_existing(backend, options.name))
    if options.output == "json":
        print(json.dumps(asdict(job), indent=2))
        return 0
    reasons = []
    if job.phase is Phase.PENDING:
        fixes = dict.fromkeys(f"fix: {item.fix}" for item in obstacles.of_job(job) if item.fix)
        reasons = [*backend.explain(job), *fixes]
    elif job.phase is Phase.SUSPENDED and kueue.in_vain(job, backend.timings.unserved, backend.clock.now()):
        reasons = [*_messages(job), *backend.explain(job), f"fix: {kueue.remedy(job)}"]
    elif job.phase is Phase.FAILED:
        reasons = str(_failure(backend, job)).splitlines()
    print(status_text(job, reasons))
    return 0


def _logs(options: argparse.Namespace) -> int:
    backend = _backend(options)
    job = _existing(backend, options.name)
    if options.pod or options.rank is not None:
        for text in backend.pod_lines(job.name, _pod(job, options), follow=options.follow):
            print(text, flush=True)
    else:
        for line in backend.logs(options.name, follow=options.follow):
            print(f"{line.pod}: {line.text}", flush=True)
    return 0


def _stop(options: argparse.Namespace) -> int:
    backend = _backend(options)
    job = _existing(backend, options.name)
    print(f"{job.name} is {job.phase}: deleting it and its pods ...", flush=True)
    backend.stop(job.name)
    print(f"deleted {job.name}")
    return 0


def _exec(options: argparse.Namespace) -> int:
    if not options.arguments:
        raise ConfigError("no command is given", fix=f"append it: kubedet job exec {options.name} -- bash")
    backend = _backend(options)
    pod = _pod(_existing(backend, options.name), options)
    if pod.phase != "Running":
        why = f" ({pod.reason})" if pod.reason else ""
        raise LaunchError(
            f"{pod.name} is {pod.phase}{why}: no command can run in it", fix="choose a running pod"
        )
    return backend.execute(options.name, pod, options.arguments)


def _wait(options: argparse.Namespace) -> int:
    # A wait of hours must outlast an API server that is away for minutes.
    backend = _backend(options, patience=Timings.outage)
    job = _existing(backend, options.name)
    started, reported, waits = time.monotonic(), "", obstacles.Obstacles()
    while True:
        if job.phase != reported:
            print(f"{job.name} is {job.phase}", flush=True)
            reported = job.phase
        if job.phase is Phase.SUCCEEDED:
            return 0
        if job.phase.final:
            raise _failure(backend, job)
        for line in waits.news(obstacles.of_job(job)):
            print(line, flush=True)
        remaining = options.timeout - (time.monotonic() - started) if options.timeout else _POLL_SECONDS
        if remaining <= 0:
            raise LaunchError(
                f"{job.name} is still {job.phase} after {options.timeout:g} s", fix="wait longer, or stop it"
            )
        time.sleep(min(_POLL_SECONDS, remaining))
        job = backend.status(job.name)


def _menu(options: argparse.Namespace) -> int:
    """List the jobs and run `kubedet job` commands by keys, until `q` or the end of input."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.prompt import Confirm
    from rich.table import Table
    from rich.text import Text

    from pipelines import cli

    backend = _backend(options)
    if isinstance(backend, RunaiBackend):
        raise ConfigError("the menu shows the jobs of a cluster", fix="omit --backend runai")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(
            "the menu needs a terminal", fix="in scripts use the other commands of `kubedet job`"
        )
    where = ["--namespace", backend.cluster.namespace, "--backend", options.backend]
    console = Console()
    while True:
        jobs = [backend.with_progress(job) for job in backend.list_jobs()]
        table = Table(
            "", title=Text(str(backend.place)), caption=_KEYS_HELP, box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
        )
        shown = [title for title in _JOB_COLUMNS if title not in ("KIND", "RESTARTS")]  # Key i shows them.
        for title in shown:  # On a narrow terminal only the reason is folded.
            table.add_column(title, no_wrap=title != "REASON", overflow="fold")
        for number, job in enumerate(jobs, start=1):
            row = dict(zip(_JOB_COLUMNS, job_row(job), strict=True))
            table.add_row(str(number), *(Text(row[title]) for title in shown))
        console.print(table)
        try:
            key, *rest = console.input("> ").split() or [""]
        except EOFError:
            return 0
        if key == "q":
            return 0
        command: list[str] = []
        if key == "s" and len(rest) == 1:
            command = ["submit", "--spec", rest[0]]
        elif key in ("i", "l", "e", "d") and rest and rest[0] in map(str, range(1, len(jobs) + 1)):
            job = jobs[int(rest[0]) - 1]
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


def _failure(backend: Backends, job: JobStatus) -> KubedetError:
    """Return the error of a failed job, with the last lines of the pod that failed first."""
    from components.launchers.cluster.watch import culprit, of_job

    hints = Hints(rdma=False)
    lines: deque[str] = deque(maxlen=LAST_LINES)
    if pod := culprit(job.pods):
        with suppress(LaunchError):  # The log may be gone.
            lines.extend(backend.pod_lines(job.name, pod, follow=False, tail=LAST_LINES))
    for line in lines:
        hints.line(line)
    return of_job(job, {pod.name: lines} if pod else {}, hints)


def _backend(
    options: argparse.Namespace, *, patience: float = _PATIENCE_SECONDS, namespace: str = ""
) -> Backends:
    """Return the jobs of a namespace (a job's own wins over the option), or of a project of Run:ai."""
    # For messages about adopted or replaced jobs, and repeated requests.
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("components").setLevel(logging.INFO)
    if options.backend == "runai":
        if options.namespace is not None:
            raise ConfigError(
                "Run:ai puts a job into its project's namespace", fix="omit --namespace; use --project"
            )
        return RunaiBackend(options.project)
    if options.project:
        raise ConfigError("--project is only for Run:ai", fix="add --backend runai, or use --namespace")
    from components.launchers.cluster.backend import ClusterBackend

    return ClusterBackend.connect(
        namespace or options.namespace or "",
        kinds=[KINDS[options.backend]] if options.backend in KINDS else list(KINDS.values()),
        timings=Timings(patience=patience),
    )


def _existing(backend: Backends, name: str) -> JobStatus:
    job = backend.status(name)
    if job.phase is Phase.GONE:
        raise ConfigError(
            f"{backend.place} has no job {name!r}", fix=f"see `kubedet job list{backend.options}`"
        )
    return job


def _pod(job: JobStatus, options: argparse.Namespace) -> PodStatus:
    for pod in job.pods:
        if pod.name == options.pod or (not options.pod and pod.rank == (options.rank or 0)):
            return pod
    description = f"pod {options.pod}" if options.pod else f"pod of rank {options.rank or 0}"
    pods = ", ".join(pod.name for pod in job.pods)
    raise ConfigError(
        f"{job.name} has no {description}", fix=f"its pods: {pods}" if pods else "wait for its pods"
    )


def job_row(job: JobStatus) -> tuple[str, ...]:
    progress = f"{job.progress.percent}%" if job.progress else "-"
    pods = f"{sum(pod.phase == 'Running' for pod in job.pods)}/{job.nodes}"
    restarts = str(sum(pod.restarts for pod in job.pods))
    age, reason = _age(job.created), job.reason or "-"
    return job.name, job.kind or "-", job.phase, progress, pods, restarts, age, reason


def status_text(job: JobStatus, reasons: Sequence[str] = ()) -> str:
    """Describe one job and its pods, with the reasons of its state (default: the cluster's messages)."""
    lines = [f"{job.name}  {job.phase}"]
    if job.created:
        nodes = "1 node" if job.nodes == 1 else f"{job.nodes} nodes"
        kind = f", a {job.kind}" if job.kind else ""
        queue = f", queue {job.queue}" if job.queue else ""
        lines.append(f"created {job.created}, {_age(job.created)} ago, on {nodes}{kind}{queue}")
    if job.progress:
        seconds, metrics = job.progress.remaining_seconds, job.progress.metrics
        time_left = "" if seconds is None else f", about {time_span(seconds)} to go"
        numbers = ", ".join(f"{_METRICS.get(name, name)} {value:.4g}" for name, value in metrics.items())
        lines.append(f"{job.progress.percent}% done{time_left}{f'; {numbers}' if numbers else ''}")
    if job.pods:
        rows = [_POD_COLUMNS]
        for pod in sorted(job.pods, key=lambda pod: pod.rank):
            code = "-" if pod.exit_code is None else str(pod.exit_code)
            cells = (str(pod.rank), pod.name, pod.phase, str(pod.restarts), code)
            rows.append((*cells, pod.node or "-", pod.reason or "-"))
        lines += ["", columns(rows)]
    reasons = reasons or _messages(job)
    return "\n".join([*lines, "", *reasons] if reasons else lines)


def _messages(job: JobStatus) -> list[str]:
    """Return the cluster's messages about a job and its pods."""
    of_pods = [(pod.name, pod.message) for pod in sorted(job.pods, key=lambda pod: pod.rank)]
    repeated = any(text == job.message for _, text in of_pods)
    messages = of_pods if repeated else [(job.name, job.message), *of_pods]
    return [f"{name}: {' '.join(text.split())}" for name, text in messages if text.strip()]


def _age(created: str) -> str:
    """Return the age of a time in RFC 3339, e.g. 3m12s; "-" for no time."""
    if not created:
        return "-"
    passed = datetime.now(UTC) - datetime.fromisoformat(created)
    return time_span(max(0, int(passed.total_seconds())))


def time_span(seconds: int) -> str:
    """Write a time in its two largest units: 45s, 3m12s, 5h2m, 12d4h."""
    days, hours, minutes = seconds // 86400, seconds // 3600 % 24, seconds // 60 % 60
    units = [(days, "d"), (hours, "h"), (minutes, "m"), (seconds % 60, "s")]
    first = next((index for index, (number, _) in enumerate(units) if number), 3)
    return "".join(f"{number}{unit}" for number, unit in units[first : first + 2] if number) or "0s"
