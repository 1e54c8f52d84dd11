"""The commands on training jobs in a cluster: submit, list, find, watch, explain."""

import logging
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from components.launchers import obstacles
from components.launchers.backend import JobStatus, Phase, PodStatus, Timings
from components.launchers.cluster.kinds import KINDS
from components.launchers.output import LAST_LINES, Hints
from components.launchers.runai import RunaiBackend
from components.launchers.spec import JobSpec
from pipelines import JobTarget
from trainer.base import events
from trainer.base.errors import ConfigError, KubedetError, LaunchError

if TYPE_CHECKING:
    from components.launchers.cluster.backend import ClusterBackend

AnyBackend: TypeAlias = "ClusterBackend | RunaiBackend"

_PATIENCE_SECONDS = 15.0  # Time limit for an API server that does not respond.


@dataclass(frozen=True)
class SubmittedJob:
    """A job that was started or adopted."""

    name: str
    next_steps: str  # Commands that show it.
    ended: bool = False


@dataclass(frozen=True)
class StatusExplanation:
    """The status of a job, with its reasons and their remedies."""

    job: JobStatus
    reasons: Sequence[str] = ()


def connect(target: JobTarget, *, patience: float = _PATIENCE_SECONDS, namespace: str = "") -> AnyBackend:
    """Return the backend of the target; a job's `namespace` takes precedence over the target's."""
    # Show messages about adopted or replaced jobs, and about repeated requests.
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("components").setLevel(logging.INFO)
    if target.backend == "runai":
        if target.namespace:
            raise ConfigError(
                "Run:ai puts a job into its project's namespace", fix="omit --namespace; use --project"
            )
        return RunaiBackend(target.project)
    if target.project:
        raise ConfigError("--project is only for Run:ai", fix="add --backend runai, or use --namespace")
    from components.launchers.cluster.backend import ClusterBackend

    return ClusterBackend.connect(
        namespace or target.namespace,
        kinds=[KINDS[target.backend]] if target.backend in KINDS else list(KINDS.values()),
        timings=Timings(patience=patience),
    )


def submit(target: JobTarget, job: JobSpec, *, wait: bool) -> SubmittedJob:
    """Start a job, or adopt the same one; with `wait` print its log until it has ended."""
    if target.namespace:
        job = replace(job, namespace=target.namespace)
    if target.project:
        job = replace(job, runai_queue=target.project)
    backend = connect(target, patience=Timings.patience, namespace=job.namespace)
    words, name = backend.options, job.name
    if wait:
        from components.launchers.cluster import watch

        try:
            watch.run(backend, job)
        except BrokenPipeError:
            print(f"the job continues: kubedet job logs{words} -f {name}", file=sys.stderr)
            raise
        return SubmittedJob(name, "", ended=True)
    status = f"kubedet job status{words} {name}"
    try:
        backend.submit(job)
    except KeyboardInterrupt:
        print(f"the job {name} may have been created: see `{status}`", file=sys.stderr)
        raise
    return SubmittedJob(name, f"see `{status}` and `kubedet job logs{words} -f {name}`")


def list_jobs(target: JobTarget) -> list[JobStatus] | str:
    """Return the jobs of a namespace, or the list that Run:ai's command line prints."""
    backend = connect(target)
    if isinstance(backend, RunaiBackend):
        return backend.list_as_text()
    return [backend.with_progress(job) for job in backend.list_jobs()]


def read_log(target: JobTarget, name: str, *, follow: bool, rank: int | None, pod: str) -> Iterator[str]:
    """Return the lines of a job's log, or of one of its pods, without the machine-readable events."""
    backend = connect(target)
    job = find_job(backend, name)
    if pod or rank is not None:
        lines = backend.pod_lines(job.name, find_pod(job, rank, pod), follow=follow)
        return (line for line in lines if not events.parse(line))
    log = backend.logs(name, follow=follow)
    return (f"{line.pod}: {line.text}" for line in log if not events.parse(line.text))


def execute(target: JobTarget, name: str, command: Sequence[str], *, rank: int | None, pod: str) -> int:
    """Run a command in a pod of a job, on this terminal, and return its exit code."""
    backend = connect(target)
    status = find_pod(find_job(backend, name), rank, pod)
    if status.phase != "Running":
        reason = f" ({status.reason})" if status.reason else ""
        raise LaunchError(
            f"{status.name} is {status.phase}{reason}: no command can run in it", fix="choose a running pod"
        )
    return backend.execute(name, status, list(command))


def find_job(backend: AnyBackend, name: str) -> JobStatus:
    """Return the status of a job, which must exist."""
    job = backend.status(name)
    if job.phase is Phase.GONE:
        raise ConfigError(
            f"{backend.place} has no job {name!r}", fix=f"see `kubedet job list{backend.options}`"
        )
    return job


def find_pod(job: JobStatus, rank: int | None, name: str) -> PodStatus:
    """Return the pod of a job with this name, or else with this rank (default: 0)."""
    for pod in job.pods:
        if pod.name == name or (not name and pod.rank == (rank or 0)):
            return pod
    description = f"pod {name}" if name else f"pod of rank {rank or 0}"
    pods = ", ".join(pod.name for pod in job.pods)
    raise ConfigError(
        f"{job.name} has no {description}", fix=f"use one of these: {pods}" if pods else "wait for its pods"
    )


def explain_status(backend: AnyBackend, name: str) -> StatusExplanation:
    """Return the status of a job with its reasons."""
    from components.launchers.cluster import kueue

    job = backend.with_progress(find_job(backend, name))
    reasons: list[str] = []
    if job.phase is Phase.PENDING:
        fixes = dict.fromkeys(f"fix: {item.fix}" for item in obstacles.find_obstacles(job) if item.fix)
        reasons = [*backend.explain(job), *fixes]
    elif job.phase is Phase.SUSPENDED and kueue.is_never_admitted(
        job, backend.timings.unserved, backend.clock.now()
    ):
        reasons = [*cluster_messages(job), *backend.explain(job), f"fix: {kueue.find_remedy(job)}"]
    elif job.phase is Phase.FAILED:
        reasons = str(failure_error(backend, job)).splitlines()
    return StatusExplanation(job, reasons or cluster_messages(job))


def cluster_messages(job: JobStatus) -> list[str]:
    """Return the cluster's messages about a job and its pods."""
    of_pods = [(pod.name, pod.message) for pod in sorted(job.pods, key=lambda pod: pod.rank)]
    repeated = any(text == job.message for _, text in of_pods)
    named = of_pods if repeated else [(job.name, job.message), *of_pods]
    return [f"{name}: {' '.join(text.split())}" for name, text in named if text.strip()]


def failure_error(backend: AnyBackend, job: JobStatus) -> KubedetError:
    """Return the error of a failed job, with the last lines of the pod that failed first."""
    from components.launchers.cluster.watch import first_failed_pod, job_error

    hints = Hints(rdma=False)
    lines: deque[str] = deque(maxlen=LAST_LINES)
    if pod := first_failed_pod(job.pods):
        with suppress(LaunchError):  # The log may be gone.
            lines.extend(backend.pod_lines(job.name, pod, follow=False, tail=LAST_LINES))
    for line in lines:
        hints.find_new(line)
    return job_error(job, {pod.name: lines} if pod else {}, hints)
