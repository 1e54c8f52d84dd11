"""A small process that deletes a training job as soon as its run ends.

When a run is terminated, a step has 0.3 to 2 s between SIGTERM and SIGKILL, too little on a busy node to open
a connection. So the launcher starts this file as a program when it submits the job; the program imports only
the standard library. It watches the run's Workflow and sends the DELETE as soon as the run has ended, usually
before the signal arrives. If only the pod of the step is evicted or deleted, the job continues.
"""

import http.client
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

_TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
_KEEPALIVE_SECONDS = 20.0  # The API server closes connections that are idle for longer than 90 s.
_WATCH_SECONDS = 60
_DELETE_SECONDS = 30.0
_LATE_CREATION_SECONDS = 3.0  # A create request sent before the DELETE may arrive after it.
_STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT}
_DELETED_STATUSES = (200, 202, 404)
_FIELDS = {
    "metadata": ("deletionTimestamp",),
    "spec": ("shutdown", "activeDeadlineSeconds"),
    "status": ("startedAt", "finishedAt"),
}


def has_ended(workflow: Mapping[str, Any], now: datetime) -> bool:
    """Return whether the run of a Workflow is terminated, deleted, finished or past its deadline."""
    spec, status = workflow.get("spec") or {}, workflow.get("status") or {}
    if spec.get("shutdown") or status.get("finishedAt") or workflow["metadata"].get("deletionTimestamp"):
        return True
    seconds, started = spec.get("activeDeadlineSeconds"), status.get("startedAt")
    if seconds is None:
        return False
    # Kubeflow Pipelines terminates a run by a deadline of 0.
    began = datetime.fromisoformat(started) if started else now
    return seconds == 0 or (now - began).total_seconds() > float(seconds)


def start_deletion_guard(
    client: Any, namespace: str, workflow: str, pod: str, kinds: Iterable[tuple[str, str, str]], job: str
) -> subprocess.Popen[bytes]:
    """Start the process that deletes the job; it ends when this process ends.

    `client` is the configuration of Kubernetes' client; `kinds` are (group, version, plural).
    """

    def path(group: str, version: str, plural: str, name: str) -> str:
        return f"/apis/{group}/{version}/namespaces/{quote(namespace)}/{plural}/{quote(name)}"

    request = {
        "parent": os.getpid(),
        "server": client.host,
        "ca": client.ssl_ca_cert,
        "authorization": client.get_api_key_with_prefix("authorization") or "",
        "workflow": path("argoproj.io", "v1alpha1", "workflows", workflow),
        "pod": f"/api/v1/namespaces/{quote(namespace)}/pods/{quote(pod)}",
        "jobs": [path(*kind, job) for kind in kinds],
    }
    process = subprocess.Popen([sys.executable, "-I", __file__], stdin=subprocess.PIPE)
    assert process.stdin
    # Through a pipe: arguments and environment of a process may be visible to others.
    with process.stdin as pipe:
        pipe.write(json.dumps(request).encode())
    return process


class _Server:
    """A connection to the API server that reconnects when it breaks."""

    def __init__(self, request: Mapping[str, Any], timeout: float) -> None:
        self._url, self._timeout = urlsplit(request["server"]), timeout
        self._ca, self._authorization = request["ca"], request["authorization"]
        self._connection: http.client.HTTPConnection | None = None

    def send(self, method: str, path: str, body: Any = None, accept: str = "application/json") -> Any:
        """Send a request, on a new connection if the old one fails, and return the response."""
        headers = {"Accept": accept, "Content-Type": "application/json"}
        token = f"Bearer {_TOKEN.read_text().strip()}" if _TOKEN.exists() else self._authorization
        headers |= {"Authorization": token} if token else {}
        data = None if body is None else json.dumps(body)
        for is_last in (False, True):
            is_new = self._connection is None
            self._connection = self._connection or self._connect()
            try:
                self._connection.request(method, path, data, headers)
                return self._connection.getresponse()
            except (OSError, http.client.HTTPException):
                self._connection.close()
                self._connection = None
                if is_new or is_last:
                    raise
        return None

    def status(self, method: str, path: str, body: Any = None, accept: str = "application/json") -> int:
        """Send a request and return the status of the response; 0: no response."""
        try:
            response = self.send(method, path, body, accept)
            response.read()
        except (OSError, http.client.HTTPException):
            return 0
        return int(response.status)

    def _connect(self) -> http.client.HTTPConnection:
        host, port = self._url.hostname or "", self._url.port
        if self._url.scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=self._timeout)
        context = ssl.create_default_context(cafile=self._ca)
        # Python 3.13 and later refuse certificates without extensions that many clusters leave out.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        return http.client.HTTPSConnection(host, port, timeout=self._timeout, context=context)


class _Watch:
    """Watches an object; `seen` has its newest fields, and is None before the first response."""

    def __init__(self, request: Mapping[str, Any], path: str) -> None:
        self.seen: Mapping[str, Any] | None = None
        self._request, self._path = request, path

    def follow(self) -> None:
        collection, _, name = self._path.rpartition("/")
        query = f"watch=true&fieldSelector=metadata.name%3D{name}&timeoutSeconds={_WATCH_SECONDS}"
        server = _Server(self._request, 1.5 * _WATCH_SECONDS)
        while True:
            try:
                response = server.send("GET", f"{collection}?{query}")
                if response.status == 200:
                    for line in response:
                        event = json.loads(line)
                        if event["type"] == "DELETED":
                            self.seen = {"metadata": {"deletionTimestamp": "now"}}
                        elif event["type"] in ("ADDED", "MODIFIED"):
                            # The status of a Workflow has a node for each pod: hundreds of kilobytes.
                            body = event["object"]
                            self.seen = {
                                part: {name: (body.get(part) or {}).get(name) for name in names}
                                for part, names in _FIELDS.items()
                            }
                else:
                    response.read()
                    time.sleep(_WATCH_SECONDS)
            except (OSError, http.client.HTTPException, ValueError, LookupError):
                time.sleep(1.0)


def _query_has_ended(server: _Server, workflow: str) -> bool | None:
    """Query the API server whether the run has ended; None: no response."""
    try:
        response = server.send("GET", workflow)
        text = response.read()
        if response.status == 200:
            return has_ended(json.loads(text), datetime.now(UTC))
    except (OSError, http.client.HTTPException, ValueError, LookupError):
        return None
    return True if response.status == 404 else None


def _delete(server: _Server, jobs: Iterable[str]) -> None:
    """Delete the jobs at these paths, and repeat it for a while in case a creation is still in progress."""
    paths, end = list(jobs), time.monotonic() + _DELETE_SECONDS
    body = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
    while time.monotonic() < end:
        answers = [server.status("DELETE", path, body) for path in paths]
        if all(status in _DELETED_STATUSES or status == 403 for status in answers):
            end = min(end, time.monotonic() + _LATE_CREATION_SECONDS)
        time.sleep(0.5)


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    request = json.load(sys.stdin)
    run, pod = _Watch(request, request["workflow"]), _Watch(request, request["pod"])
    for watch in (run, pod):
        threading.Thread(target=watch.follow, daemon=True).start()
    server = _Server(request, 5.0)
    warmed, leaving = float("-inf"), False
    while os.getppid() == request["parent"]:
        if time.monotonic() - warmed > _KEEPALIVE_SECONDS:
            warmed = time.monotonic()
            server.status("GET", request["jobs"][0], accept=_METADATA)
        stopping = signal.sigtimedwait(_STOP_SIGNALS, 0.2)
        leaves = pod.seen is not None and bool(pod.seen["metadata"].get("deletionTimestamp"))
        ended = run.seen is not None and has_ended(run.seen, datetime.now(UTC))
        if not ended and (stopping or (leaves and not leaving)):
            answer = _query_has_ended(server, request["workflow"])
            if answer is False:
                server.status("DELETE", request["pod"], {"gracePeriodSeconds": 0})
            ended, leaving = bool(answer), answer is not None
        if ended:
            _delete(server, request["jobs"])
            return


if __name__ == "__main__":
    main()
