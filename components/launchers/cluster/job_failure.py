"""Error messages of jobs that failed."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from components.launchers.backend import Ending, JobStatus, Phase, PodStatus
from components.launchers.cluster.log_hints import Hints
from components.launchers.cluster.pod_reasons import final_end, remedy
from components.launchers.cluster.restarts import MEMORY_KILLS
from components.launchers.last_lines import indented, own_message
from components.launchers.spec import JobSpec
from trainer.errors import EXIT_RETRY, Interrupted, KubedetError, LaunchError
from trainer.heartbeat import EXIT_ABANDONED


def of_job(status: JobStatus, last_lines_of: Mapping[str, Iterable[str]], hints: Hints) -> KubedetError:
    """Make an error of a job that failed or is gone.

    Args:
        status: its status.
        last_lines_of: the last lines of pods, by name.
        hints: the hints from its log lines so far.

    Returns:
        A LaunchError with pod, reason, exit code and the training's own message or last lines,
        and the exit code of the training; or Interrupted, where it was stopped after saving.
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
    if message := own_message(lines):
        error = LaunchError(f"{ending(pod)}: {message}", fix="\n  ".join(hints.hints))
    else:
        text = last_lines(lines)
        error = LaunchError(ending(pod) + text, fix="\n  ".join(hints.hints))
    if fix := _remedy(pod):
        error.fix = "\n  ".join(filter(None, [error.fix, fix]))
    error.exit_code = pod.exit_code if pod.exit_code and pod.exit_code < 128 else LaunchError.exit_code
    return error


def culprit(pods: Iterable[PodStatus]) -> PodStatus | None:
    """Return the pod whose end made the job fail: the first that failed, one that was not killed if any.

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


def out_of_memory(job: str, pod: PodStatus, end: Ending | None, lines: str) -> tuple[str, str]:
    """Return message and fix of a job that is given up, for one of its pods is killed again and again."""
    return (
        f"the job {job} was given up: pod {pod.name} was killed {MEMORY_KILLS} times for the memory it used "
        f"({end or 'OOMKilled'}), without a newer checkpoint between{lines}",
        remedy("OOMKilled"),
    )


def cannot_start(job: JobSpec, pod: PodStatus) -> tuple[str, str]:
    """Return message and fix of a job that is given up, for it cannot run as it is specified."""
    end = final_end(pod)
    why = ": ".join(filter(None, [end.reason, " ".join(end.message.split())]))
    return (
        f"the job {job.name} was given up, for it cannot start: program {job.command[0]!r} of image "
        f"{pod.image or job.image}, pod {pod.name}: {why}",
        remedy(end.reason, end.message),
    )


def replaced(job: str, expected: str, actual: str) -> LaunchError:
    """Make the error of a job that another launcher replaced by a job of the same name."""
    return LaunchError(
        f"the job {job} was replaced by another specification of that name (its label kubedet/spec-hash is "
        f"{actual}, ours was {expected})",
        fix="give one of the two another name, and run this one again",
    )
