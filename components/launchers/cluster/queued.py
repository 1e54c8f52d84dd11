"""What is told of a job that waits in a queue, and when it waits in vain."""

import re

from components.launchers.backend import JobStatus, Phase
from components.launchers.cluster import kueue
from components.launchers.timings import Timings

_NUMBERS = re.compile(r"\d\S*\s*")


class Queued:
    """The waiting of one job; other than in a queue it may be suspended for as long as somebody likes.

    Args:
        start_timeout: seconds after which a job that its queue will never let go is given up.
        timings: how long things may take.
    """

    def __init__(self, start_timeout: float, timings: Timings) -> None:
        self._start_timeout, self._timings = start_timeout, timings
        self._told = ""
        self._told_at = float("-inf")
        self._reason = ""
        self._since = 0.0

    def is_news(self, status: JobStatus, now: float) -> bool:
        """Whether something is to be told: new words at once, new numbers in the same ones now and then."""
        if status.phase is not Phase.SUSPENDED or not status.queue:
            self._told = ""
            return False
        if status.reason == kueue.ADMITTED:  # It will run in a moment.
            return False
        message = status.message
        same = _NUMBERS.sub("", message) == _NUMBERS.sub("", self._told)
        lost = self._told.endswith(message)  # Its place is not told while Kueue makes up its mind.
        if lost or (same and now - self._told_at < self._timings.place):
            return False
        self._told, self._told_at = message, now
        return True

    def verdict(self, status: JobStatus, now: float) -> str:
        """Say why a job's queue will never let it go: nobody serves it, or it is in none; else nothing.

        One that waits for quota is well, for a queue may take days; so is one of which nobody tells.
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
