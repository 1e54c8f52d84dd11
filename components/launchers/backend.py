"""Interface of the backends that run jobs, and the values that describe a job's status."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from components.launchers.spec import JobSpec

if TYPE_CHECKING:
    from trainer.launching.job_status import Progress


class Phase(StrEnum):
    """Phase of a job."""

    SUSPENDED = "suspended"
    """Held back by a queue, or on purpose."""
    PENDING = "pending"
    """Not all of its pods run yet."""
    RUNNING = "running"
    """All of its pods run (of an elastic job, enough of them)."""
    RESTARTING = "restarting"
    """A pod was lost and is being replaced."""
    SUCCEEDED = "succeeded"
    """It ended well."""
    FAILED = "failed"
    """It ended otherwise."""
    GONE = "gone"
    """There is no such job (any more)."""

    @property
    def final(self) -> bool:
        """Whether it will not change by itself."""
        return self in (Phase.SUCCEEDED, Phase.FAILED, Phase.GONE)


@dataclass(frozen=True)
class Ending:
    """How a container or a pod ended."""

    reason: str = ""
    """OOMKilled, StartError, Evicted, Error, ..."""
    message: str = ""
    """The cluster's own words on it."""
    exit_code: int | None = None
    """What its process ended with, if it ended by itself."""

    def __str__(self) -> str:
        """Return it as text: `OOMKilled, exit code 137`."""
        code = "" if self.exit_code is None else f"exit code {self.exit_code}"
        return ", ".join(filter(None, ["" if self.reason == "Error" else self.reason, code]))


@dataclass(frozen=True)
class PodStatus:
    """One pod of a job, or the one process of a local job."""

    name: str
    """Its name."""
    phase: str
    """Pending, Running, Succeeded, Failed or Unknown."""
    rank: int
    """Number of the node, from 0."""
    reason: str = ""
    """Why it waits or failed: ImagePullBackOff, Evicted, OOMKilled, ..."""
    message: str = ""
    """The cluster's own words on it."""
    exit_code: int | None = None
    """What its process ended with, if it ended."""
    restarts: int = 0
    """Restarts of its container and replacements of its pod, where they are known."""
    attempt: int = 0
    """The replacements that its controller counts."""
    node: str = ""
    """The machine it runs on."""
    uid: str = ""
    """Its uid: a pod that replaces another may have the same name."""
    created: str = ""
    """When it was created, RFC 3339."""
    ended: str = ""
    """When its process ended, RFC 3339."""
    image: str = ""
    """The image of its container, or of that container which the reason is about."""
    image_id: str = ""
    """What the container that trains runs, with its digest; "" until the cluster says so."""
    container: str = ""
    """The container that trains; a pod may have others."""
    before: Ending | None = None
    """How the previous container, or the previous pod of its rank, ended, where that is known."""
    leaving: bool = False
    """Whether it is terminating: deleted, within its grace period."""

    @property
    def counts(self) -> bool:
        """Whether it counts as one of the pods that must run for the job to run; a succeeded one does."""
        return self.phase in ("Running", "Succeeded") and not self.leaving


@dataclass(frozen=True)
class JobStatus:
    """Status of a job."""

    name: str
    """Its name."""
    phase: Phase
    """Its phase."""
    reason: str = ""
    """One word on why."""
    message: str = ""
    """A sentence on why."""
    pods: tuple[PodStatus, ...] = ()
    """Its pods, by rank."""
    created: str = ""
    """When it was created, RFC 3339."""
    nodes: int = 1
    """Nodes that were asked for."""
    elastic: bool = False
    """Whether nodes may come and go, and any of them be rank 0."""
    uid: str = ""
    """Its uid: a job that replaces another has the same name."""
    spec: str = ""
    """Hash of its specification."""
    kind: str = ""
    """What the cluster calls it: PyTorchJob, TrainJob; empty outside of a cluster."""
    queue: str = ""
    """Kueue's queue that admits it; empty is none."""
    workflow: str = ""
    """The Workflow of the run that it belongs to; empty is none."""
    orphaned: bool = False
    """Whether it has not ended although its run has."""
    progress: "Progress | None" = None
    """Progress of the training, where it is known."""


Look = Callable[[JobStatus], None]
"""Called with every status of a watched job."""


def ignore(status: JobStatus) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class LogLine:
    """One line that a pod printed."""

    pod: str
    """The pod's name."""
    text: str
    """The line without its end."""


@dataclass(frozen=True)
class Timings:
    """Time limits and intervals, all in seconds."""

    connect: float = 5.0
    """Until the API server takes a connection."""
    read: float = 30.0
    """Until it answers a request."""
    patience: float = 45.0
    """Until a request that fails for a passing reason is given up."""
    outage: float = 1800.0
    """How long the API server may be away while a job is watched."""
    backoff: float = 0.5
    """First wait after a failure; each further one is twice as long."""
    longest_backoff: float = 15.0
    """Longest wait after a failure."""
    poll: float = 3.0
    """Between two polls of a job's status."""
    heartbeat: float = 60.0
    """Silence after which a status line is printed."""
    quiet: float = 60.0
    """Seconds of silence after which the log stream is reopened, because it may be dead."""
    drain: float = 60.0
    """For the last lines of a job that has ended."""
    removal: float = 300.0
    """Until a deleted job and its pods are gone."""
    stop: float = 20.0
    """For the deletion of a job when this process is asked to end."""
    lasting: float = 120.0
    """How long a pod may wait for a reason that a person may still fix, e.g. a missing Secret."""
    unserved: float = 60.0
    """Until Kueue has created the Workload of a job in one of its queues."""
    place: float = 60.0
    """Between two lines on a job's position in its queue."""
    replaced: float = 10.0
    """For another job of the same name to appear, when ours is gone."""
    glance: float = 1.0
    """For a response after a stop signal, when this process may have a second left."""
    submit: float = 180.0
    """For a submission through another program."""
    late: float = 3.0
    """How late an aborted request may still take effect."""

    def waits(self) -> Iterator[float]:
        """Yield the wait after each failure: twice as long each time, with jitter."""
        wait = self.backoff
        while True:
            yield wait * random.uniform(0.5, 1.0)
            wait = min(2 * wait, self.longest_backoff)


class Backend(Protocol):
    """A place where jobs run. Methods with a body are defaults."""

    timings: Timings
    """How long things may take."""

    @property
    def place(self) -> str:
        """Where the jobs are, for messages."""
        ...

    @property
    def options(self) -> str:
        """Options of `kubedet job` that choose this place, for messages."""
        ...

    def submit(self, job: JobSpec) -> str:
        """Start a job, or adopt the same one if it runs already; returns its name.

        Raises:
            ConfigError: this place cannot run a job of this shape.
            LaunchError: it was refused.
        """
        ...

    def status(self, name: str) -> JobStatus:
        """Return a job's status.

        Raises:
            LaunchError: there is no answer.
        """
        ...

    def follow(self, name: str, *, once: bool = False) -> Iterator[LogLine | JobStatus]:
        """Yield a job's lines as they come and, every few seconds, its status, until it has ended.

        The lines are those of rank 0 (of every pod of an elastic job), and the last ones of failed pods. A
        server that does not answer is waited for. With `once` it reads status and logs once.

        Raises:
            LaunchError: there is no answer for longer than Timings.outage.
        """
        ...

    def pod_lines(self, name: str, pod: PodStatus, *, follow: bool, tail: int = 0) -> Iterator[str]:
        """Yield the lines of one pod of a job; of existing ones only the last `tail`, or all (0).

        Raises:
            LaunchError: the log cannot be read.
        """
        ...

    def execute(self, name: str, pod: PodStatus, arguments: list[str]) -> int:
        """Run a command in a pod with this process's output and terminal; returns the exit code."""
        ...

    def stop(self, name: str, *, wait: bool = True) -> None:
        """Delete a job of kubedet's and its pods, and wait until all are gone; a missing job is no error.

        Raises:
            LaunchError: somebody else created it, or it is not gone after Timings.removal.
        """
        ...

    def logs(self, name: str, *, follow: bool = True) -> Iterator[LogLine]:
        """Yield the lines of `follow`: until the job has ended, or only those that exist now."""
        events = self.follow(name, once=not follow)
        return (event for event in events if isinstance(event, LogLine))

    def within(self, namespace: str) -> "Backend":
        """Return the backend of that namespace; empty is this one."""
        return self

    def submitted(self, name: str) -> tuple[str, str]:
        """Return the specification's hash and the uid of a job that was submitted here; empty if unknown."""
        return "", ""

    def withdraw(self, name: str, *, wait: bool = True) -> None:
        """Delete a job that was submitted here; one that another launcher created since is left alone."""
        self.stop(name, wait=wait)

    def abandon(self, name: str) -> None:
        """Delete a job that this process submitted, by one request: there may be no time for more."""
        self.stop(name, wait=False)

    def ends_with_the_run(self) -> bool:
        """Whether a job ends, too, if this process is asked to end; else the next attempt adopts it."""
        return True

    def with_progress(self, status: JobStatus) -> JobStatus:
        """Return a job's status with its progress, if the job or its log reports it."""
        return status

    def explain(self, status: JobStatus) -> list[str]:
        """Explain why the pods of a job do not run."""
        return []
