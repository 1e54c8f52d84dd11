"""Runs a job of Run:ai to its end: prints its log and phases, enforces its limits, reports its failure."""

import threading
import time
from collections.abc import Callable

from components.launchers.backend import JobStatus, Phase, PodStatus
from components.launchers.cluster.job_failure import culprit, of_job
from components.launchers.cluster.log_hints import Hints
from components.launchers.interrupts import StopRequest, not_deleted, raising_on_signals, stopped
from components.launchers.last_lines import LAST_LINES
from components.launchers.runai.backend import RunaiBackend
from components.launchers.spec import JobSpec
from trainer.errors import KubedetError, LaunchError

Out = Callable[[str], None]


def run(backend: RunaiBackend, job: JobSpec, out: Out) -> None:
    """Run a job to its end, or take up the same one where it runs already.

    At SIGTERM or SIGINT the job is deleted.

    Args:
        backend: the project.
        job: what to run; its start_timeout and deadline are kept here.
        out: takes each line.

    Raises:
        ConfigError: Run:ai cannot run it.
        LaunchError: it failed, or went past a limit and is deleted.
        Interrupted: this process was asked to end, and the job is deleted.
    """
    with raising_on_signals():
        try:
            backend.submit(job)
            limits = _Limits(backend, job, out)
            limits.start()
            try:
                for line in backend.logs(job.name):
                    out(f"[{line.pod}] {line.text}")
            finally:
                limits.stop()
            if limits.broken:
                raise limits.broken
            status = backend.status(job.name)
            out(f"job {job.name}: {status.phase}")
            if status.phase is not Phase.SUCCEEDED:
                raise failure(backend, status)
        except StopRequest as request:
            try:
                backend.stop(job.name, wait=False)
            except KubedetError as error:
                stop = f"kubedet job stop --backend runai {job.name}"
                raise not_deleted(request, job.name, error, stop=stop) from None
            out(f"job {job.name}: deleted on {request.signal}")
            raise stopped() from None


def failure(backend: RunaiBackend, status: JobStatus) -> KubedetError:
    """Make the error of a failed job, with the last lines of the pod that caused it."""
    pod = culprit(status.pods)
    if pod is None and status.phase is Phase.FAILED and not status.pods:
        pod = PodStatus(status.name, "Failed", 0, reason=status.reason, message=status.message)
    name = "" if pod is None or pod.name == status.name else pod.name
    lines = backend.tail(status.name, name, LAST_LINES) if pod else []
    hints = Hints(rdma=False)
    for line in lines:
        hints.line(line)
    shown = status if pod is None else JobStatus(status.name, status.phase, pods=(pod,))
    return of_job(shown, {pod.name: lines} if pod else {}, hints)


class _Limits(threading.Thread):
    """Prints the phases of a job, and deletes one that does not start or takes too long."""

    def __init__(self, backend: RunaiBackend, job: JobSpec, out: Out) -> None:
        super().__init__(daemon=True)
        self._backend, self._job, self._out = backend, job, out
        self._ended = threading.Event()
        self.broken: LaunchError | None = None
        """The limit for which the job was deleted."""

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        self.join()

    def run(self) -> None:
        """Poll the job until it has ended; failed requests are repeated."""
        begun = waiting = time.monotonic()
        before: Phase | None = None
        while not self._ended.is_set():
            try:
                status = self._backend.status(self._job.name)
            except KubedetError:
                self._ended.wait(self._backend.timings.poll)
                continue
            if status.phase.final:
                return
            now = time.monotonic()
            if status.phase is not before:
                why = ": ".join(filter(None, [status.reason, status.message]))
                self._out(f"job {self._job.name}: {status.phase}{f' ({why})' if why else ''}")
                before = status.phase
            if status.phase not in (Phase.PENDING, Phase.RESTARTING):
                waiting = now
            if now - waiting > self._job.start_timeout:
                return self._give_up(f"does not run after {self._job.start_timeout} s: {status.message}")
            if self._job.deadline and now - begun > self._job.deadline:
                return self._give_up(f"was stopped at its deadline of {self._job.deadline} s")
            self._ended.wait(self._backend.timings.poll)

    def _give_up(self, why: str) -> None:
        self.broken = LaunchError(
            f"the job {self._job.name} {why}",
            fix="run the same again: it goes on from its last checkpoint; or set the limit higher",
        )
        try:
            self._backend.stop(self._job.name)
        except KubedetError as error:
            self.broken.message += f"\n  and could not be deleted: {error.message}"
