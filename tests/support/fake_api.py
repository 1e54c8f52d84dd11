"""A Kubernetes API server over HTTP, as much of it as kubedet asks, that can be told to misbehave.

def test_something(fake_cluster):          # A FakeCluster that a real client reaches by HTTP.
    fake_cluster.lives["train-worker-0"] = [life]
    fake_cluster.faults.append(Fault("POST", "pytorchjobs", status=503, times=2))
    subprocess.run([...], env=fake_cluster.environment)    # KUBECONFIG names it.
"""

import json
import os
import re
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, urlsplit

import pytest
from fake_cluster import JOBS, PODS, FakeCluster
from fake_streams import Streams, selected
from fake_trainer import DENIED, RUNTIMES, TRAINJOBS
from web_server import WebServer

PATH = re.compile(
    r"/(?:api/v1|apis/(?P<group>[^/]+)/v1(?:alpha1)?)(?:/namespaces/(?P<namespace>[^/]+)(?=/))?"
    r"/(?P<resource>[a-z]+)(?:/(?P<name>[^/]+)(?:/(?P<sub>[a-z]+))?)?"
)
GROUPS = {"kubeflow.org": "pytorchjobs", "trainer.kubeflow.org": "trainjobs", "kueue.x-k8s.io": "workloads"}
"""Groups that a cluster may not know, and by what `installed` names them."""
VERSION = {
    "major": "1", "minor": "33", "gitVersion": "v1.33.0", "gitCommit": "", "gitTreeState": "",
    "buildDate": "", "goVersion": "", "compiler": "", "platform": "linux/amd64",
}  # fmt: skip
REASONS = {403: "Forbidden", 404: "NotFound", 409: "AlreadyExists", 410: "Gone", 429: "TooManyRequests"}


@dataclass
class Fault:
    """Something that goes wrong with the next requests that match."""

    method: str = ""  # GET, POST, PATCH or DELETE; empty is any.
    path: str = ""  # A part of path and query.
    times: int = 1  # How many requests.
    status: int = 0  # Answer this status instead.
    message: str = "a fault"  # With this message.
    retry_after: int = 0  # And this Retry-After, in seconds.
    delay: float = 0.0  # Wait so long before anything else, in seconds.
    drop: bool = False  # Close the connection without an answer, nothing done.
    lost: bool = False  # Do what was asked and close the connection without an answer.
    cut: int = -1  # Of a log: break the connection after so many bytes.
    end: int = -1  # Of a log: end it well after so many bytes.
    stall: float = 0.0  # Of a log: say nothing more for so many seconds after `cut` bytes (then break).


@dataclass
class Seen:
    method: str
    path: str
    body: dict | None = None
    at: float = field(default_factory=time.monotonic)


class FakeApi(FakeCluster):
    """A FakeCluster behind HTTP on this machine; a context manager."""

    def __init__(self, folder):
        super().__init__()
        self.faults = []
        self.seen = []
        self.asked = set()  # What was asked for so far, as RBAC calls it: verb and resource.
        self.kubeconfig = folder / "kubeconfig"
        self.closed = False
        self.token = "first"  # What the Authorization header must hold, unless it is empty.
        self._server = WebServer(type("Handler", (_Handler,), {"cluster": self}))
        self.url = self._server.url
        self.write_kubeconfig()

    @property
    def environment(self):
        """This process's environment, with a kubeconfig of this cluster, for a subprocess."""
        return {**os.environ, "KUBECONFIG": str(self.kubeconfig), "NO_PROXY": "127.0.0.1"}

    def write_kubeconfig(self, namespace="default"):
        context = {"cluster": "fake", "user": "me", "namespace": namespace}
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
            "users": [{"name": "me", "user": {"token": self.token}}],
            "contexts": [{"name": "fake", "context": context}],
        }  # fmt: skip
        self.kubeconfig.write_text(json.dumps(config))

    def requests(self, method="", path=""):
        return [seen for seen in list(self.seen) if method in seen.method and path in seen.path]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed = True
        self._server.server_close()
        for pod in self.pods.values():
            pod.deleted.set()


@pytest.fixture
def fake_cluster(tmp_path, monkeypatch):
    """A FakeApi whom KUBECONFIG names."""
    with FakeApi(tmp_path) as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield cluster


class _Handler(Streams, BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # Else each answer waits 40 ms for the client's thanks.
    cluster: FakeApi

    def do_GET(self):
        self._serve("get")

    def do_POST(self):
        self._serve("create")

    def do_PATCH(self):
        self._serve("patch")

    def do_DELETE(self):
        self._serve("delete")

    def _serve(self, verb):
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        self.cluster.seen.append(Seen(self.command, self.path, body))
        self._silent = False
        fault = self._fault()
        time.sleep(fault.delay)
        if fault.drop:
            return self.hang_up()
        if fault.status:
            return self._error(fault.status, fault.message, fault.retry_after)
        self._silent = fault.lost
        if self.cluster.token and self.headers.get("Authorization") != f"Bearer {self.cluster.token}":
            return self._error(401, "Unauthorized")
        return self._answer(verb, body, fault)

    def _fault(self):
        for fault in self.cluster.faults:
            if fault.times > 0 and fault.method in self.command and fault.path in self.path:
                fault.times -= 1
                return fault
        return Fault()

    def _answer(self, verb, body, fault):
        url = urlsplit(self.path)
        query = {key: values[0].replace("True", "true") for key, values in parse_qs(url.query).items()}
        if url.path.rstrip("/") == "/version":
            return self._json(VERSION)
        match = PATH.fullmatch(url.path)
        if not match or (match["group"] in GROUPS and GROUPS[match["group"]] not in self.cluster.installed):
            return self._send(404, b"404 page not found\n", "text/plain")
        namespace, resource, name, sub = match["namespace"] or "", *match.group("resource", "name", "sub")
        if resource == "selfsubjectaccessreviews":
            attributes = body["spec"]["resourceAttributes"]
            what = "/".join(filter(None, [attributes["resource"], attributes.get("subresource")]))
            allowed = (attributes["verb"], what) not in self.cluster.denied
            return self._json(body | {"status": {"allowed": allowed}})
        verb = "list" if verb == "get" and not name else verb
        what = f"{resource}/{sub}" if sub else resource
        watching = verb == "list" and query.get("watch") == "true"
        self.cluster.asked.add(("watch" if watching else verb, what))
        if (verb, what) in self.cluster.denied:
            return self._error(
                403,
                f'{what} is forbidden: User "me" cannot {verb} resource "{what}" in API group '
                f'"{match["group"] or ""}" in the namespace "{namespace}"',
            )
        if verb == "create" and query.get("dryRun") == "All":
            return self._dry_run(resource, namespace, body)
        if verb == "create":
            return self._create(resource, namespace, body)
        if watching:
            denied = ("watch", resource) in self.cluster.denied
            return self._error(403, "no watching") if denied else self.watch(resource, namespace, query)
        if verb == "list":
            return self._list(resource, namespace, query)
        stored = self.cluster.objects.get((resource, namespace, name))
        if stored is None:
            return self._error(404, f'{resource} "{name}" not found', name=name)
        if verb == "delete":
            uid = ((body or {}).get("preconditions") or {}).get("uid")
            if uid not in (None, stored["metadata"]["uid"]):
                return self._error(409, f"Precondition failed: UID in precondition: {uid}")
            self._delete(resource, namespace, name)
            return self._json({"kind": "Status", "status": "Success"})
        if verb == "patch":
            return self._patch(resource, namespace, stored, body)
        return (
            self.log(self.cluster.pod(name, namespace), query, fault) if sub == "log" else self._json(stored)
        )

    def _dry_run(self, resource, namespace, body):
        if refusal := self.cluster.refusal(resource, namespace, body):
            return self._error(*refusal)
        return self._json(body | {"metadata": body["metadata"] | {"uid": "none"}}, 201)

    def _create(self, resource, namespace, body):
        name = body["metadata"]["name"]
        if (resource, namespace, name) in self.cluster.objects:
            return self._error(409, f'{resource} "{name}" already exists', name=name)
        if resource != JOBS and (refusal := self.cluster.refusal(resource, namespace, body)):
            return self._error(*refusal)
        of_job = resource in (JOBS, TRAINJOBS)
        create = self.cluster.create_job if of_job else lambda *a: self.cluster.add(resource, *a)
        return self._json(create(namespace, body), 201)

    def _patch(self, resource, namespace, stored, body):
        if self.headers["Content-Type"] != "application/merge-patch+json":
            return self._error(415, "the body of the request was in an unknown format")
        runtime = (RUNTIMES, namespace, stored["spec"].get("runtimeRef", {}).get("name"))
        if resource == TRAINJOBS and runtime not in self.cluster.objects:
            return self._error(403, f"{DENIED}specified trainingRuntime must be created before the TrainJob")
        _merge(stored, body)
        return self._json(stored)

    def _delete(self, resource, namespace, name):
        if resource in (JOBS, TRAINJOBS):
            self.cluster.delete_job(namespace, name)
        elif resource == PODS:
            self.cluster.delete_pod(self.cluster.pod(name, namespace))
        else:
            del self.cluster.objects[resource, namespace, name]

    def _list(self, resource, namespace, query):
        items = [
            body
            for (kind, space, _), body in list(self.cluster.objects.items())
            if kind == resource
            and namespace in ("", space)
            and selected(query.get("labelSelector", ""), body["metadata"].get("labels", {}).get)
            and selected(query.get("fieldSelector", ""), lambda path, body=body: _field(body, path))
        ]
        self._json({"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": items})

    def _json(self, body, status=200):
        self._send(status, json.dumps(body).encode())

    def _error(self, status, message, retry_after=0, name=""):
        about = {"name": name, "kind": message.partition(" ")[0]}
        body = {"kind": "Status", "status": "Failure", "code": status, "message": message,
                "reason": REASONS.get(status, ""), "details": about}  # fmt: skip
        self._send(status, json.dumps(body).encode(), retry_after=retry_after)

    def _send(self, status, data, kind="application/json", retry_after=0):
        if self._silent:
            return self.hang_up()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        if retry_after:
            self.send_header("Retry-After", str(retry_after))
        self.end_headers()
        return self.wfile.write(data)


def _merge(body, patch):
    for name, value in patch.items():
        if value is None:
            body.pop(name, None)
        elif isinstance(value, dict) and isinstance(body.get(name), dict):
            _merge(body[name], value)
        else:
            body[name] = value


def _field(body, path):
    for part in path.split("."):
        body = body.get(part, {})
    return body
