"""Remembers how the pods of a job ended, after they were deleted.

With ExitCode the operator deletes a pod that it will replace as soon as it has ended, and its
status goes with it: polling alone would miss that it was killed for its memory. So a watch of the
pods runs beside the polling.
"""

import itertools
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kubeflow.training.utils.utils import FakeResponse
from kubernetes.client import ApiException
from urllib3.exceptions import HTTPError

from components.launchers.backend import Ending, JobStatus, PodStatus
from components.launchers.cluster import pods
from components.launchers.cluster.client import Cluster

_WATCH_LAG = 1.0  # Seconds that the watch may be behind.


class PodEndings:
    """A watch of a job's pods in a thread of its own; a context manager.

    Where RBAC forbids watching nothing is remembered; the job's events remain as a source.

    Args:
        cluster: where the job is.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._selector = ""
        self._rank: pods.Rank = lambda labels: 0
        self._endings: dict[int, dict[str, Ending | None]] = {}
        """How pods ended, by rank and uid; None for a pod whose end was not observed."""
        self._news = threading.Condition()
        self._stopped = threading.Event()
        self._blind = False
        self._version = ""
        """resourceVersion of the last change that was received."""

    def __enter__(self) -> "PodEndings":
        return self

    def watch(self, selector: str, rank: pods.Rank) -> None:
        """Start the watch, unless it is running.

        Args:
            selector: chooses the job's pods, by their labels.
            rank: tells the number of a pod's node.
        """
        if not self._selector:
            self._selector, self._rank = selector, rank
            threading.Thread(target=self._watch, daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self._stopped.set()

    def remembered(self, status: JobStatus) -> JobStatus:
        """Return a status whose pods say in `before` how the previous pod of their rank ended."""
        for pod in status.pods:
            self._note(pod)
        with self._news:
            # The polled status may be a moment ahead of the watch.
            self._news.wait_for(lambda: self._blind or not self._awaited(status), _WATCH_LAG)
            for rank, uid in self._awaited(status):
                self._endings[rank][uid] = Ending()
        return replace(status, pods=tuple(self._with_ending(pod) for pod in status.pods))

    def _awaited(self, status: JobStatus) -> list[tuple[int, str]]:
        """Rank and uid of each replaced pod whose end was not observed."""
        return [(pod.rank, uid) for pod in status.pods for uid, end in self._earlier(pod) if end is None]

    def _earlier(self, pod: PodStatus) -> list[tuple[str, Ending | None]]:
        """Return the earlier pods of a pod's rank, and how they ended. The watch may know later ones."""
        endings = self._endings.get(pod.rank, {})
        return list(itertools.takewhile(lambda item: item[0] != pod.uid, endings.items()))

    def _with_ending(self, pod: PodStatus) -> PodStatus:
        with self._news:
            endings = [ending for _, ending in self._earlier(pod) if ending]
        last = endings[-1] if endings and endings[-1] != Ending() else None
        return replace(pod, before=pod.before or last)

    def _note(self, pod: PodStatus) -> None:
        ended = pod.phase == "Failed" or pod.exit_code
        ending = Ending(pod.reason, pod.message, pod.exit_code) if ended else None
        with self._news:
            endings = self._endings.setdefault(pod.rank, {})
            if endings.get(pod.uid) in (None, Ending()):
                endings[pod.uid] = ending or endings.get(pod.uid)
                self._news.notify_all()

    def _watch(self) -> None:
        waits = self._cluster.timings.waits()
        while not self._stopped.is_set():
            try:
                for change in self._changes():
                    waits = self._cluster.timings.waits()
                    self._receive(change["type"], change["object"])
                    if self._stopped.is_set():
                        return
            except ApiException as error:
                if error.status in (403, 405):
                    self._blind = True
                    return
                if error.status == 401:
                    self._cluster.refresh()
                if error.status == 410:
                    self._version = ""
            except (HTTPError, OSError, ValueError, LookupError):
                pass  # A stream that broke, or was silent for long: the next one goes on where it was.
            self._stopped.wait(next(waits))

    def _receive(self, event_type: str, body: dict[str, Any]) -> None:
        if event_type == "ERROR":  # What has happened since is not kept any more: begin with what is there.
            self._version = ""
            return
        self._version = body["metadata"]["resourceVersion"]
        if event_type == "BOOKMARK":
            return
        v1_pod = self._pod(body)
        pod = pods.status(v1_pod, self._rank(v1_pod.metadata.labels or {}))
        self._note(pod)
        if event_type == "DELETED":
            with self._news:  # By somebody, or with its node, before it could end.
                self._endings[pod.rank][pod.uid] = self._endings[pod.rank][pod.uid] or Ending("deleted")
                self._news.notify_all()

    def _changes(self) -> Iterator[dict[str, Any]]:
        """Yield the watch events since the last one, or first the existing pods, until the stream ends."""
        timings = self._cluster.timings
        query = {"labelSelector": self._selector, "watch": "true"}
        query["allowWatchBookmarks"] = "true"  # Or the number grows old while nothing happens.
        if self._version:
            query["resourceVersion"] = self._version
        response = self._cluster.api.call_api(
            "/api/v1/namespaces/{namespace}/pods",
            "GET",
            {"namespace": self._cluster.namespace},
            list(query.items()),
            auth_settings=["BearerToken"],
            _return_http_data_only=True,
            _preload_content=False,
            _request_timeout=(timings.connect, timings.quiet),
        )
        rest = b""
        try:
            for chunk in response.stream(1 << 16):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    yield json.loads(line)
        finally:
            response.close()

    def _pod(self, body: dict[str, Any]) -> Any:
        return self._cluster.api.deserialize(FakeResponse(body), "V1Pod")
