"""Output of `kubedet job`, `doctor` and `cluster`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from kubedet.display import format_columns, print_json, print_safe
from trainer.base.errors import EXIT_FAILURE, ConfigError

if TYPE_CHECKING:
    from components.launchers.backend import JobStatus
    from pipelines.jobs import StatusExplanation, SubmittedJob
    from trainer.launching.machine_checks import Check

JOB_COLUMNS = ("NAME", "KIND", "PHASE", "DONE", "PODS", "RESTARTS", "AGE", "REASON")
_POD_COLUMNS = ("RANK", "POD", "PHASE", "RESTARTS", "EXIT", "NODE", "REASON")


def show_submitted(job: "SubmittedJob") -> None:
    """Print what to do next, unless the job has ended."""
    if not job.ended:
        print(job.next_steps)


def show_text(text: str) -> None:
    """Print a text that ends with a newline."""
    print(text, end="")


def show_jobs(jobs: "Sequence[JobStatus] | str", arguments: Mapping[str, Any], *, json: bool = False) -> None:
    """Print a table of jobs."""
    if isinstance(jobs, str):
        if json:
            raise ConfigError("--json does not work with Run:ai", fix="use `runai training list --json`")
        print(jobs, end="")
    elif json:
        print_json(jobs)
    elif jobs:
        print(format_columns([JOB_COLUMNS, *map(job_row, jobs)]))
    else:
        print(f"no jobs of kubedet in namespace {arguments['target'].namespace or 'of KUBECONFIG'}")


def job_row(job: "JobStatus") -> tuple[str, ...]:
    """Return the cells of a job's row."""
    progress = f"{job.progress.percent}%" if job.progress else "-"
    pods = f"{sum(pod.phase == 'Running' for pod in job.pods)}/{job.nodes}"
    restarts = str(sum(pod.restarts for pod in job.pods))
    return (
        job.name,
        job.kind or "-",
        job.phase,
        progress,
        pods,
        restarts,
        format_age(job.created),
        job.reason or "-",
    )


def show_status(status: "StatusExplanation", *, json: bool = False) -> None:
    """Print the state of a job and its pods."""
    if json:
        print_json(status.job)
    else:
        print_safe(format_status(status.job, status.reasons))


def format_status(job: "JobStatus", reasons: Sequence[str]) -> str:
    """Describe a job and its pods, with the reasons for its state."""
    from trainer.launching.job_status import AP, LOSS, SPEED

    titles = {LOSS: "loss", SPEED: "images/s", AP: "AP"}
    lines = [f"{job.name}  {job.phase}"]
    if job.created:
        nodes = "1 node" if job.nodes == 1 else f"{job.nodes} nodes"
        kind = f", a {job.kind}" if job.kind else ""
        queue = f", queue {job.queue}" if job.queue else ""
        lines.append(f"created {job.created}, {format_age(job.created)} ago, on {nodes}{kind}{queue}")
    if job.progress:
        seconds, metrics = job.progress.remaining_seconds, job.progress.metrics
        time_left = "" if seconds is None else f", about {format_time_span(seconds)} to go"
        numbers = ", ".join(f"{titles.get(name, name)} {value:.4g}" for name, value in metrics.items())
        lines.append(f"{job.progress.percent}% done{time_left}{f'; {numbers}' if numbers else ''}")
    if job.pods:
        rows = [_POD_COLUMNS]
        for pod in sorted(job.pods, key=lambda pod: pod.rank):
            code = "-" if pod.exit_code is None else str(pod.exit_code)
            cells = (str(pod.rank), pod.name, pod.phase, str(pod.restarts), code)
            rows.append((*cells, pod.node or "-", pod.reason or "-"))
        lines += ["", format_columns(rows)]
    return "\n".join([*lines, "", *reasons] if reasons else lines)


def format_age(created: str) -> str:
    """Return the time since an RFC 3339 timestamp, e.g. 3m12s; "-" for no time."""
    if not created:
        return "-"
    passed = datetime.now(UTC) - datetime.fromisoformat(created)
    return format_time_span(max(0, int(passed.total_seconds())))


def format_time_span(seconds: int) -> str:
    """Format a duration in its two largest units: 45s, 3m12s, 5h2m, 12d4h."""
    days, hours, minutes = seconds // 86400, seconds // 3600 % 24, seconds // 60 % 60
    units = [(days, "d"), (hours, "h"), (minutes, "m"), (seconds % 60, "s")]
    first = next((index for index, (number, _) in enumerate(units) if number), 3)
    return "".join(f"{number}{unit}" for number, unit in units[first : first + 2] if number) or "0s"


def show_lines(lines: Iterator[str]) -> None:
    """Print the lines of a log as they arrive."""
    for line in lines:
        print(line, flush=True)


def show_checks(checks: "Iterable[Check]") -> int:
    """Print each check as it finishes; return 1 if something is missing."""
    from trainer.launching import machine_checks

    missing = sum(check.state == "missing" for check in machine_checks.print_results(checks))
    print(f"\n{missing} missing" if missing else "\nall requirements of a run are met")
    return EXIT_FAILURE if missing else 0
