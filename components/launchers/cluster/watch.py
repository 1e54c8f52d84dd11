"""Runs a job to its end: prints its log and phases, enforces its limits, stops it, reports its failure."""

import re
import signal
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from functools import partial
from types import FrameType
from typing import NoReturn

from components.launchers import obstacles
from components.launchers.backend import Backend, Ending, JobStatus, Phase, PodStatus
from components.launchers.cluster import kueue
from components.launchers.cluster.client import ApiError
from components.launchers.obstacles import NOT_EXECUTABLE, RESUME_FIX, START_REASONS, find_remedy
from components.launchers.output import LAST_LINES, Hints, failure_message, indent_lines
from components.launchers.spec import JobSpec
from trainer.base import events
from trainer.base.errors import EXIT_RETRY, EXIT_USAGE, Interrupted, KubedetError, LaunchError
from trainer.launching.heartbeat import EXIT_ABANDONED
from trainer.launching.stop_signals import signal_handler

_MAX_EXTRA_STARTS = 2  # Further attempts, possibly on other nodes, to start a container that fails to start.
_NUMBERS = re.compile(r"\d\S*\s*")  # Numbers in the message of a queue, which may change often.
MAX_MEMORY_KILLS = 3
"""Number of out-of-memory kills without a newer checkpoint after which the job is given up."""


class Restarts:
    """Counts the restarts since the last new checkpoint: a preempted job that makes progress is healthy."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        self._forgiven: dict[int, int] = {}
        self._kills: dict[int, int] = {}
        self._step = 0

    def resume(self, step: int) -> None:
        """Reset the counts if training resumed from a newer checkpoint."""
        if step > self._step:
            self._step = step
            self._forgiven = dict(self._known)
            self._kills.clear()

    def record(self, pod: PodStatus) -> bool:
        """Record a pod's restarts; return whether there are more than before."""
        before = self._known.get(pod.rank, 0)
        self._known[pod.rank] = pod.restarts
        # After an eviction by the queue, the pod's count starts at zero again.
        self._forgiven[pod.rank] = min(self._forgiven.get(pod.rank, 0), pod.restarts)
        if pod.restarts <= before:
            return False
        if pod.before and pod.before.reason == "OOMKilled":
            self._kills[pod.rank] = self._kills.get(pod.rank, 0) + pod.restarts - before
        return True

    def count(self, pod: PodStatus) -> int:
        """Return the number of restarts of a pod since the last new checkpoint."""
        return pod.restarts - min(self._forgiven.get(pod.rank, 0), pod.restarts)

    def find_oom_killed(self, pods: Iterable[PodStatus]) -> PodStatus | None:
        """Return a pod that ran out of memory MAX_MEMORY_KILLS times, if any."""
        return next((pod for pod in pods if self._kills.get(pod.rank, 0) >= MAX_MEMORY_KILLS), None)


def job_error(status: JobStatus, last_lines: Mapping[str, Iterable[str]], hints: Hints) -> KubedetError:
    """Return the error of a job that failed, was stopped or is gone. `last_lines` are keyed by pod name."""
    if status.phase is Phase.GONE:
        return LaunchError(
            f"the job {status.name} no longer exists: it or its workflow was deleted", fix=RESUME_FIX
        )
    pod = first_failed_pod(status.pods)
    if pod is None:
        reason = ": ".join(filter(None, [status.reason, status.message]))
        return LaunchError(
            f"the job {status.name} failed: {reason or 'the cluster reports no reason'}",
            fix=f"look for the cause in `kubedet job status {status.name}`",
        )
    if pod.exit_code == EXIT_RETRY:
        return Interrupted(f"the training was stopped: {_describe_failure(pod)}", fix=RESUME_FIX)
    if pod.exit_code == EXIT_ABANDONED:
        return LaunchError(
            "the training saved its state and ended, because it received no heartbeat from this step; "
            f"{_describe_failure(pod)}",
            fix=f"{RESUME_FIX}; job.launcher_timeout sets the limit",
            transient=True,
        )
    lines = list(last_lines.get(pod.name, ()))
    message = failure_message(lines)
    text = f"{_describe_failure(pod)}: {message}" if message else _describe_failure(pod) + _quote_tail(lines)
    # Some runtimes do not report OOMKilled, the usual cause of a kill.
    fix = find_remedy(pod.reason, pod.message) or (find_remedy("OOMKilled") if pod.exit_code == 137 else "")
    if not (fix or lines):
        fix = f"look for the cause in `kubedet job logs {status.name} --rank {pod.rank}`"
    return hints.make_error(text, fix, pod.exit_code)


def first_failed_pod(pods: Iterable[PodStatus]) -> PodStatus | None:
    """Return the pod that failed first; killed pods come last, because a failure also ends the other pods."""
    # In CrashLoopBackOff, only the previous state says why the pod failed.
    ended = [
        replace(pod, reason=end.reason, message=end.message, exit_code=end.exit_code)
        if (end := pod.before) and pod.reason == "CrashLoopBackOff"
        else pod
        for pod in pods
    ]

    def order(pod: PodStatus) -> tuple[bool, bool, str, int]:
        killed = pod.exit_code is None or pod.exit_code >= 128
        return pod.exit_code == EXIT_RETRY, killed, pod.ended, pod.rank

    return min((pod for pod in ended if pod.phase == "Failed" or pod.exit_code), key=order, default=None)


def _describe_failure(pod: PodStatus) -> str:
    """Return one line that describes how a pod failed."""
    reason = "" if pod.reason in ("", "Error") else f" ({pod.reason})"
    message = f": {' '.join(pod.message.split())}" if pod.message else ""
    how = "failed" if pod.exit_code is None else f"failed with exit code {pod.exit_code}"
    if pod.exit_code and pod.exit_code > 128:
        how = f"was killed by signal {pod.exit_code - 128}"
    return f"pod {pod.name} (rank {pod.rank}) {how}{reason}{message}"


def _quote_tail(lines: Iterable[str]) -> str:
    text = indent_lines(lines)
    return f"; its last lines:\n{text}" if text else ""


class _StopRequest(BaseException):
    """A stop signal was received. Not an Exception, so that no error handler catches it."""


PrintLine = Callable[[str], None]  # Takes a line.
_print = partial(print, flush=True)


def run(backend: Backend, job: JobSpec, out: PrintLine = _print) -> None:
    """Start a job, or adopt the same job if it is already running, and follow it until it ends.

    On SIGTERM or SIGINT, the job is deleted immediately. If this is the pod of a step whose run continues,
    the job is kept, and the next attempt of the step adopts it.
    """
    submitted = None
    delete = f"kubedet job stop{backend.options} {job.name}"
    signals: list[int] = []

    def raise_first(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        if len(signals) == 1:
            raise _StopRequest

    with signal_handler(raise_first):
        try:
            submitted = backend.submit(job)
            Watch(backend, job, submitted, out).run_to_end()
            return
        except ApiError as error:
            if submitted is not None and error.transient:
                error.message += f"; the job {job.name} continues"
                error.fix = f"run the same command again to adopt it; `{delete}` deletes it"
            raise
        except _StopRequest:
            received = signal.Signals(signals[0]).name
        if received == "SIGTERM" and not backend.deletes_job_on_stop():
            out(f"job {job.name}: continues, because {received} ends only this pod, not the run")
            raise Interrupted(
                f"this pod must end ({received}), but the run and its job {job.name} continue",
                fix=f"the step's next attempt adopts it; `{delete}` deletes it",
            )
        try:
            backend.withdraw(job.name, wait=False)
            # A creation in progress may succeed late.
            clock = backend.clock
            end = clock.monotonic() + (backend.timings.late if submitted is None else 0.0)
            while clock.monotonic() < end:
                clock.sleep(backend.timings.backoff)
                backend.withdraw(job.name, wait=False)
        except LaunchError as error:
            raise Interrupted(
                f"{received}, but the job {job.name} could not be deleted: {error.message}",
                fix=f"delete it: {delete}",
            ) from None
        out(f"job {job.name}: deleted on {received}; its pods have time to save a checkpoint")
        raise Interrupted("the training was stopped", fix=RESUME_FIX)


class Watch:
    """Watches one job and enforces its limits; `out` prints a line."""

    def __init__(self, backend: Backend, job: JobSpec, fingerprint: str, out: PrintLine) -> None:
        self._backend, self._job, self._out = backend, job, out
        self._fingerprint = fingerprint
        self._hints = Hints(rdma=job.network.profile == "rdma")
        self._last: dict[int, deque[str]] = {}
        """Last lines, by rank: a pod that replaces another may have another name."""
        self._ranks: dict[str, int] = {}
        self._reported: set[tuple[str, ...]] = set()
        self._obstacles = obstacles.ObstacleTracker(backend.clock)
        self._restarts = Restarts()
        self._queue_message = ""
        self._queue_reason, self._queue_since = "", 0.0
        self._status = JobStatus(job.name, Phase.GONE)
        self._clock = backend.clock
        self._phase_since = self._last_printed = self._clock.monotonic()
        self._waiting_since: float | None = None

    def run_to_end(self) -> None:
        """Watch the job until it has succeeded and its log is printed; raise an error if it fails."""
        for event in self._backend.follow(self._job.name):
            if isinstance(event, JobStatus):
                self._process_status(event)
                continue
            rank = self._ranks.get(event.pod, 0)
            reported = events.parse(event.text)
            if isinstance(reported, events.TrainingResumed):
                self._restarts.resume(reported.step)
            if reported is None or isinstance(reported, events.ProcessFailed):
                self._last.setdefault(rank, deque(maxlen=LAST_LINES)).append(event.text)
            if reported:
                continue
            self._print(f"[{event.pod}] {event.text}")
            if hint := self._hints.find_new(event.text):
                self._print(f"hint: {hint}")
        timings = self._backend.timings
        end = self._clock.monotonic() + timings.replaced
        # Another job may be about to replace ours.
        while self._status.phase is Phase.GONE and self._clock.monotonic() < end:
            self._clock.sleep(min(timings.poll, timings.replaced / 4))
            try:
                self._check_identity(self._backend.status(self._job.name))
            except ApiError:
                break
        if self._status.phase is not Phase.SUCCEEDED:
            last = {pod.name: self._last.get(pod.rank, ()) for pod in self._status.pods}
            raise job_error(self._status, last, self._hints)

    def _print(self, text: str) -> None:
        self._last_printed = self._clock.monotonic()
        self._out(text)

    def _process_status(self, status: JobStatus) -> None:
        self._check_identity(status)
        before, self._status = self._status, status
        now = self._clock.monotonic()
        if status.phase is not before.phase:
            self._phase_since = now
        if self._update_queue_message(status) or status.phase is not before.phase:
            self._print(f"job {self._job.name}: {_describe_phase(status)}")
        for pod in status.pods:
            self._ranks[pod.name] = pod.rank
            self._report(pod)
        job = self._job
        # The controller may enforce the deadline first.
        is_late = status.phase is Phase.FAILED and status.reason == "DeadlineExceeded"
        if job.deadline and not status.phase.final:
            age = self._clock.now() - datetime.fromisoformat(status.created)
            is_late = age.total_seconds() > job.deadline
        if is_late:
            self._give_up(
                f"the job {job.name} was stopped at its deadline of {job.deadline} s",
                f"{RESUME_FIX}; or set deadline higher",
            )
        if status.phase.final:
            return
        for line in self._obstacles.report_changes(obstacles.find_obstacles(status)):
            self._print(line)
        self._check_pods()
        self._check_waiting(now)
        silent = now - self._last_printed
        if silent >= self._backend.timings.heartbeat:
            since, silence = _format_duration(now - self._phase_since), _format_duration(silent)
            self._print(f"job {job.name}: {_describe_phase(status)}, for {since}; no output for {silence}")

    def _update_queue_message(self, status: JobStatus) -> bool:
        """Store the message of a queued job; return whether more than its numbers changed."""
        if status.phase is not Phase.SUSPENDED or not status.queue:
            self._queue_message = ""
            return False
        text = _NUMBERS.sub("", status.message)
        if status.reason == kueue.ADMITTED or text == self._queue_message:
            return False
        self._queue_message = text
        return True

    def _check_identity(self, status: JobStatus) -> None:
        """Raise LaunchError if another launcher created a different job under our job's name."""
        if status.uid and self._fingerprint and status.spec != self._fingerprint:
            raise LaunchError(
                f"the job {self._job.name} was replaced by a job of that name with another specification "
                f"(its label kubedet/spec-hash is {status.spec}, not {self._fingerprint})",
                fix="rename one of the two jobs, and run this one again",
            )

    def _report(self, pod: PodStatus) -> None:
        """Print each restart of a pod, and once if it failed."""
        if self._restarts.record(pod):
            end = f" ({pod.before})" if str(pod.before or "") else ""
            self._print(f"pod {pod.name}: restarted, {self._restarts.count(pod)} of {self._job.backoff}{end}")
        if pod.phase == "Failed" or pod.exit_code:
            key = (pod.uid, str(pod.restarts))
            if key not in self._reported:
                self._reported.add(key)
                self._print(_describe_failure(pod))

    def _check_waiting(self, now: float) -> None:
        """Give up if the job has waited too long for its pods, or if its queue will never admit it."""
        status, job = self._status, self._job
        limit = job.start_timeout / obstacles.USER_OBSTACLE_DIVISOR
        if status.phase not in (Phase.PENDING, Phase.RESTARTING):
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now
        elif now - self._waiting_since > job.start_timeout:
            self._give_up(
                f"the job {job.name} does not run after {job.start_timeout} s ({_describe_pods(status)}):\n"
                + indent_lines(self._backend.explain(status)),
                "fix what holds the pods back, or set start_timeout higher if the cluster is only busy",
            )
        elif now - self._waiting_since > limit and (obstacle := self._obstacles.find_lasting(limit)):
            self._give_up(
                f"the job {job.name} was given up after {limit:.0f} s: {obstacle.name} cannot start: "
                f"{obstacle}",
                obstacle.fix,
                code=EXIT_USAGE,
            )
        reason = status.reason if status.phase is Phase.SUSPENDED and status.queue else ""
        if reason != self._queue_reason:
            self._queue_reason, self._queue_since = reason, now
        waited, longest = now - self._queue_since, float(job.start_timeout)
        if reason == kueue.UNSERVED:
            longest = min(longest, self._backend.timings.unserved)
        if reason in kueue.GIVE_UP_REASONS and waited > longest:
            text = f"the job {job.name} was given up after {waited:.0f} s {status.message}"
            explanation = indent_lines(self._backend.explain(status))
            self._give_up("\n".join(filter(None, [text, explanation])), kueue.find_remedy(status))

    def _check_pods(self) -> None:
        """Give up if a pod can never start as specified, or was restarted too often."""
        job, pods = self._job, self._status.pods
        given_up = f"the job {job.name} was given up"
        for pod in pods:
            # The failed start of the pod or its predecessor.
            end = Ending(pod.reason, pod.message, pod.exit_code)
            if pod.before and pod.before.reason in START_REASONS and pod.reason not in START_REASONS:
                end = pod.before
            if end.reason in START_REASONS:
                hopeless = bool(NOT_EXECUTABLE.search(end.message)) or pod.restarts >= _MAX_EXTRA_STARTS
            else:
                hopeless = pod.phase == "Pending" and bool(obstacles.ROOT_REFUSED.search(pod.message))
            if hopeless or pod.reason == "InvalidImageName":
                reason = ": ".join(filter(None, [end.reason, " ".join(end.message.split())]))
                self._give_up(
                    f"{given_up}, because it cannot start: program {job.command[0]!r} of image "
                    f"{pod.image or job.image}, pod {pod.name}: {reason}",
                    find_remedy(end.reason, end.message),
                    code=EXIT_USAGE,
                )
        if killed := self._restarts.find_oom_killed(pods):
            self._give_up(
                f"{given_up}: pod {killed.name} was killed {MAX_MEMORY_KILLS} times because it used too much "
                f"memory ({killed.before or 'OOMKilled'}), without a newer checkpoint in between"
                + _quote_tail(self._last.get(killed.rank, ())),
                find_remedy("OOMKilled"),
            )
        worst = max(pods, key=self._restarts.count, default=None)
        if worst and (count := self._restarts.count(worst)) > job.backoff:
            end = worst.before or Ending()
            reason = f" ({end})" if str(end) else ""
            self._give_up(
                f"{given_up}: pod {worst.name} was restarted {count} times{reason} without a newer "
                f"checkpoint; the limit is {job.backoff}{_quote_tail(self._last.get(worst.rank, ()))}",
                find_remedy(end.reason, end.message)
                or "find out why the pod ends, or set backoff higher if nodes are often preempted",
            )

    def _give_up(self, message: str, fix: str, *, code: int = LaunchError.exit_code) -> NoReturn:
        try:
            self._backend.withdraw(self._job.name)
        except LaunchError as error:
            message += f"\n  and could not be deleted: {error.message}"
        raise self._hints.make_error(message, fix, code)


def _describe_pods(status: JobStatus) -> str:
    return f"{sum(pod.is_healthy for pod in status.pods)} of {status.nodes} pods run"


def _describe_phase(status: JobStatus) -> str:
    if status.phase is Phase.SUSPENDED:
        queue = status.message if status.queue else ""
        return f"suspended, {queue}" if queue else "suspended by its queue or by a user"
    return str(status.phase) if status.phase.final else f"{status.phase}, {_describe_pods(status)}"


def _format_duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds // 60:.0f} min"
