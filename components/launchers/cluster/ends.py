"""How the pods of a job ended, remembered when they are gone.

With ExitCode the operator deletes a pod that is to be made anew as soon as it has ended, and
its status goes with it: who looks now and then never sees that it was killed for its memory.
So a watch is kept beside the looks.
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

_MOMENT = 1.0  # Seconds that the watch may be behind.


class Ends:
    """A watch of a job's pods in a thread of its own; a context manager.

    Where watching is forbidden nothing is remembered, and what the events say has to do.

    Args:
        cluster: where the job is.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._selector = ""
        self._rank: pods.Rank = lambda labels: 0
        self._known: dict[int, dict[str, Ending | None]] = {}
        """How pods ended, by rank and uid; None of one that was seen and not seen to end."""
        self._news = threading.Condition()
        self._stopped = threading.Event()
        self._blind = False
        self._version = ""
        """The cluster's number of the last change that was seen."""

    def __enter__(self) -> "Ends":
        return self

    def watch(self, selector: str, rank: pods.Rank) -> None:
        """Begin to watch, unless that was done.

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
        """Return a status whose pods know how the pod of their rank before them ended."""
        for pod in status.pods:
            self._note(pod)
        with self._news:
            # A look may be ahead of the watch, by a moment.
            self._news.wait_for(lambda: self._blind or not self._awaited(status), _MOMENT)
            for rank, uid in self._awaited(status):
                self._known[rank][uid] = Ending()
        return replace(status, pods=tuple(self._completed(pod) for pod in status.pods))

    def _awaited(self, status: JobStatus) -> list[tuple[int, str]]:
        """Rank and uid of each pod that was replaced, and was not seen to end."""
        return [(pod.rank, uid) for pod in status.pods for uid, end in self._earlier(pod) if end is None]

    def _earlier(self, pod: PodStatus) -> list[tuple[str, Ending | None]]:
        """Return the pods before one, and how they ended. A look may also be behind the watch."""
        known = self._known.get(pod.rank, {})
        return list(itertools.takewhile(lambda item: item[0] != pod.uid, known.items()))

    def _completed(self, pod: PodStatus) -> PodStatus:
        with self._news:
            ends = [end for _, end in self._earlier(pod) if end]
        last = ends[-1] if ends and ends[-1] != Ending() else None
        return replace(pod, before=pod.before or last)

    def _note(self, pod: PodStatus) -> None:
        ended = pod.phase == "Failed" or pod.exit_code
        end = Ending(pod.reason, pod.message, pod.exit_code) if ended else None
        with self._news:
            known = self._known.setdefault(pod.rank, {})
            if known.get(pod.uid) in (None, Ending()):
                known[pod.uid] = end or known.get(pod.uid)
                self._news.notify_all()

    def _watch(self) -> None:
        waits = self._cluster.timings.waits()
        while not self._stopped.is_set():
            try:
                for change in self._changes():
                    waits = self._cluster.timings.waits()
                    self._take(change["type"], change["object"])
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

    def _take(self, kind: str, body: dict[str, Any]) -> None:
        if kind == "ERROR":  # What has happened since is not kept any more: begin with what is there.
            self._version = ""
            return
        self._version = body["metadata"]["resourceVersion"]
        if kind == "BOOKMARK":
            return
        found = self._pod(body)
        pod = pods.status(found, self._rank(found.metadata.labels or {}))
        self._note(pod)
        if kind == "DELETED":
            with self._news:  # By somebody, or with its node, before it could end.
                self._known[pod.rank][pod.uid] = self._known[pod.rank][pod.uid] or Ending("deleted")
                self._news.notify_all()

    def _changes(self) -> Iterator[dict[str, Any]]:
        """Yield changes of pods since the last one, or first those that are there, until the stream ends."""
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
