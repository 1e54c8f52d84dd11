"""The progress of a training for observers: events in its log, and the status of a TrainJob.

If Kubeflow Trainer's feature gate TrainJobStatus is on, its controller
passes the status URL to each container, and a thread sends the newest state periodically.
"""

import datetime
import http.client
import json
import logging
import os
import ssl
import threading
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from trainer.base import events, log

TASK, UNIT = "train", "steps"
"""Task and unit of the training's progress lines."""
LOSS, SPEED, AP = "loss", "images_per_second", "coco/AP"
"""Names of the metrics, as in metrics.jsonl."""

URL = "KUBEFLOW_TRAINER_SERVER_URL"  # environment variable: URL of this job's status
CA = "KUBEFLOW_TRAINER_SERVER_CA_CERT"  # environment variable: path of the trusted certificates
TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"  # noqa: S105 - a name of a variable
"""Environment variable: path of the token, which is replaced from time to time."""

_INTERVAL = 10.0
_TIMEOUT = 3.0  # seconds to connect, and for each piece of the response
_CLOSE_SECONDS = 4.0  # seconds for the last state: a pod that is stopped has little time
_MAX_REFUSALS = 3  # refusals in a row after which no more requests are sent
_MAX_SECONDS = 2**31 - 1  # largest number of seconds that the status can hold
_LOG = logging.getLogger("train")


@dataclass(frozen=True)
class TrainingProgress:
    """The progress of a training, for a person."""

    percent: int  # share of all its steps, including those of earlier processes: 0 to 100
    remaining_seconds: int | None = None  # to the end at the current rate; None if unknown
    metrics: dict[str, float] = field(default_factory=dict)  # the newest of LOSS, SPEED and AP, if known


def percent(done: int, total: int) -> int:
    """Return the share of steps that are done: 100 only with the last one."""
    return min(100 * done // max(total, 1), 100)


def read(lines: Iterable[str]) -> TrainingProgress | None:
    """Return the newest numbers among the events in a training's log; None if there are none."""
    share, seconds, metrics = None, None, dict[str, float]()
    for event in events.select(lines):
        if isinstance(event, events.Progress) and (event.task, event.unit) == (TASK, UNIT):
            eta = 0.0 if event.done >= (event.total or 0) else event.eta
            share, seconds = percent(event.done, event.total or 0), None if eta is None else round(eta)
            metrics |= event.metrics
        elif isinstance(event, events.Resumed):
            share, seconds = percent(event.step, event.steps), None
        elif isinstance(event, events.Scored) and AP in event.metrics:
            metrics[AP] = event.metrics[AP]
    if share is None:
        return None
    return TrainingProgress(
        share, seconds, {name: metrics[name] for name in (LOSS, SPEED, AP) if name in metrics}
    )


class Reporter:
    """Keeps the status of a job up to date. Its methods raise nothing; all but `close` return at once."""

    def __init__(self, url: str = "", ca: str = "", token: str = "") -> None:
        """Report to a server, if `url` is given; see URL, CA and TOKEN."""
        self._url, self._ca, self._token = url, ca, token
        self._lock = threading.Lock()
        self._metrics: dict[str, float] = {}
        self._place: tuple[int, int | None] | None = None  # percent and remaining seconds
        self._status: dict[str, object] | None = None  # to be sent
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._warned = False
        self._refusals = 0

    @classmethod
    def from_environment(cls) -> "Reporter":
        """Report to the server that the environment names, if any."""
        url, ca, token = (os.environ.get(name, "") for name in (URL, CA, TOKEN))
        return cls(url, ca, token) if url and ca and token else cls()

    def show(self, bar: log.Bar) -> None:
        """Report the progress of a bar with a total."""
        if self._url:
            total = bar.total or 0
            eta = 0.0 if bar.done >= total else bar.eta
            self._renew((percent(bar.done, total), None if eta is None else min(round(eta), _MAX_SECONDS)))

    def measure(self, metrics: Mapping[str, float]) -> None:
        """Report metrics in addition to earlier ones. It is thread-safe."""
        if not self._url:
            return
        with self._lock:
            self._metrics.update(metrics)
            place = self._place
        if place:
            self._renew(place)

    def close(self) -> None:
        """Send the last state within a few seconds, and end."""
        self._closing.set()
        if self._thread:
            self._thread.join(_CLOSE_SECONDS)

    def _renew(self, place: tuple[int, int | None]) -> None:
        """Compose Kubeflow Trainer's `trainerStatus`, for the thread to send."""
        now = datetime.datetime.now(datetime.UTC)
        with self._lock:
            self._place = place
            self._status = {
                "progressPercentage": place[0],
                **({} if place[1] is None else {"estimatedRemainingSeconds": place[1]}),
                "metrics": [{"name": name, "value": f"{value:.6g}"} for name, value in self._metrics.items()],
                "lastUpdatedTime": f"{now:%Y-%m-%dT%H:%M:%SZ}",
            }
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="status", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        ending = False
        while not ending and self._refusals < _MAX_REFUSALS:
            ending = self._closing.is_set()
            with self._lock:
                status, self._status = self._status, None
            if status and not self._send(status):
                with self._lock:
                    self._status = self._status or status  # Retry, unless there is a newer one.
            if not ending:
                self._closing.wait(_INTERVAL)

    def _send(self, status: dict[str, object]) -> bool:
        """Send a status; return whether the server took it."""
        try:
            place = urlsplit(self._url)
            if place.scheme != "https":
                raise OSError(f"{self._url} is not an https URL")
            trusted = ssl.create_default_context(cafile=self._ca)
            # Python 3.13 is stricter than the controllers' certificates.
            trusted.verify_flags &= ~ssl.VERIFY_X509_STRICT
            token = Path(self._token).read_text().strip()
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            server = http.client.HTTPSConnection(
                place.hostname or "", place.port, timeout=_TIMEOUT, context=trusted
            )
            with closing(server):
                server.request("POST", place.path, json.dumps({"trainerStatus": status}).encode(), headers)
                response = server.getresponse()
                code, text = response.status, response.read(10_000)
        except Exception as error:
            # The text of other errors may contain a header with the token.
            self._warn(str(error) if isinstance(error, OSError) else type(error).__name__)
            return False
        if code < 300:
            self._refusals = 0
            return True
        # Busy and temporarily broken servers do not refuse.
        self._refusals = self._refusals + 1 if 300 <= code < 500 and code not in (408, 429) else 0
        message = response.reason
        with suppress(ValueError, AttributeError):  # It may be an error of Kubernetes.
            message = json.loads(text).get("message") or message
        self._warn(f"{code} {message}")
        return False

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            _LOG.warning("the job's status does not show the progress: %s; the training continues", reason)
