"""Obstacles that keep pods from starting: their remedies, and which of them only a user can remove."""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from components.launchers.backend import JobStatus
from trainer.base.clock import CLOCK, Clock

RESUME_FIX = "run the same command again to continue from the last checkpoint"
USER_OBSTACLE_DIVISOR = 10
"""A job waits for start_timeout divided by this number if only a user can remove the obstacle."""

START_REASONS = ("StartError", "ContainerCannotRun", "RunContainerError")
ROOT_REFUSED = re.compile("runAsNonRoot|breaks non-root policy")  # Patterns of messages of the kubelet.
NOT_EXECUTABLE = re.compile(
    r"exec:|executable|no such file or directory|permission denied|format error|not a directory|chdir", re.I
)
"""Messages of a container runtime that cannot execute the program; others may be about the node."""

_PULLS = ("ErrImagePull", "ImagePullBackOff")  # The kubelet alternates between these.
_PULL, _PENDING = "|".join((*_PULLS, "Failed")), "Unschedulable|FailedScheduling"
_CREATE = "FailedCreate(Pod)?|JobCreationFailed"  # Events of a job whose pods cannot be created.
_MOUNT, _START = "FailedMount|FailedAttachVolume", "|".join(START_REASONS)
_MEMORY = "raise memory_limit, or make the batch smaller"
_PULL_FIX = (
    "correct image (KUBEDET_IMAGE of a step), push it, or name the registry's credentials "
    "(image_pull_secrets; of a step's pod those of its service account)"
)

# Fixes by two patterns: one matches the whole reason, one is found in the message. The first match applies.
# The order is: obstacles that only a user can remove, obstacles of unknown kind, temporary obstacles.
_Rules = dict[tuple[str, str], str]
_USER_RULES: _Rules = {
    (
        _CREATE,
        "violates PodSecurity",
    ): "change the fields that the message names, or label the namespace "
    "with a Pod Security level that allows them (pod-security.kubernetes.io/enforce)",
    (
        ".*",
        ROOT_REFUSED.pattern,
    ): "set run_as_user to a number other than 0, e.g. 1000, or use an image whose "
    "user is a number (USER 1000:1000); run_as_non_root: false lets it run as root",
    ("InvalidImageName", ""): "correct image: it is not the name of an image",
    ("ErrImageNeverPull", ""): "bring the image to the nodes, or leave image_pull_policy out",
    (
        _PULL,
        "not found|manifest unknown|denied|authori[sz]|no basic auth|[Ff]orbidden|no such host|"
        "no match for platform",
    ): _PULL_FIX,
    ("CreateContainerConfigError", ""): "create the Secret, or the key in it, that the message names",
    ("CreateContainerError", ""): "correct the command, working_dir or mounts that the message names",
    (_PENDING, 'persistentvolumeclaim "[^"]+" not found'): "create the claim that the message names, or name "
    "another (--claim, or the job's mounts)",
    (
        _CREATE,
        "(?!.*(exceeded quota|calling webhook)).*(forbidden|denied|not found|[Ii]nvalid)",
    ): "change the job, or what the message names in the namespace",
    (_MOUNT, r"(secret|configmap) \S+ not found|references non-existent"): "create the Secret, ConfigMap or "
    "key that the message names",
}
_UNKNOWN_RULES: _Rules = {
    (_PULL, r"^$|^Back-off pulling image \S+$"): _PULL_FIX,
    ("OOMKilled", ""): f"{_MEMORY} (train.batch_size; train.global_batch keeps the images of a step), and "
    f"{RESUME_FIX}",
    ("Evicted", ""): f"{_MEMORY}, and {RESUME_FIX}",
    (
        _START,
        f"^$|(?i:{NOT_EXECUTABLE.pattern})",
    ): "correct the command, or use an image that holds the program",
    (_START, ""): "check the node: its container runtime cannot start this container",
}
_TEMPORARY_RULES: _Rules = {
    (_PULL, ""): f"check that the nodes reach the registry; otherwise {_PULL_FIX}",
    (
        _PENDING,
        "unbound immediate PersistentVolumeClaims",
    ): "see why the claim is not bound: `kubectl describe pvc` shows its events",
    (_PENDING, ""): "free nodes or add some, request less (gpus, cpu_request, memory_request; step_cpu and "
    "step_memory for a step), or add tolerations",
    (_CREATE, "exceeded quota"): "wait until other pods end, request less, or raise the ResourceQuota",
    (_CREATE, "calling webhook"): "start the controller of the webhook that the message names",
    (_MOUNT, ""): "check the volume and its server: `kubectl describe pod` shows more",
    ("FailedCreatePodSandBox", ""): "check the node: its network plugin cannot set up the pod",
}


def _match_rules(reason: str, message: str) -> tuple[str, bool | None]:
    """Return the remedy for a reason, and whether only a user can apply it (None: unknown)."""
    for rules, needs_person in ((_USER_RULES, True), (_UNKNOWN_RULES, None), (_TEMPORARY_RULES, False)):
        for (of_reason, of_message), fix in rules.items():
            if re.fullmatch(of_reason, reason) and re.search(of_message, message):
                return fix, needs_person
    return "", None


def find_remedy(reason: str, message: str = "") -> str:
    """Return the fix for the reason and message of a container, pod or event; empty if there is none."""
    return _match_rules(reason, message)[0]


class Obstacle(NamedTuple):
    """A reason why a pod does not start, or why a job has no pods."""

    name: str  # The affected object, for messages: `pod train-worker-0`.
    reason: str
    message: str = ""

    @property
    def fix(self) -> str:
        """The remedy; empty if there is none."""
        return find_remedy(self.reason, self.message)

    def __str__(self) -> str:
        """Return reason and message as one line."""
        return ": ".join(filter(None, [self.reason, " ".join(self.message.split())]))


def find_obstacles(status: JobStatus) -> list[Obstacle]:
    """Return the obstacles that a job's status shows."""
    found = [
        Obstacle(f"pod {pod.name}", pod.reason, pod.message)
        for pod in status.pods
        if pod.phase == "Pending" and pod.reason
    ]
    if len(status.pods) < status.nodes and re.fullmatch(_CREATE, status.reason):
        found.append(Obstacle(f"job {status.name}", status.reason, status.message))
    return found


class ObstacleTracker:
    """Reports each obstacle and its end once, and measures how long obstacles that need a user last."""

    def __init__(self, clock: Clock = CLOCK) -> None:
        self._clock = clock
        self._reported: dict[str, set[str]] = {}
        self._since: dict[str, tuple[float, Obstacle]] = {}

    def report_changes(self, current: Iterable[Obstacle]) -> Iterator[str]:
        """Yield a line for each new obstacle, and for each object that no longer has an obstacle."""
        now, by_name = self._clock.monotonic(), {item.name: item for item in current}
        for name in self._reported.keys() - by_name.keys():
            del self._reported[name]
            self._since.pop(name, None)
            yield f"{name} waits no longer"
        for name, item in by_name.items():
            fix, needs_person = _match_rules(item.reason, item.message)
            if needs_person:
                self._since[name] = self._since.get(name, (now,))[0], item
            elif needs_person is False:
                self._since.pop(name, None)
            kind = _PULLS[0] if item.reason in _PULLS else item.reason
            kinds = self._reported.setdefault(name, set())
            if kind not in kinds:
                kinds.add(kind)
                yield f"{name} waits: {item}{f' (fix: {fix})' if fix else ''}"

    def find_lasting(self, seconds: float) -> Obstacle | None:
        """Return an obstacle that only a user can remove and that has lasted for longer; None if none."""
        now = self._clock.monotonic()
        return next((item for since, item in self._since.values() if now - since > seconds), None)
