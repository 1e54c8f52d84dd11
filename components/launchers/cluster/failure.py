"""What to tell of a job that did not end well."""

from collections.abc import Iterable, Mapping

from components.launchers.backend import JobStatus, Phase, PodStatus
from components.launchers.cluster.hints import Hints
from components.launchers.failure import indented, own_message
from trainer.errors import EXIT_RETRY, Interrupted, KubedetError, LaunchError


def of_job(status: JobStatus, last: Mapping[str, Iterable[str]], hints: Hints) -> KubedetError:
    """Make an error of a job that failed or is gone.

    Args:
        status: how it is.
        last: the last lines of pods, by name.
        hints: what its lines told so far.

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
    hints.exit_code(pod.exit_code)
    lines = list(last.get(pod.name, ()))
    if message := own_message(lines):
        error = LaunchError(f"{ending(pod)}: {message}", fix="\n  ".join(hints.given))
    else:
        told = f"; its last lines:\n{indented(lines)}" if lines else ""
        error = LaunchError(ending(pod) + told, fix="\n  ".join([*hints.given, *_memory(pod)]))
    error.exit_code = pod.exit_code if pod.exit_code and pod.exit_code < 128 else LaunchError.exit_code
    return error


def culprit(pods: Iterable[PodStatus]) -> PodStatus | None:
    """Return the pod whose end made the job fail: the first that failed, one that was not killed if any.

    When one fails, the others lose their peer, are killed, or ask to be run again.
    """
    failed = [pod for pod in pods if pod.phase == "Failed" or pod.exit_code]
    return min(failed, key=_order, default=None)


def _order(pod: PodStatus) -> tuple[bool, bool, str, int]:
    killed = pod.exit_code is None or pod.exit_code >= 128
    return pod.exit_code == EXIT_RETRY, killed, pod.ended, pod.rank


def ending(pod: PodStatus) -> str:
    """Say how a pod ended."""
    who = f"pod {pod.name} (rank {pod.rank})"
    reason = "" if pod.reason in ("", "Error") else f" ({pod.reason})"
    message = f": {' '.join(pod.message.split())}" if pod.message else ""
    if pod.exit_code is None:
        return f"{who} failed{reason}{message}"
    if pod.exit_code > 128:
        return f"{who} was killed by signal {pod.exit_code - 128}{reason}{message}"
    return f"{who} failed with exit code {pod.exit_code}{reason}{message}"


def _memory(pod: PodStatus) -> list[str]:
    if pod.exit_code != 137 and pod.reason not in ("OOMKilled", "Evicted"):
        return []
    return ["raise memory_limit, or make the batch smaller: the same again goes on from its checkpoint"]
