"""Runs a job to its end: prints its log and phases, enforces its limits, stops it, reports its failure."""

import re
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from types import FrameType
from typing import NoReturn

from components.launchers.backend import Backend, Ending, JobStatus, LogLine, Look, Phase, PodStatus, ignore
from components.launchers.cluster import kueue
from components.launchers.cluster.client import ApiError
from components.launchers.cluster.pods import describe
from components.launchers.output import LAST_LINES, Hints, indented, own_message
from components.launchers.spec import JobSpec
from trainer.base.errors import EXIT_RETRY, EXIT_USAGE, Interrupted, KubedetError, LaunchError
from trainer.launching.heartbeat import EXIT_ABANDONED
from trainer.launching.stop_signals import handling


class StopRequest(BaseException):
    """A stop signal was received. Not an Exception: no handler of errors may catch it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number).name


@contextmanager
def raising_on_signals() -> Iterator[None]:
    """Raise StopRequest at the first SIGTERM or SIGINT, whatever is waited for; further ones are ignored."""
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:
            raise StopRequest(number)

    with handling(handle):
        yield


PULL = ("ErrImagePull", "ImagePullBackOff")
"""An image that cannot be pulled; the two alternate."""
MEMORY = ("OOMKilled",)
"""A container above its memory limit."""

_NO_PROGRAM = ("StartError", "ContainerCannotRun", "RunContainerError")
_NOT_EXECUTABLE = re.compile(
    r"exec:|executable|no such file or directory|permission denied|format error|not a directory|chdir", re.I
)
"""Messages of a runtime that cannot execute the program; others may be the node's: its disk, its driver."""
_MORE_STARTS = 2  # Further starts, maybe on other nodes, of a container that fails for another reason.
_LASTING = ("CreateContainerConfigError", "CreateContainerError", "ErrImageNeverPull")
_ROOT_REFUSED = ("runAsNonRoot", "breaks non-root policy")  # The words of the kubelet.

_REMEDIES = {
    "InvalidImageName": "correct image: it is no name that a registry could have",
    "ErrImageNeverPull": "bring the image to the nodes, or leave image_pull_policy out",
    "CreateContainerConfigError": "create the Secret, or the key in it, that the message names",
    "CreateContainerError": "correct the command, working_dir or mounts that the message names",
    "OOMKilled": "raise memory_limit, or make the batch smaller (train.batch_size, with train.accumulate as "
    "much higher): the same again goes on from its checkpoint",
    "Evicted": "raise memory_limit, or make the batch smaller: the same again goes on from its checkpoint",
}


def remedy(reason: str, message: str = "") -> str:
    """Return the fix for the reason and message of a container or pod; empty if there is none."""
    if _as_root(message):
        return (
            "set run_as_user to a number other than 0, e.g. 1000, or use an image whose user is a number "
            "(USER 1000:1000); run_as_non_root: false lets it run as root"
        )
    if reason in _NO_PROGRAM and message and not _NOT_EXECUTABLE.search(message):
        return "see to the node: its container runtime cannot start this container"
    if reason in _NO_PROGRAM:
        return "correct the command, or use an image that holds the program"
    if reason in PULL:
        return "correct image, or set image_pull_secrets where the registry asks for credentials"
    return _REMEDIES.get(reason, "")


def _as_root(message: str) -> bool:
    return any(words in message for words in _ROOT_REFUSED)


def is_final(pod: PodStatus, lasted: float, patience: float) -> bool:
    """Whether a pod can never run as its job is specified.

    It has had its reason for `lasted` seconds; reasons that a person may fix are final after `patience`.
    """
    if pod.reason == "InvalidImageName":
        return True
    if (end := final_end(pod)).reason in _NO_PROGRAM:
        return bool(_NOT_EXECUTABLE.search(end.message)) or pod.restarts >= _MORE_STARTS
    return pod.reason in _LASTING and (_as_root(pod.message) or lasted > patience)


def final_end(pod: PodStatus) -> Ending:
    """Return the state that `is_final` checks: the pod's own, or how the previous one failed to start."""
    if pod.before and pod.before.reason in _NO_PROGRAM and pod.reason not in _NO_PROGRAM:
        return pod.before
    return Ending(pod.reason, pod.message, pod.exit_code)


MEMORY_KILLS = 3
"""Kills for too much memory, without a newer checkpoint between, after which no other end is expected."""

_RESUMED = re.compile(
    r"\bresumed at step (\d+) of \d+"
)  # trainer/training/loop.py says it of every start but the first.


class Restarts:
    """Counts restarts, without those before a newer checkpoint.

    A job of days on nodes that are preempted every few hours is healthy; one that fails ten times at the
    same step is not.
    """

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._forgiven: dict[int, int] = {}
        self._kills: dict[int, int] = {}
        self._step = 0

    def line(self, text: str) -> None:
        """Match a log line: resuming from a newer checkpoint forgives earlier restarts."""
        resumed = _RESUMED.search(text)
        if resumed and int(resumed[1]) > self._step:
            self._step = int(resumed[1])
            self._forgiven = dict(self._seen)
            self._kills.clear()

    def is_new(self, pod: PodStatus) -> bool:
        """Record a pod's restarts; returns whether there are more than before."""
        before = self._seen.get(pod.rank, 0)
        self._seen[pod.rank] = pod.restarts
        # After an eviction by the queue the count starts at zero.
        self._forgiven[pod.rank] = min(self._forgiven.get(pod.rank, 0), pod.restarts)
        if pod.restarts <= before:
            return False
        if pod.before and pod.before.reason in MEMORY:
            self._kills[pod.rank] = self._kills.get(pod.rank, 0) + pod.restarts - before
        return True

    def counted(self, pod: PodStatus) -> int:
        """Return a pod's restarts that are not forgiven."""
        return pod.restarts - min(self._forgiven.get(pod.rank, 0), pod.restarts)

    def worst(self, pods: Iterable[PodStatus]) -> PodStatus | None:
        """Return the pod with the most restarts that count."""
        return max(pods, key=self.counted, default=None)

    def out_of_memory(self, pods: Iterable[PodStatus]) -> PodStatus | None:
        """Return a pod that was killed for its memory MEMORY_KILLS times, if any."""
        return next((pod for pod in pods if self._kills.get(pod.rank, 0) >= MEMORY_KILLS), None)


def of_job(status: JobStatus, last_lines_of: Mapping[str, Iterable[str]], hints: Hints) -> KubedetError:
    """Return the error of a job that failed or is gone, from the last lines of its pods, by name.

    A LaunchError with pod, reason, exit code and the training's own message or last lines; or Interrupted,
    if the training was stopped after saving.
    """
    if status.phase is Phase.GONE:
        return LaunchError(
            f"the job {status.name} is gone: it, or the workflow it belonged to, was deleted",
            fix="run the same again: it goes on from its last checkpoint",
        )
    pod = culprit(status.pods)
    if pod is None:
        words = ": ".join(filter(None, [status.reason, status.message]))
        return LaunchError(f"the job {status.name} failed: {words or 'the cluster does not say why'}")
    if pod.exit_code == EXIT_RETRY:
        return Interrupted(
            f"the training was stopped: {ending(pod)}", fix="run the same again: it goes on where it stopped"
        )
    if pod.exit_code == EXIT_ABANDONED:
        return LaunchError(
            f"the training saved its state and ended: it had no sign of life from this step; {ending(pod)}",
            fix="run the same again: it goes on where it ended; job.launcher_timeout sets the limit",
            passing=True,
        )
    hints.exit_code(pod.exit_code)
    lines = list(last_lines_of.get(pod.name, ()))
    message = own_message(lines)
    text = f"{ending(pod)}: {message}" if message else ending(pod) + last_lines(lines)
    error = LaunchError(text, fix="\n  ".join(filter(None, [*hints.hints, _remedy(pod)])))
    error.exit_code = pod.exit_code if pod.exit_code and pod.exit_code < 128 else LaunchError.exit_code
    return error


def culprit(pods: Iterable[PodStatus]) -> PodStatus | None:
    """Return the pod that made the job fail: the first that failed, if possible one that was not killed.

    When one fails, the others lose their peer, are killed, or ask to be run again.
    """
    failed = [pod for pod in map(_ended, pods) if pod.phase == "Failed" or pod.exit_code]
    return min(failed, key=_order, default=None)


def _order(pod: PodStatus) -> tuple[bool, bool, str, int]:
    killed = pod.exit_code is None or pod.exit_code >= 128
    return pod.exit_code == EXIT_RETRY, killed, pod.ended, pod.rank


def ending(pod: PodStatus) -> str:
    """Return one line on how a pod ended."""
    who = f"pod {pod.name} (rank {pod.rank})"
    reason = "" if pod.reason in ("", "Error") else f" ({pod.reason})"
    message = f": {' '.join(pod.message.split())}" if pod.message else ""
    if pod.exit_code is None:
        return f"{who} failed{reason}{message}"
    if pod.exit_code > 128:
        return f"{who} was killed by signal {pod.exit_code - 128}{reason}{message}"
    return f"{who} failed with exit code {pod.exit_code}{reason}{message}"


def last_lines(lines: Iterable[str]) -> str:
    """Return the last lines of a pod, to be appended to a message; empty if there are none."""
    text = indented(lines)
    return f"; its last lines:\n{text}" if text else ""


def _ended(pod: PodStatus) -> PodStatus:
    """Return a pod in CrashLoopBackOff with its last termination: its own state only says that it waits."""
    end = pod.before
    if end is None or pod.reason != "CrashLoopBackOff":
        return pod
    return replace(pod, reason=end.reason, message=end.message, exit_code=end.exit_code)


def _remedy(pod: PodStatus) -> str:
    if pod.exit_code == 137 and not remedy(pod.reason):
        return remedy("OOMKilled")  # Mostly it was: some runtimes do not say so.
    return remedy(pod.reason, pod.message)


def out_of_memory(job: str, pod: PodStatus, lines: str) -> tuple[str, str]:
    """Return message and fix of a job that is given up because a pod is killed again and again."""
    return (
        f"the job {job} was given up: pod {pod.name} was killed {MEMORY_KILLS} times for the memory it used "
        f"({pod.before or 'OOMKilled'}), without a newer checkpoint between{lines}",
        remedy("OOMKilled"),
    )


def cannot_start(job: JobSpec, pod: PodStatus) -> tuple[str, str]:
    """Return message and fix of a job that is given up because it cannot run as it is specified."""
    end = final_end(pod)
    why = ": ".join(filter(None, [end.reason, " ".join(end.message.split())]))
    return (
        f"the job {job.name} was given up, for it cannot start: program {job.command[0]!r} of image "
        f"{pod.image or job.image}, pod {pod.name}: {why}",
        remedy(end.reason, end.message),
    )


Out = Callable[[str], None]
"""Takes a line."""


def _stop(backend: Backend, name: str, request: StopRequest, submitted: bool, out: Out) -> NoReturn:
    delete = f"kubedet job stop{backend.options} {name}"
    if request.signal == "SIGTERM" and not backend.ends_with_the_run():
        out(f"job {name}: goes on, for {request.signal} ends this pod and not the run")
        raise Interrupted(
            f"this pod was asked to end ({request.signal}), and the run goes on: so does the job {name}",
            fix=f"let the next attempt of this step take it up; `{delete}` ends it",
        )
    try:
        if submitted:
            backend.abandon(name)
        else:  # The name may be somebody else's; and a creation may be on its way, to arrive late.
            timings = backend.timings
            end = time.monotonic() + timings.late
            backend.withdraw(name, wait=False)
            while time.monotonic() < end:
                time.sleep(timings.backoff)
                backend.withdraw(name, wait=False)
    except LaunchError as error:
        raise Interrupted(
            f"{request.signal}, but the job {name} could not be deleted: {error.message}",
            fix=f"delete it: {delete}",
        ) from None
    out(f"job {name}: deleted on {request.signal}; its pods are given time to save a checkpoint")
    raise Interrupted("the training was stopped", fix="run the same again: it goes on where it stopped")


_DEADLINE_REASON = "DeadlineExceeded"  # Where the job's own controller keeps the deadline, and was first.


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def run(backend: Backend, job: JobSpec, out: Out = say, look: Look = ignore) -> None:
    """Run a job to its end, or adopt the same one if it runs already.

    On SIGTERM or SIGINT the job is deleted before anything else; but if this is a step's pod whose run
    continues, the job is left to the next attempt. The job's namespace wins over the backend's.

    Raises:
        ConfigError: the cluster would not take the job.
        LaunchError: it failed, did not start in time, or exceeded a limit; `exit_code` is its code.
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
            _stop(backend, job.name, request, submitted, out)
        except ApiError as error:
            if submitted and error.passing:
                error.message += f"; the job {job.name} goes on by itself"
                error.fix = (
                    f"run the same again to adopt it; `kubedet job stop{backend.options} {job.name}` ends it"
                )
            raise


class Watch:
    """Watches one job and enforces its limits; `out` takes each line, and `look` each status."""

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
        self._queue_wait = kueue.QueueWait(job.start_timeout, backend.timings)
        self._hash, self._uid = backend.submitted(job.name)
        self._status = JobStatus(job.name, Phase.GONE)
        self._phase_since = self._spoken = time.monotonic()
        self._waiting_since: float | None = None

    def to_the_end(self) -> None:
        """Watch until the job has succeeded, and all its lines are printed.

        Raises:
            LaunchError: it ended otherwise, or exceeded a limit and is deleted.
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
        """Raise LaunchError if another launcher created a different job under our job's name."""
        if status.uid and self._hash and status.spec != self._hash:
            raise LaunchError(
                f"the job {self._job.name} was replaced by another specification of that name (its label "
                f"kubedet/spec-hash is {status.spec}, ours was {self._hash})",
                fix="give one of the two another name, and run this one again",
            )
        if status.uid and self._uid and status.uid != self._uid:
            self._say(f"job {self._job.name}: made anew by another launcher of the same specification")
        self._uid = status.uid or self._uid

    def _look_for_another(self) -> None:
        """Our job is gone: wait a moment for one that replaces it."""
        timings = self._backend.timings
        end = time.monotonic() + timings.replaced
        while time.monotonic() < end:
            time.sleep(min(timings.poll, timings.replaced / 4))
            try:
                self._check_identity(self._backend.status(self._job.name))
            except ApiError:
                return

    def _pod(self, pod: PodStatus) -> None:
        if self._restarts.is_new(pod):
            why = str(pod.before or "")
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
            self._give_up("\n".join(filter(None, [reason, events])), kueue.remedy(status))
        if job.deadline and _age(status) > job.deadline:
            self._deadline()
        self._check_final_reasons(now)
        if killed := self._restarts.out_of_memory(status.pods):
            self._give_up(*out_of_memory(job.name, killed, self._lines(killed)))
        worst = self._restarts.worst(status.pods)
        if worst and self._restarts.counted(worst) > job.backoff:
            end = worst.before
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
    if status.phase is Phase.SUSPENDED and status.queue and status.message:
        return f"suspended, {status.message}"
    if status.phase is Phase.SUSPENDED:
        return "suspended: its queue has not admitted it yet, or somebody holds it back"
    if status.phase.final:
        return str(status.phase)
    return f"{status.phase}, {_count(status)}"


def _age(status: JobStatus) -> float:
    return (datetime.now(UTC) - datetime.fromisoformat(status.created)).total_seconds()


def _span(seconds: float) -> str:
    minutes = int(seconds // 60)
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes} min"
