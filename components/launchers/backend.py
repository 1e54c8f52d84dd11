"""Interface of the backends that run jobs, and the values that describe a job's status."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from components.launchers.spec import JobSpec
from components.launchers.timings import Timings

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
"""Is told every status of a job while somebody waits for its end."""


def ignore(status: JobStatus) -> None:
    """Look away."""


@dataclass(frozen=True)
class LogLine:
    """One line that a pod printed."""

    pod: str
    """The pod's name."""
    text: str
    """The line without its end."""


class Backend(Protocol):
    """A place where jobs run: everything that the watcher, the launchers and the commands call.

    Methods with a body are defaults for backends without that feature.
    """

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

        The lines are those of rank 0 (of every pod of an elastic job), and the last ones of pods that fail. A
        server that does not answer for a while is waited for. With `once` it looks once, and reads what the
        logs hold now.

        Raises:
            LaunchError: there is no answer for longer than Timings.outage.
        """
        ...

    def pod_lines(self, name: str, pod: PodStatus, *, follow: bool, tail: int = 0) -> Iterator[str]:
        """Yield the lines of one pod of a job; of those that exist already only the last `tail`, or all (0).

        Raises:
            LaunchError: the log cannot be read.
        """
        ...

    def execute(self, name: str, pod: PodStatus, arguments: list[str]) -> int:
        """Run a command in a pod with this process's output, and its terminal; returns the exit code."""
        ...

    def stop(self, name: str, *, wait: bool = True) -> None:
        """Delete a job of kubedet's and its pods, and wait until all is gone; a job that is gone is no error.

        Raises:
            LaunchError: somebody else made it, or it is not gone after Timings.removal.
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
        """Delete a job that was submitted here; one that another launcher made since is left alone."""
        self.stop(name, wait=wait)

    def abandon(self, name: str) -> None:
        """Delete a job that this process submitted, by one request: this process is about to be killed."""
        self.stop(name, wait=False)

    def ends_with_the_run(self) -> bool:
        """Whether a job ends too where this process is asked to end; else the next attempt takes it up."""
        return True

    def with_progress(self, status: JobStatus) -> JobStatus:
        """Return a job's status with its progress, if the job or its log reports it."""
        return status

    def explain(self, status: JobStatus) -> list[str]:
        """Explain why the pods of a job do not run."""
        return []
