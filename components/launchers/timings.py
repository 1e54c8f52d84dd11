"""Time limits and intervals of the backends."""

import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Timings:
    """Time limits and intervals, all in seconds."""

    connect: float = 5.0
    """Until the API server takes a connection."""
    read: float = 30.0
    """Until it answers a request."""
    patience: float = 45.0
    """Until a request that fails for a passing reason is given up."""
    outage: float = 1800.0
    """How long the API server may be away while a job is watched."""
    backoff: float = 0.5
    """First wait after a failure; each further one is twice as long."""
    longest_backoff: float = 15.0
    """Longest wait after a failure."""
    poll: float = 3.0
    """Between two polls of a job's status."""
    heartbeat: float = 60.0
    """Silence after which a status line is printed."""
    quiet: float = 60.0
    """Silence after which a log's stream is opened anew, for it may be dead."""
    drain: float = 60.0
    """For the last lines of a job that has ended."""
    removal: float = 300.0
    """Until a deleted job and its pods are gone."""
    stop: float = 20.0
    """For the deletion of a job when this process is asked to end."""
    lasting: float = 120.0
    """How long a pod may wait for a reason that a person may still fix, e.g. a missing Secret."""
    unserved: float = 60.0
    """Until Kueue has created the Workload of a job in one of its queues."""
    place: float = 60.0
    """Between two lines on a job's position in its queue."""
    replaced: float = 10.0
    """For another job of the same name to appear, when ours is gone."""
    glance: float = 1.0
    """For a response after a stop signal, when this process may have a second left."""
    submit: float = 180.0
    """For a submission through another program."""
    late: float = 3.0
    """How late an aborted request may still take effect."""

    def waits(self) -> Iterator[float]:
        """Yield how long to wait after each failure: twice as long each time, with jitter."""
        wait = self.backoff
        while True:
            yield wait * random.uniform(0.5, 1.0)
            wait = min(2 * wait, self.longest_backoff)
