"""What every launcher can do, and in what words it tells how a job is."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from components.launchers.spec import JobSpec


class Phase(StrEnum):
    """Where a job stands."""

    SUSPENDED = "suspended"
    """Held back by a queue, or on purpose."""
    PENDING = "pending"
    """Not all of its pods run yet."""
    RUNNING = "running"
    """All of its pods run (of an elastic job, enough of them)."""
    RESTARTING = "restarting"
    """A pod was lost and is made anew."""
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
        """Say it in a few words: `OOMKilled, exit code 137`."""
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
    """How often its container was started anew."""
    node: str = ""
    """The machine it runs on."""
    uid: str = ""
    """Its identity: a pod that is made anew has the name of the old one."""
    created: str = ""
    """When it was created, RFC 3339."""
    ended: str = ""
    """When its process ended, RFC 3339."""
    image: str = ""
    """The image of its container, or of that container which the reason is about."""
    before: Ending | None = None
    """How the container, or the pod of its name, before this one ended, where that is known."""


@dataclass(frozen=True)
class JobStatus:
    """How a job is."""

    name: str
    """Its name."""
    phase: Phase
    """Where it stands."""
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
    """Its identity: a job that is made anew has the name of the old one."""
    spec: str = ""
    """Hash of its specification."""


@dataclass(frozen=True)
class LogLine:
    """One line that a pod printed."""

    pod: str
    """The pod's name."""
    text: str
    """The line without its end."""


class Backend(Protocol):
    """A place where jobs run."""

    def submit(self, job: JobSpec) -> str:
        """Start a job, or take up the same one where it runs already; returns its name.

        Raises:
            ConfigError: this place cannot run a job of this shape.
            LaunchError: it was refused.
        """

    def status(self, name: str) -> JobStatus:
        """Tell how a job is."""

    def logs(self, name: str) -> Iterator[LogLine]:
        """Yield the lines of rank 0, and of pods that fail, as they come, until the job has ended."""

    def stop(self, name: str) -> None:
        """End a job and all it holds; one that is gone already is no error."""
