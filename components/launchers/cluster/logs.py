"""Follows the logs of one or several pods without loss or repetition, and reads the progress in them."""

import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Iterator
from datetime import UTC, datetime, timedelta

from kubernetes.client import ApiException
from urllib3.exceptions import HTTPError

from components.launchers.backend import LogLine
from components.launchers.cluster.client import ApiError, Cluster, api_error
from components.launchers.cluster.pods import find_main_container

logger = logging.getLogger(__name__)

_OVERLAP = timedelta(seconds=1)  # The lines of stdout and stderr may be slightly out of order.
_MAX_UNREAD_LINES = 1000
_PREVIOUS_TRIES = 5  # Attempts to read a container's previous log, which may be gone.


class PodLog:
    """The complete log of one pod, even if streams drop, stall or end early, or the container restarts.

    Every line has a timestamp. A new stream requests the lines since shortly before the last one, and skips
    those that were already read. Lines are compared by time and text; identical lines are counted.

    Following ends when `stopped` returns true. A pod of the same name with another uid is not followed.
    `tail` is the number of last lines to read; 0 reads all.
    """

    def __init__(
        self,
        cluster: Cluster,
        pod: str,
        uid: str,
        stopped: Callable[[], bool] = lambda: False,
        *,
        tail: int = 0,
    ) -> None:
        self._cluster, self._pod, self._uid = cluster, pod, uid
        self._stopped, self._tail = stopped, tail
        self._recent: deque[tuple[datetime, bytes]] = deque()
        self._seen: Counter[bytes] = Counter()
        self._since: datetime | None = None
        self._rest = b""  # Bytes after the last complete line.
        self._read_lines = 0
        self._container = ""

    def lines(self, *, follow: bool = True) -> Iterator[str]:
        """Yield lines until the pod has ended or is gone; without `follow` only the existing lines."""
        timings, clock = self._cluster.timings, self._cluster.clock
        waits, progress, restarts, previous_tries, ends = timings.retry_delays(), clock.monotonic(), 0, 0, 0
        while not self._stopped() and (state := self._state()):
            present_restarts, started, ended = state
            if not follow or (ended and not started):
                if started:
                    yield from self._existing_lines()
                return
            read_before, rest = self._read_lines, self._rest
            if present_restarts > restarts:
                # The last container may have printed lines after its stream was lost.
                complete = yield from self._read(previous=True)
                previous_tries += 1
                if complete or previous_tries == _PREVIOUS_TRIES:
                    restarts, previous_tries = present_restarts, 0
                    continue
            else:
                complete = started and (yield from self._read(follow=not ended))
            if self._read_lines > read_before:
                waits, progress, ends = timings.retry_delays(), clock.monotonic(), 0
                continue
            if not ended:
                progress = clock.monotonic()  # A pod may be silent for a long time.
            if complete and ended:
                # A lost stream ends like a complete one, so it is read again.
                ends = ends + 1 if self._rest == rest else 0
                if ends > (1 if rest else 0):
                    if rest:
                        yield _split_timestamp(rest)[1]
                    return
            if clock.monotonic() - progress > timings.drain:
                raise ApiError(f"the end of the log of pod {self._pod} cannot be read")
            clock.sleep(min(next(waits), timings.backoff if ended else timings.poll))

    def _existing_lines(self) -> Iterator[str]:
        complete = yield from self._read()
        if self._rest:
            yield _split_timestamp(self._rest)[1]
        if not complete:
            raise ApiError(f"the log of pod {self._pod} could not be read to its end", fix="try again")

    def _state(self) -> tuple[int, bool, bool] | None:
        """Return restarts, and whether the container has started and the pod ended; None if it is gone."""
        cluster = self._cluster
        read, outage = cluster.core.read_namespaced_pod, cluster.timings.outage
        try:
            pod = cluster.call(
                "get", "pods", read, self._pod, cluster.namespace, name=self._pod, patience=outage
            )
        except ApiError as error:
            if error.status == 404:
                return None
            raise
        if pod.metadata.uid != self._uid:
            return None
        self._container, container = find_main_container(pod)
        ended = pod.status.phase in ("Succeeded", "Failed")
        if container is None:
            return 0, False, ended
        now, before = container.state, container.last_state
        started = bool((now and (now.running or now.terminated)) or (before and before.terminated))
        return container.restart_count, started, ended

    def _read(self, *, follow: bool = False, previous: bool = False) -> Generator[str, None, bool]:
        """Yield the new lines of one stream; returns whether it ended properly."""
        replay = self._seen.copy()
        query = {
            "container": self._container,
            "timestamps": "true",
            "follow": "true" if follow else "",
            "previous": "true" if previous else "",
            "sinceTime": f"{self._since:%Y-%m-%dT%H:%M:%SZ}" if self._since else "",
            "tailLines": str(self._tail or ""),
        }
        cluster = self._cluster
        try:
            # The SDK's own method has no sinceTime.
            response = cluster.api.call_api(
                "/api/v1/namespaces/{namespace}/pods/{name}/log",
                "GET",
                {"namespace": cluster.namespace, "name": self._pod},
                [(name, value) for name, value in query.items() if value],
                auth_settings=["BearerToken"],
                _return_http_data_only=True,
                _preload_content=False,
                _request_timeout=(cluster.timings.connect, cluster.timings.quiet),
            )
        except ApiException as error:
            self._raise_if_forbidden(error)
            return previous and error.status in (400, 404)  # There is no previous log.
        except (HTTPError, OSError):
            return False
        rest, complete = b"", False
        try:
            for chunk in response.stream(1 << 16):
                *raws, rest = (rest + chunk).split(b"\n")
                for raw in raws:
                    if self._is_new(raw, replay):
                        yield _split_timestamp(raw)[1]
                if self._stopped():
                    return False
            complete = True
        except (HTTPError, OSError):
            rest = b""  # The next stream has its whole line.
        finally:
            response.close()
        if previous:
            # Nothing is added to the log of a container that has ended.
            if rest and self._is_new(rest, replay):
                yield _split_timestamp(rest)[1]
        else:
            self._rest = rest if not replay[rest] else b""
        return complete

    def _raise_if_forbidden(self, error: ApiException) -> None:
        if error.status == 401:
            self._cluster.refresh()
        elif error.status == 403:
            raise api_error(error, "get", "pods/log", self._pod, self._cluster.namespace)

    def _is_new(self, raw: bytes, replay: Counter[bytes]) -> bool:
        """Record a line and return whether it is new, i.e. not in `replay`; keep the last seconds."""
        if replay[raw] > 0:
            replay[raw] -= 1
            return False
        self._read_lines += 1
        printed, _ = _split_timestamp(raw)
        if printed is None:  # A message of the node, e.g. that the log cannot be read.
            self._seen[raw] = 1
            return True
        self._recent.append((printed, raw))
        self._seen[raw] += 1
        newest = max(printed, self._since + _OVERLAP) if self._since else printed
        self._since = (newest - _OVERLAP).replace(microsecond=0)  # Streams begin at a whole second.
        while self._recent[0][0] < self._since:
            _, old = self._recent.popleft()
            self._seen[old] -= 1
            if not self._seen[old]:
                del self._seen[old]
        return True


def _split_timestamp(raw: bytes) -> tuple[datetime | None, str]:
    """Return the time (None if missing) and the text of a line."""
    stamp, space, text = raw.partition(b" ")
    try:
        printed = datetime.fromisoformat(stamp.decode()) if space else None
    except ValueError:
        printed = None
    if printed is None or printed.tzinfo is None:
        return None, raw.decode(errors="replace")
    return printed.astimezone(UTC), text.decode(errors="replace").removesuffix("\r")


class MergedLogs:
    """The lines of several pods, each log read by a thread; without `follow` only those that exist now."""

    def __init__(self, cluster: Cluster, *, follow: bool = True) -> None:
        self._cluster, self._clock, self._follow = cluster, cluster.clock, follow
        self._lines: deque[LogLine] = deque()
        self._changed = self._clock.condition()  # Notified after each change of these fields.
        self._followed: set[str] = set()  # Uids of pods.
        self._reading: set[str] = set()  # Uids of the pods whose logs have not ended.
        self._stopped = False

    def __enter__(self) -> "MergedLogs":
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def follow(self, pod: str, uid: str, *, tail: int = 0) -> None:
        """Start to read a pod's log (only the last `tail` lines if set), unless already started."""
        if uid not in self._followed:
            log = PodLog(self._cluster, pod, uid, lambda: self._stopped, tail=tail)
            self._followed.add(uid)
            self._reading.add(uid)
            self._clock.start(self._read, pod, uid, log)

    def lines(self, seconds: float) -> Iterator[LogLine]:
        """Yield the lines that arrive within `seconds`."""
        end = self._clock.monotonic() + seconds
        while (remaining := end - self._clock.monotonic()) > 0:
            if line := self._next(remaining):
                yield line

    def drain(self, seconds: float, ended: Collection[str] | None = None) -> Iterator[LogLine]:
        """Yield lines until every log has ended; wait only a limited time for a log that does not end.

        Waits up to `seconds` for each line, and ten times as long in total. If the uids of the `ended` pods
        are known, the logs of other pods are read only while those are read, and for a sixth of `seconds`.
        """
        monotonic = self._clock.monotonic
        start = last_line_at = monotonic()
        while (now := monotonic()) < min(last_line_at + seconds, start + 10 * seconds):
            reading = self._reading.copy()
            awaited = reading if ended is None else reading & set(ended)
            finished = not awaited and (not reading or now > start + seconds / 6)
            if line := self._next(0.0 if finished else 0.05):
                last_line_at = now
                yield line
            elif finished:
                return
        logger.warning("the logs did not come to an end in time; lines may be missing")

    def _next(self, seconds: float) -> LogLine | None:
        """Return the next line; None if none arrives within a time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._lines, seconds):
                return None
            line = self._lines.popleft()
            self._changed.notify_all()
            return line

    def _read(self, pod: str, uid: str, log: PodLog) -> None:
        try:
            for line in log.lines(follow=self._follow):
                with self._changed:
                    self._changed.wait_for(lambda: self._stopped or len(self._lines) < _MAX_UNREAD_LINES)
                    self._lines.append(LogLine(pod, line))
                    self._changed.notify_all()
        except ApiError as error:
            logger.warning("the log of pod %s is not shown: %s", pod, error)
        finally:
            self._reading.discard(uid)
