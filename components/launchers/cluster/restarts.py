"""Counts the restarts of a job's pods since the last newer checkpoint."""

import re
from collections.abc import Iterable

from components.launchers.backend import Ending, PodStatus
from components.launchers.cluster.pod_reasons import MEMORY

MEMORY_KILLS = 3
"""Kills for too much memory, without a newer checkpoint between, after which no other end is expected."""

_RESUMED = re.compile(
    r"\bresumed at step (\d+) of \d+"
)  # trainer/loop.py says it of every start but the first.


class Restarts:
    """The restarts that count: those before a newer checkpoint are forgiven.

    A job of days on nodes that are preempted every few hours is healthy; one that fails ten times at the
    same step is not.
    """

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._forgiven: dict[int, int] = {}
        self._kills: dict[int, int] = {}
        self._ends: dict[int, Ending] = {}
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
        if pod.before:
            self._ends[pod.rank] = pod.before
            if pod.before.reason in MEMORY:
                self._kills[pod.rank] = self._kills.get(pod.rank, 0) + pod.restarts - before
        return True

    def counted(self, pod: PodStatus) -> int:
        """Return a pod's restarts that are not forgiven."""
        return pod.restarts - min(self._forgiven.get(pod.rank, 0), pod.restarts)

    def worst(self, pods: Iterable[PodStatus]) -> PodStatus | None:
        """Return the pod with the most restarts that count."""
        return max(pods, key=self.counted, default=None)

    def end(self, pod: PodStatus) -> Ending | None:
        """Return how the previous pod of a rank ended, if that was ever known."""
        return pod.before or self._ends.get(pod.rank)

    def out_of_memory(self, pods: Iterable[PodStatus]) -> PodStatus | None:
        """Return a pod that was killed for its memory MEMORY_KILLS times, if any."""
        return next((pod for pod in pods if self._kills.get(pod.rank, 0) >= MEMORY_KILLS), None)
