"""How the pods of a job ended, remembered when they are gone.

With ExitCode the operator deletes a pod that is to be made anew as soon as it has ended, and
its status goes with it: who looks now and then never sees that it was killed for its memory.
So a watch is kept beside the looks.
"""

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


class Ends:
    """A watch of a job's pods in a thread of its own; a context manager.

    Where watching is forbidden nothing is remembered, and what the events say has to do.

    Args:
        cluster: where the job is.
        job: its name.
    """

    def __init__(self, cluster: Cluster, job: str) -> None:
        self._cluster, self._job = cluster, job
        self._known: dict[str, dict[str, Ending]] = {}
        self._stopped = threading.Event()

    def __enter__(self) -> "Ends":
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()

    def remembered(self, status: JobStatus) -> JobStatus:
        """Return a status whose pods know how the pod of their name before them ended."""
        for pod in status.pods:
            self._note(pod)
        return replace(status, pods=tuple(self._completed(pod) for pod in status.pods))

    def _completed(self, pod: PodStatus) -> PodStatus:
        earlier = [end for uid, end in list(self._known.get(pod.name, {}).items()) if uid != pod.uid]
        return replace(pod, before=pod.before or (earlier[-1] if earlier else None))

    def _note(self, pod: PodStatus) -> None:
        if pod.phase == "Failed" or pod.exit_code:
            known = self._known.setdefault(pod.name, {})
            known.setdefault(pod.uid, Ending(pod.reason, pod.message, pod.exit_code))

    def _watch(self) -> None:
        waits = self._cluster.timings.waits()
        while not self._stopped.is_set():
            try:
                for change in self._changes():
                    waits = self._cluster.timings.waits()
                    if change.get("type") == "ERROR":
                        break
                    self._note(pods.status(self._pod(change["object"]), master=True))
                    if self._stopped.is_set():
                        return
            except ApiException as error:
                if error.status in (403, 405):
                    return
                if error.status == 401:
                    self._cluster.refresh()
            except (HTTPError, OSError, ValueError):
                pass  # A stream that broke: the next one begins with the pods that are there.
            self._stopped.wait(next(waits))

    def _changes(self) -> Iterator[dict[str, Any]]:
        """Yield the pods that are there, then each change of one, until the stream ends."""
        timings = self._cluster.timings
        response = self._cluster.api.call_api(
            "/api/v1/namespaces/{namespace}/pods",
            "GET",
            {"namespace": self._cluster.namespace},
            [("labelSelector", f"{pods.LABEL_JOB}={self._job}"), ("watch", "true")],
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
