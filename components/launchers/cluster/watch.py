"""Runs a job to its end: prints its log and phases, enforces its limits, reports its failure."""

import time
from collections import deque
from datetime import UTC, datetime
from typing import NoReturn

from components.launchers.backend import Backend, JobStatus, LogLine, Look, Phase, PodStatus, ignore
from components.launchers.cluster.api_errors import ApiError
from components.launchers.cluster.job_failure import (
    cannot_start,
    ending,
    last_lines,
    of_job,
    out_of_memory,
    replaced,
)
from components.launchers.cluster.kueue_setup import remedy as remedy_in_queue
from components.launchers.cluster.log_hints import Hints
from components.launchers.cluster.pod_reasons import PULL, is_final, remedy
from components.launchers.cluster.pods import describe
from components.launchers.cluster.queue_wait import QueueWait
from components.launchers.cluster.restarts import Restarts
from components.launchers.cluster.stopping import Out, stop
from components.launchers.interrupts import StopRequest, raising_on_signals
from components.launchers.last_lines import LAST_LINES, indented
from components.launchers.spec import JobSpec
from trainer.errors import EXIT_USAGE, LaunchError

_DEADLINE_REASON = "DeadlineExceeded"  # Where the job's own controller keeps the deadline, and was first.


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def run(backend: Backend, job: JobSpec, out: Out = say, look: Look = ignore) -> None:
    """Run a job to its end, or take up the same one where it runs already.

    On SIGTERM or SIGINT the job is deleted before anything else; but in the pod of a pipeline's step
    whose run goes on, the job is left to the next attempt.

    Args:
        backend: where to run it; the job's namespace wins over the backend's.
        job: what to run.
        out: takes each line.
        look: takes each status of the job.

    Raises:
        ConfigError: the cluster would not take the job.
        LaunchError: it failed, did not start in time, or went past a limit; `exit_code` is its code.
        Interrupted: this process was asked to end: the job is deleted, or left to the next attempt.
    """
    backend = backend.within(job.namespace)
    submitted = False
    with raising_on_signals():
        try:
            backend.submit(job)
            submitted = True
            Watch(backend, job, out, look).to_the_end()
        except StopRequest as request:
            stop(backend, job.name, request, submitted, out)
        except ApiError as error:
            if submitted and error.passing:
                error.message += f"; the job {job.name} goes on by itself"
                error.fix = (
                    f"run the same again to adopt it; `kubedet job stop{backend.options} {job.name}` ends it"
                )
            raise


class Watch:
    """Watches one job.

    Args:
        backend: where it runs.
        job: its specification, whose limits are kept.
        out: takes each line.
        look: takes each status.
    """

    def __init__(self, backend: Backend, job: JobSpec, out: Out, look: Look = ignore) -> None:
        self._backend, self._job, self._out, self._onlooker = backend, job, out, look
        self._hints = Hints(rdma=job.network.profile == "rdma")
        self._last: dict[int, deque[str]] = {}
        """Last lines, by rank: a pod that is made anew may have another name."""
        self._ranks: dict[str, int] = {}
        self._reported: set[tuple[str, ...]] = set()
        self._reason_since: dict[tuple[str, ...], float] = {}
        """Since when a pod has had a waiting reason."""
        self._restarts = Restarts()
        self._queue_wait = QueueWait(job.start_timeout, backend.timings)
        self._hash, self._uid = backend.submitted(job.name)
        self._status = JobStatus(job.name, Phase.GONE)
        self._phase_since = self._spoken = time.monotonic()
        self._waiting_since: float | None = None

    def to_the_end(self) -> None:
        """Watch until the job has ended well, and all its lines are told.

        Raises:
            LaunchError: it ended otherwise, or went past a limit and is deleted.
        """
        for event in self._backend.follow(self._job.name):
            if isinstance(event, LogLine):
                self._line(event)
            else:
                self._look(event)
        if self._status.phase is Phase.GONE:
            self._look_for_another()
        if self._status.phase is not Phase.SUCCEEDED:
            last = {pod.name: self._last.get(pod.rank, ()) for pod in self._status.pods}
            raise of_job(self._status, last, self._hints)

    def _say(self, text: str) -> None:
        self._spoken = time.monotonic()
        self._out(text)

    def _line(self, line: LogLine) -> None:
        rank = self._ranks.get(line.pod, 0)
        self._last.setdefault(rank, deque(maxlen=LAST_LINES)).append(line.text)
        self._restarts.line(line.text)
        self._say(f"[{line.pod}] {line.text}")
        if hint := self._hints.line(line.text):
            self._say(f"hint: {hint}")

    def _look(self, status: JobStatus) -> None:
        """Print what is new, and enforce the limits."""
        self._check_identity(status)
        self._onlooker(status)
        before, self._status = self._status, status
        now = time.monotonic()
        news = self._queue_wait.is_news(status, now)
        if status.phase is not before.phase:
            self._phase_since = now
        if news or status.phase is not before.phase:
            self._say(f"job {self._job.name}: {_phase(status)}")
        for pod in status.pods:
            self._ranks[pod.name] = pod.rank
            self._pod(pod)
        if status.phase is Phase.FAILED and status.reason == _DEADLINE_REASON:
            self._deadline()
        if status.phase.final:
            return
        self._limits(self._job, now)
        silent = now - self._spoken
        if silent >= self._backend.timings.heartbeat:
            self._say(
                f"job {self._job.name}: {_phase(status)}, for {_span(now - self._phase_since)}; "
                f"no line for {_span(silent)}"
            )

    def _check_identity(self, status: JobStatus) -> None:
        """Refuse to follow a different job that another launcher created under our job's name.

        Raises:
            LaunchError: it is another specification.
        """
        if status.uid and self._hash and status.spec != self._hash:
            raise replaced(self._job.name, self._hash, status.spec)
        if status.uid and self._uid and status.uid != self._uid:
            self._say(f"job {self._job.name}: made anew by another launcher of the same specification")
        self._uid = status.uid or self._uid

    def _look_for_another(self) -> None:
        """Our job is gone: wait a moment for the one that replaces it, if there is one."""
        timings = self._backend.timings
        end = time.monotonic() + timings.replaced
        while time.monotonic() < end:
            time.sleep(min(timings.poll, timings.replaced / 4))
            try:
                self._check_identity(self._backend.status(self._job.name))
            except ApiError:
                return

    def _pod(self, pod: PodStatus) -> None:
        """Print once why a pod waits, how it ended, and that it was restarted."""
        if self._restarts.is_new(pod):
            end = self._restarts.end(pod)
            why = str(end) if end else self._backend.last_exit(self._job.name, pod.name)
            counted = f"{self._restarts.counted(pod)} of {self._job.backoff}"
            self._say(f"pod {pod.name}: started anew, {counted}{f' ({why})' if why else ''}")
        if pod.phase == "Failed" or pod.exit_code:
            self._once(ending(pod), pod.uid, "ended", str(pod.restarts))
        elif pod.reason and pod.phase == "Pending":
            fix = remedy(pod.reason, pod.message)
            # The two reasons for an image that cannot be pulled alternate, for each pod of that rank.
            key = (str(pod.rank), "image", pod.image) if pod.reason in PULL else (pod.uid, pod.reason)
            self._once(f"pod {pod.name} waits{describe(pod)}{f' (fix: {fix})' if fix else ''}", *key)

    def _once(self, text: str, *key: str) -> None:
        if key not in self._reported:
            self._reported.add(key)
            self._say(text)

    def _limits(self, job: JobSpec, now: float) -> None:
        """Give a job up that does not start, takes too long or restarts too often."""
        status = self._status
        if status.phase not in (Phase.PENDING, Phase.RESTARTING):
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now
        elif now - self._waiting_since > job.start_timeout:
            why = indented(self._backend.explain(status))
            self._give_up(
                f"the job {job.name} does not run after {job.start_timeout} s ({_count(status)}):\n{why}",
                "mend what holds the pods back, or set start_timeout higher where the cluster is only busy",
            )
        if reason := self._queue_wait.verdict(status, now):
            events = indented(self._backend.explain(status))
            self._give_up("\n".join(filter(None, [reason, events])), remedy_in_queue(status))
        if job.deadline and _age(status) > job.deadline:
            self._deadline()
        self._check_final_reasons(now)
        if killed := self._restarts.out_of_memory(status.pods):
            self._give_up(*out_of_memory(job.name, killed, self._restarts.end(killed), self._lines(killed)))
        worst = self._restarts.worst(status.pods)
        if worst and self._restarts.counted(worst) > job.backoff:
            end = self._restarts.end(worst)
            count = f"{self._restarts.counted(worst)} times{f' ({end})' if end and str(end) else ''}"
            self._give_up(
                f"the job {job.name} was given up: pod {worst.name} was started anew {count} without a newer "
                f"checkpoint, allowed are {job.backoff}{self._lines(worst)}",
                (end and remedy(end.reason, end.message))
                or "see why it ends; set backoff higher where the nodes are only often taken away",
            )

    def _deadline(self) -> NoReturn:
        self._give_up(
            f"the job {self._job.name} was stopped at its deadline of {self._job.deadline} s",
            "run the same again: it goes on from its last checkpoint; or set deadline higher",
        )

    def _check_final_reasons(self, now: float) -> None:
        """Give a job up one of whose pods waits for a reason that retries cannot fix."""
        for pod in self._status.pods:
            since = self._reason_since.setdefault((pod.uid, pod.reason), now)
            if is_final(pod, now - since, self._backend.timings.lasting):
                self._give_up(*cannot_start(self._job, pod), code=EXIT_USAGE)

    def _lines(self, pod: PodStatus) -> str:
        return last_lines(self._last.get(pod.rank, ()))

    def _give_up(self, message: str, fix: str, *, code: int = LaunchError.exit_code) -> NoReturn:
        try:
            self._backend.withdraw(self._job.name)
        except LaunchError as error:
            message += f"\n  and could not be deleted: {error.message}"
        launch_error = LaunchError(message, fix="\n  ".join([*self._hints.hints, fix]))
        launch_error.exit_code = code
        raise launch_error


def _count(status: JobStatus) -> str:
    running = sum(pod.counts for pod in status.pods)
    return f"{running} of {status.nodes} pods run"


def _phase(status: JobStatus) -> str:
    """Return a job's phase in a few words."""
    if status.phase is Phase.SUSPENDED and status.queue and status.message:
        return f"suspended, {status.message}"
    if status.phase is Phase.SUSPENDED:
        return "suspended: its queue has not admitted it yet, or somebody holds it back"
    if status.phase.final:
        return str(status.phase)
    return f"{status.phase}, {_count(status)}"


def _age(status: JobStatus) -> float:
    """Return how long ago a job was created, in seconds."""
    return (datetime.now(UTC) - datetime.fromisoformat(status.created)).total_seconds()


def _span(seconds: float) -> str:
    """Return a duration as people write it."""
    minutes = int(seconds // 60)
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes} min"
