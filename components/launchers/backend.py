"""The interface of the backends that run jobs, and the classes for a job's status."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from components.launchers.spec import JobSpec
from trainer.base.clock import CLOCK, Clock
from trainer.launching.job_status import TrainingProgress


class Phase(StrEnum):
    """Phase of a job."""

    SUSPENDED = "suspended"  # By a queue or a user.
    PENDING = "pending"  # Not all of its pods run yet.
    RUNNING = "running"  # All of its pods run; of an elastic job, enough of them.
    RESTARTING = "restarting"  # A pod was lost and is being replaced.
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    GONE = "gone"  # The job does not exist.

    @property
    def final(self) -> bool:
        """Whether the phase is final."""
        return self in (Phase.SUCCEEDED, Phase.FAILED, Phase.GONE)


@dataclass(frozen=True)
class Ending:
    """The end of a container or pod: reason (OOMKilled, StartError, Evicted, ...), message, exit code."""

    reason: str = ""
    message: str = ""
    exit_code: int | None = None

    def __str__(self) -> str:
        """Return it as text: `OOMKilled, exit code 137`."""
        code = "" if self.exit_code is None else f"exit code {self.exit_code}"
        return ", ".join(filter(None, ["" if self.reason == "Error" else self.reason, code]))


@dataclass(frozen=True)
class PodStatus:
    """One pod of a job. Times are RFC 3339."""

    name: str
    phase: str  # Pending, Running, Succeeded, Failed or Unknown.
    rank: int  # Index of the node, from 0.
    reason: str = ""  # Why it waits or failed: ImagePullBackOff, Evicted, OOMKilled, ...
    message: str = ""
    exit_code: int | None = None
    restarts: int = 0  # Known restarts of its container and replacements of its pod.
    attempt: int = 0  # Number of replacements according to its controller.
    node: str = ""
    uid: str = ""
    created: str = ""
    ended: str = ""
    image: str = ""  # Image of its container, or of the container that caused the reason.
    container: str = ""  # Name of the container that trains.
    before: Ending | None = None  # How the previous container, or the previous pod with this rank, ended.
    leaving: bool = False  # Whether it was deleted and is in its grace period.

    @property
    def is_healthy(self) -> bool:
        """Whether the pod runs or has succeeded, and is not being deleted."""
        return self.phase in ("Running", "Succeeded") and not self.leaving


@dataclass(frozen=True)
class JobStatus:
    """Status of a job."""

    name: str
    phase: Phase
    reason: str = ""
    message: str = ""
    pods: tuple[PodStatus, ...] = ()  # By rank.
    created: str = ""  # RFC 3339.
    nodes: int = 1
    elastic: bool = False
    uid: str = ""
    spec: str = ""  # Hash of its specification.
    kind: str = ""  # PyTorchJob, TrainJob; empty outside of a cluster.
    queue: str = ""  # Kueue's queue that admits it.
    workflow: str = ""  # Name of the Workflow of the job's run.
    orphaned: bool = False  # Whether the job continues after its run has ended.
    progress: TrainingProgress | None = None


class LogLine(NamedTuple):
    """One line that a pod printed."""

    pod: str
    text: str


@dataclass(frozen=True)
class Timings:
    """Time limits and intervals, all in seconds."""

    connect: float = 5.0  # Time limit to connect to the API server.
    read: float = 30.0  # Time limit for its response to a request.
    patience: float = 45.0  # How long a request with a temporary failure is retried.
    outage: float = 1800.0  # How long the API server may be unavailable while a job is watched.
    backoff: float = 0.5  # First wait after a failure; it doubles after each further failure.
    longest_backoff: float = 15.0
    poll: float = 3.0  # Interval between two reads of a job's status.
    heartbeat: float = 60.0  # Time without output after which a status line is printed.
    quiet: float = 60.0  # Time without data after which a log stream is reopened, because it may be dead.
    drain: float = 60.0  # Time limit for the last lines of a job that has ended.
    removal: float = 300.0  # Time limit until a deleted job and its pods are gone.
    stop: float = 20.0  # Time limit for the deletion of a job after a stop signal.
    late: float = 3.0  # Time within which an aborted creation may still succeed.
    unserved: float = 60.0  # Time within which Kueue should create the Workload of a queued job.
    replaced: float = 10.0  # Time within which another job of the same name may appear after ours is gone.
    submit: float = 180.0  # Time limit for a submission with Run:ai's program.

    def retry_delays(self) -> Iterator[float]:
        """Yield the delay after each failure: it doubles each time, with jitter."""
        wait = self.backoff
        while True:
            yield wait * random.uniform(0.5, 1.0)
            wait = min(2 * wait, self.longest_backoff)


class Backend(Protocol):
    """A namespace of a cluster or a project of Run:ai, which runs jobs. Methods with a body are defaults."""

    timings: Timings
    clock: Clock = CLOCK

    @property
    def options(self) -> str:
        """Options of `kubedet job` that select this backend, for messages."""
        ...

    def submit(self, job: JobSpec) -> str:
        """Start a job, or adopt the same job if it is already running; return its hash if known."""
        ...

    def status(self, name: str) -> JobStatus:
        """Return a job's status."""
        ...

    def follow(self, name: str, *, once: bool = False) -> Iterator[LogLine | JobStatus]:
        """Yield a job's log lines and, every few seconds, its status, until it has ended.

        Yields all lines of rank 0 (in an elastic job: of all pods), and the last lines of failed pods. With
        `once`, it reads status and logs only once. Raises LaunchError after Timings.outage without response.
        """
        ...

    def stop(self, name: str, *, wait: bool = True) -> None:
        """Delete a job and its pods, and wait until all are gone; a missing job is no error."""
        ...

    def withdraw(self, name: str, *, wait: bool = True) -> None:
        """Delete the job that this process submitted, but no other job of the same name."""
        self.stop(name, wait=wait)

    def deletes_job_on_stop(self) -> bool:
        """Whether to delete the job if this process is stopped; otherwise, the next attempt adopts it."""
        return True

    def logs(self, name: str, *, follow: bool = True) -> Iterator[LogLine]:
        """Yield a job's log lines until it has ended; without `follow`, only the existing lines."""
        events = self.follow(name, once=not follow)
        return (event for event in events if isinstance(event, LogLine))

    def with_progress(self, status: JobStatus) -> JobStatus:
        """Return a job's status with the progress that its log reports, if any."""
        return status

    def explain(self, status: JobStatus) -> list[str]:
        """Explain why the pods of a job do not run."""
        return []
