"""Reasons of pods that wait or failed: which are final, and how to fix them."""

import re

from components.launchers.backend import Ending, PodStatus

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
    """Return the fix for a reason; empty if there is none.

    Args:
        reason: of a waiting or ended container, or of a pod.
        message: the cluster's words on it.
    """
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

    Args:
        pod: the pod.
        lasted: how long it has had its reason, in seconds.
        patience: seconds after which a reason that a person may still fix is final.
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
