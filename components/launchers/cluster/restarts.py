"""How often a job's pods were started anew since the training last got further."""

import re
from collections.abc import Iterable

from components.launchers.backend import Ending, PodStatus
from components.launchers.cluster.reasons import MEMORY

MEMORY_KILLS = 3
"""Kills for too much memory, without a newer checkpoint between, after which no other end is expected."""

_RESUMED = re.compile(
    r"\bresumed at step (\d+) of \d+"
)  # trainer/loop.py says it of every start but the first.


class Restarts:
    """The restarts that count: those before a newer checkpoint are forgiven.

    A job of days on nodes that are taken away every few hours is well, while one that dies ten
    times at the same place is not.
    """

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._forgiven: dict[int, int] = {}
        self._kills: dict[int, int] = {}
        self._ends: dict[int, Ending] = {}
        self._step = 0

    def line(self, text: str) -> None:
        """Look at a line of a log: a start from a newer checkpoint forgives what was before."""
        found = _RESUMED.search(text)
        if found and int(found[1]) > self._step:
            self._step = int(found[1])
            self._forgiven = dict(self._seen)
            self._kills.clear()

    def is_new(self, pod: PodStatus) -> bool:
        """Take note of a pod's restarts; whether there are more of them than before."""
        before = self._seen.get(pod.rank, 0)
        self._seen[pod.rank] = pod.restarts
        # A queue that took the job back lets the count begin anew.
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
        """Return the pod that was started anew most often."""
        return max(pods, key=self.counted, default=None)

    def end(self, pod: PodStatus) -> Ending | None:
        """Return how the pod before one of that rank ended, as far as it was ever known."""
        return pod.before or self._ends.get(pod.rank)

    def out_of_memory(self, pods: Iterable[PodStatus]) -> PodStatus | None:
        """Return a pod that was killed for its memory too often."""
        return next((pod for pod in pods if self._kills.get(pod.rank, 0) >= MEMORY_KILLS), None)
