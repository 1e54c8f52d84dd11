"""Messages on a job that waits in Kueue's queue, and when to give it up."""

import re

from components.launchers.backend import JobStatus, Phase
from components.launchers.cluster import kueue
from components.launchers.timings import Timings

_NUMBERS = re.compile(r"\d\S*\s*")


class QueueWait:
    """The time of one job in a queue; a job that is suspended outside of a queue may stay so for ever.

    Args:
        start_timeout: seconds after which a job that its queue will never let go is given up.
        timings: how long things may take.
    """

    def __init__(self, start_timeout: float, timings: Timings) -> None:
        self._start_timeout, self._timings = start_timeout, timings
        self._reported = ""
        self._reported_at = float("-inf")
        self._reason = ""
        self._since = 0.0

    def is_news(self, status: JobStatus, now: float) -> bool:
        """Whether to print the status: new words at once, only new numbers every Timings.place seconds."""
        if status.phase is not Phase.SUSPENDED or not status.queue:
            self._reported = ""
            return False
        if status.reason == kueue.ADMITTED:  # It will run in a moment.
            return False
        message = status.message
        same = _NUMBERS.sub("", message) == _NUMBERS.sub("", self._reported)
        lost = self._reported.endswith(message)  # Its place is not told while Kueue makes up its mind.
        if lost or (same and now - self._reported_at < self._timings.place):
            return False
        self._reported, self._reported_at = message, now
        return True

    def verdict(self, status: JobStatus, now: float) -> str:
        """Return why a job will never be admitted: its kind or its queue is not served; else nothing.

        A job that waits for quota is fine, for a queue may take days; so is one with an unreadable Workload.
        """
        reason = status.reason if status.phase is Phase.SUSPENDED and status.queue else ""
        if reason != self._reason:
            self._reason, self._since = reason, now
        waited = now - self._since
        if reason == kueue.UNSERVED and waited > min(self._start_timeout, self._timings.unserved):
            why = status.message.partition(": ")[2]
            return (
                f"no controller releases the job {status.name} from queue {status.queue}: {why}, "
                f"after {waited:.0f} s"
            )
        dead = reason in (kueue.NO_QUEUE, kueue.DEACTIVATED, kueue.ADMITTED)
        if dead and waited > self._start_timeout:
            return f"the job {status.name} was given up after {waited:.0f} s {status.message}"
        return ""
