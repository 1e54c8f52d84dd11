"""The logs of several pods, merged into one stream of lines."""

import contextlib
import logging
import threading
import time
from collections.abc import Collection, Iterator
from queue import Empty, Full, Queue

from components.launchers.backend import LogLine
from components.launchers.cluster.api_errors import ApiError
from components.launchers.cluster.client import Cluster
from components.launchers.cluster.pod_log import PodLog

logger = logging.getLogger(__name__)


class MergedLogs:
    """The lines of several pods, each log read by a thread; a context manager.

    Args:
        cluster: where the pods are.
        follow: read on as lines come; else only what is there now.
    """

    def __init__(self, cluster: Cluster, *, follow: bool = True) -> None:
        self._cluster, self._follow = cluster, follow
        self._lines: Queue[LogLine] = Queue(maxsize=1000)
        self._readers: dict[str, threading.Thread] = {}
        self._stopped = threading.Event()

    def __enter__(self) -> "MergedLogs":
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()

    def follow(self, pod: str, uid: str, *, tail: int = 0) -> None:
        """Start to read a pod's log, unless that was started already.

        Args:
            pod: the pod's name.
            uid: its identity.
            tail: only so many last lines; 0 is all.
        """
        if uid not in self._readers:
            log = PodLog(self._cluster, pod, uid, self._stopped, tail=tail)
            self._readers[uid] = threading.Thread(target=self._read, args=[pod, log], daemon=True)
            self._readers[uid].start()

    def lines(self, seconds: float) -> Iterator[LogLine]:
        """Yield the lines that come within a time."""
        end = time.monotonic() + seconds
        while (remaining := end - time.monotonic()) > 0:
            with contextlib.suppress(Empty):
                yield self._lines.get(timeout=remaining)

    def rest(self, seconds: float, ended: Collection[str] | None = None) -> Iterator[LogLine]:
        """Yield lines until every log was read to its end; of one that does not end, for a while.

        Args:
            seconds: to wait for a further line; ten times as long in all.
            ended: uids of pods that have ended. A log of another, which is being stopped and may take
                its time, is read for as long as those are, and a sixth of the time; None waits for all.
        """
        start = last_line_at = time.monotonic()
        while (now := time.monotonic()) < min(last_line_at + seconds, start + 10 * seconds):
            alive = {uid for uid, thread in self._readers.items() if thread.is_alive()}
            awaited = alive if ended is None else alive & set(ended)
            finished = not awaited and (not alive or now > start + seconds / 6)
            try:
                yield self._lines.get(timeout=0.0 if finished else 0.05)
                last_line_at = now
            except Empty:
                if finished:
                    return
        logger.warning("the logs did not come to an end in time; lines may be missing")

    def _read(self, pod: str, log: PodLog) -> None:
        try:
            for line in log.lines(follow=self._follow):
                self._put(LogLine(pod, line))
        except ApiError as error:
            logger.warning("the log of pod %s is not shown: %s", pod, error)

    def _put(self, line: LogLine) -> None:
        while not self._stopped.is_set():
            try:
                return self._lines.put(line, timeout=1.0)
            except Full:
                continue
