"""Jobs as aligned columns or JSON."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from components.launchers.backend import JobStatus, PodStatus
from pipelines.commands import columns
from trainer.launching.job_status import AP, LOSS, SPEED, Progress

JOBS = ("NAME", "KIND", "PHASE", "DONE", "PODS", "RESTARTS", "AGE", "REASON")
"""Heads of a job's columns."""

_METRICS = {LOSS: "loss", SPEED: "images/s", AP: "AP"}

_POD_HEADS = ("RANK", "POD", "PHASE", "RESTARTS", "EXIT", "NODE", "REASON")


def jobs(statuses: Iterable[JobStatus], now: datetime | None = None) -> str:
    """Return a table of jobs, the newest first; `now` is for tests."""
    return columns([JOBS, *(row(job, now) for job in newest(statuses))])


def newest(statuses: Iterable[JobStatus]) -> list[JobStatus]:
    """Return jobs, the newest first."""
    return sorted(statuses, key=lambda job: job.created, reverse=True)


def row(job: JobStatus, now: datetime | None = None) -> tuple[str, ...]:
    """Return a job as cells below JOBS."""
    running = sum(pod.phase == "Running" for pod in job.pods)
    restarts = sum(pod.restarts for pod in job.pods)
    return (
        job.name,
        job.kind or "-",
        job.phase,
        f"{job.progress.percent}%" if job.progress else "-",
        f"{running}/{job.nodes}",
        str(restarts),
        age(job.created, now),
        job.reason or "-",
    )


def status(job: JobStatus, reasons: Sequence[str] = (), now: datetime | None = None) -> str:
    """Describe one job and its pods, with the reasons of its state (default: the cluster's messages)."""
    lines = [f"{job.name}  {job.phase}"]
    if job.created:
        nodes = "1 node" if job.nodes == 1 else f"{job.nodes} nodes"
        kind = f", a {job.kind}" if job.kind else ""
        queue = f", queue {job.queue}" if job.queue else ""
        lines.append(f"created {job.created}, {age(job.created, now)} ago, on {nodes}{kind}{queue}")
    if job.progress:
        lines.append(_progress(job.progress))
    if job.pods:
        lines += ["", columns([_POD_HEADS, *map(_pod_row, sorted(job.pods, key=lambda pod: pod.rank))])]
    reasons = reasons or why(job)
    return "\n".join([*lines, "", *reasons] if reasons else lines)


def _progress(training: Progress) -> str:
    """Return e.g. `43% done, about 12m5s to go; loss 0.532, images/s 41, AP 0.312`."""
    seconds = training.remaining_seconds
    time_left = "" if seconds is None else f", about {_span(seconds)} to go"
    numbers = ", ".join(f"{_METRICS.get(name, name)} {value:.4g}" for name, value in training.metrics.items())
    return f"{training.percent}% done{time_left}{f'; {numbers}' if numbers else ''}"


def why(job: JobStatus) -> list[str]:
    """Return the cluster's messages about a job and its pods."""
    of_pods = [(pod.name, pod.message) for pod in sorted(job.pods, key=lambda pod: pod.rank)]
    repeated = any(text == job.message for _, text in of_pods)
    messages = of_pods if repeated else [(job.name, job.message), *of_pods]
    return [f"{name}: {' '.join(text.split())}" for name, text in messages if text.strip()]


def age(created: str, now: datetime | None = None) -> str:
    """Return the age of a time in RFC 3339, e.g. 3m12s; "-" for no time."""
    if not created:
        return "-"
    passed = (now or datetime.now(UTC)) - datetime.fromisoformat(created)
    return _span(max(0, int(passed.total_seconds())))


def _span(seconds: int) -> str:
    """Write a time in its two largest units: 45s, 3m12s, 5h2m, 12d4h."""
    days, hours, minutes = seconds // 86400, seconds // 3600 % 24, seconds // 60 % 60
    units = [(days, "d"), (hours, "h"), (minutes, "m"), (seconds % 60, "s")]
    first = next((index for index, (number, _) in enumerate(units) if number), 3)
    return "".join(f"{number}{unit}" for number, unit in units[first : first + 2] if number) or "0s"


def _pod_row(pod: PodStatus) -> tuple[str, ...]:
    code = "-" if pod.exit_code is None else str(pod.exit_code)
    return (str(pod.rank), pod.name, pod.phase, str(pod.restarts), code, pod.node or "-", pod.reason or "-")
