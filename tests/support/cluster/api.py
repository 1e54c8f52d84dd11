"""The API server of a simulated cluster: requests in, responses out, and faults.

`Pool` connects the Kubernetes client inside this process, `server.py` over HTTP.
"""

import json
import re
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from urllib.parse import parse_qs, urlencode, urlsplit

from urllib3.exceptions import ProtocolError, ReadTimeoutError

from cluster.clock import SimulatedClock
from cluster.state import RUNTIMES, TRAINJOBS, ClusterState

PATH = re.compile(
    r"/(?:api/v1|apis/(?P<group>[^/]+)/(?P<version>v[^/]+))(?:/namespaces/(?P<namespace>[^/]+)(?=/))?"
    r"/(?P<resource>[a-z]+)(?:/(?P<name>[^/]+)(?:/(?P<sub>[a-z]+))?)?"
)
GROUPS = {"kubeflow.org": "pytorchjobs", "trainer.kubeflow.org": "trainjobs"}
"""Groups that a cluster may not know, and by which resource `installed` names them."""
KUEUE = "kueue.x-k8s.io"
VERSION = {
    "major": "1", "minor": "33", "gitVersion": "v1.33.0", "gitCommit": "", "gitTreeState": "",
    "buildDate": "", "goVersion": "", "compiler": "", "platform": "linux/amd64",
}  # fmt: skip
REASONS = {403: "Forbidden", 404: "NotFound", 409: "AlreadyExists", 410: "Gone", 429: "TooManyRequests"}


@dataclass
class Fault:
    """What goes wrong with the next requests that match."""

    method: str = ""  # GET, POST, PATCH or DELETE; empty is any.
    path: str = ""  # A part of path and query.
    times: int = 1  # How many requests.
    status: int = 0  # Answer this status instead.
    message: str = "a fault"  # With this message.
    retry_after: int = 0  # And this Retry-After, in seconds.
    delay: float = 0.0  # Wait this long before anything else, in seconds.
    drop: bool = False  # Close the connection without an answer, with nothing done.
    lost: bool = False  # Do what was asked, and close the connection without an answer.
    cut: int = -1  # Of a log: break the connection after this number of bytes.
    end: int = -1  # Of a log: end it properly after this number of bytes.
    stall: float = 0.0  # Of a log: send nothing for so many seconds after `cut` bytes (then break).


@dataclass
class Request:
    method: str
    path: str  # With the query.
    body: dict | None = None
    headers: dict = field(default_factory=dict)
    at: float = 0.0  # By the cluster's clock.
    silence: float | None = None  # Seconds after which the client closes a stream that sends nothing.


@dataclass
class Response:
    status: int
    body: bytes = b""
    stream: object = None  # An iterator of bytes, in place of the body.
    kind: str = "application/json"
    retry_after: int = 0


class Broken(Exception):
    """The connection is closed."""


class Silent(Broken):
    """The client has waited long enough."""


class SimulatedCluster(ClusterState):
    """A cluster with an API server, on a clock that jumps unless another one is given."""

    def __init__(self, clock=None, seed=0):
        super().__init__(clock or SimulatedClock(), seed)
        self.faults = []
        self.seen = []
        self.asked = set()  # Verbs and resources that were asked for, as RBAC names them.
        self.token = self.valid_token = (
            "first"  # What the Authorization header must have, and what clients read.
        )
        self.closed = False
        self.streams = 0  # A stream of an older number is broken.
        self.unreachable_from = set()  # Processes that the network is cut from.

    def requests(self, method="", path=""):
        return [seen for seen in list(self.seen) if method in seen.method and path in seen.path]

    def serve(self, request):
        """Return the response; Broken if there is none."""
        request.at = self.clock.monotonic()
        self.seen.append(request)
        fault = self._fault(request)
        if fault.delay:
            self.clock.sleep(fault.delay)
        if fault.drop:
            raise Broken
        if fault.status:
            return _error(fault.status, fault.message, fault.retry_after)
        if request.headers.get("authorization") != f"Bearer {self.token}":
            return _error(401, "Unauthorized")
        response = self._answer(request, fault)
        if fault.lost:
            raise Broken
        return response

    def break_streams(self):
        """Break the connection of each watch and log."""
        self.streams += 1
        self.notify()

    def next_delay(self, request):
        """Return the seconds that the next fault of a request delays it."""
        return next((fault.delay for fault in self.faults if _matches(fault, request)), 0.0)

    def _fault(self, request):
        for fault in self.faults:
            if _matches(fault, request):
                fault.times -= 1
                return fault
        return Fault()

    def _answer(self, request, fault):
        url = urlsplit(request.path)
        query = {key: values[0].replace("True", "true") for key, values in parse_qs(url.query).items()}
        if url.path.rstrip("/") == "/version":
            return _json(VERSION)
        match = PATH.fullmatch(url.path)
        if not match or not self._is_known(match["group"], match["version"]):
            return Response(404, b"404 page not found\n", kind="text/plain")
        namespace, resource, name, sub = match["namespace"] or "", *match.group("resource", "name", "sub")
        what = f"{resource}/{sub}" if sub else resource
        if resource == "selfsubjectaccessreviews":
            attributes = request.body["spec"]["resourceAttributes"]
            asked = "/".join(filter(None, [attributes["resource"], attributes.get("subresource")]))
            allowed = (attributes["verb"], asked) not in self.denied
            return _json(request.body | {"status": {"allowed": allowed}})
        verb = {"GET": "get" if name else "list", "POST": "create"}.get(
            request.method, request.method.lower()
        )
        watching = verb == "list" and query.get("watch") == "true"
        self.asked.add(("watch" if watching else verb, what))
        if (verb, what) in self.denied or (watching and ("watch", what) in self.denied):
            group = match["group"] or ""
            about = f'{what} is forbidden: User "me" cannot {verb} resource "{what}" in API group "{group}"'
            return _error(403, f'{about} in the namespace "{namespace}"')
        with self.lock:
            if verb == "create":
                return self._create(resource, namespace, request.body, dry_run=query.get("dryRun") == "All")
            if verb == "list" and not watching:
                return self._list(resource, namespace, query)
            stored = self.objects.get((resource, namespace, name))
            if stored is None and not watching:
                return _error(404, f'{resource} "{name}" not found', name=name)
            if verb == "delete":
                return self._delete(request, stored, resource, namespace, name)
            if verb == "patch":
                return self._patch(request, stored, resource, namespace)
        if watching:
            return self._watch(request, resource, namespace, query)
        return self._log(request, self.pod(name, namespace), query, fault) if sub == "log" else _json(stored)

    def _is_known(self, group, version):
        if group == KUEUE:
            return self.kueue is not None and version in self.kueue.versions
        return group not in GROUPS or GROUPS[group] in self.installed

    def _create(self, resource, namespace, body, *, dry_run):
        if self.kueue:
            self.kueue.change(resource, body)
        name = body["metadata"].get("name")
        if not dry_run and (resource, namespace, name) in self.objects:
            return _error(409, f'{resource} "{name}" already exists', name=name)
        controller = self.controllers.get(TRAINJOBS if resource == RUNTIMES else resource)
        if controller and (refusal := controller.refusal(namespace, body)):
            return _error(*refusal)
        if dry_run:
            return _json(body | {"metadata": body["metadata"] | {"uid": "none"}}, 201)
        if resource in self.controllers:
            return _json(self.create_job(namespace, body), 201)
        return _json(self.add(resource, namespace, body), 201)

    def _patch(self, request, stored, resource, namespace):
        if request.headers["content-type"] != "application/merge-patch+json":
            return _error(415, "the body of the request was in an unknown format")
        if resource == TRAINJOBS and (refusal := self.controllers[resource].refusal(namespace, stored)):
            return _error(*refusal)
        _merge(stored, request.body)
        return _json(stored)

    def _delete(self, request, stored, resource, namespace, name):
        uid = ((request.body or {}).get("preconditions") or {}).get("uid")
        if uid not in (None, stored["metadata"]["uid"]):
            return _error(409, f"Precondition failed: UID in precondition: {uid}")
        self.remove(resource, namespace, name)
        return _json({"kind": "Status", "status": "Success"})

    def _list(self, resource, namespace, query):
        items = [
            body
            for (kind, space, _), body in self.objects.items()
            if kind == resource and namespace in ("", space) and _is_selected(body, query)
        ]
        version = str(len(self.changes))
        return _json(
            {"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": version}, "items": items}
        )

    def _watch(self, request, resource, namespace, query):
        """Stream what exists, or what changed since a version, and then every change."""
        since = int(query.get("resourceVersion", 0))
        if 0 < since < self.forgotten:
            return _error(410, "too old resource version")
        index = since or len(self.changes)
        existing = [] if since else [("ADDED", body, key[0]) for key, body in list(self.objects.items())]

        def stream(pending, index):
            while not self.closed:
                for kind, body, changed in pending:
                    if (changed, body["metadata"].get("namespace")) == (resource, namespace) and _is_selected(
                        body, query
                    ):
                        yield json.dumps({"type": kind, "object": body}).encode() + b"\n"
                self._wait(request, lambda index=index: len(self.changes) > index)
                pending = self.changes[index:]
                index += len(pending)

        return Response(200, stream=stream(existing, index))

    def _log(self, request, pod, query, fault):
        states = pod.body["status"].get("containerStatuses", [{"state": {"waiting": {}}}])
        name = f'container "{pod.container}" in pod "{pod.name}"'
        if query.get("previous") == "true":
            if len(pod.containers) < 2:
                return _error(400, f"previous terminated {name} not found")
            return Response(200, stream=self._lines(request, pod, pod.containers[-2], query, fault))
        if "waiting" in states[0]["state"]:
            return _error(400, f"{name} is waiting to start")
        return Response(200, stream=self._lines(request, pod, pod.containers[-1], query, fault))

    def _lines(self, request, pod, lines, query, fault):
        follow = query.get("follow") == "true" and lines is pod.containers[-1]
        since = datetime.fromisoformat(query["sinceTime"]).timestamp() * 1e9 if "sinceTime" in query else 0
        sent, index = 0, max(0, len(lines) - int(query.get("tailLines", len(lines))))
        limit = max(fault.cut, fault.end)

        def is_over():
            return not follow or pod.ended or lines is not pod.containers[-1]

        while True:
            over = is_over()
            for at, data in lines[index:]:
                index += 1
                if at < since:
                    continue
                piece = (_stamp(at) if query.get("timestamps") == "true" else b"") + data
                if 0 <= limit <= sent + len(piece):
                    yield piece[: limit - sent]
                    if fault.stall:
                        self._wait(request, lambda: False, fault.stall)
                    if fault.end >= 0:
                        return
                    raise Broken
                sent += len(piece)
                yield piece
            if over:
                return
            self._wait(request, lambda index=index: len(lines) > index or is_over())

    def _wait(self, request, holds, seconds=None):
        """Wait for a change; Silent if the client does not wait so long."""
        patience, number = request.silence, self.streams
        limits = [limit for limit in (seconds, patience) if limit is not None]
        with self.news:
            changed = self.news.wait_for(
                lambda: holds() or self.closed or number != self.streams, min(limits, default=None)
            )
        if number != self.streams:
            raise Broken
        if not changed and seconds is None:
            raise Silent


def _matches(fault, request):
    return fault.times > 0 and fault.method in request.method and fault.path in request.path


def _json(body, status=200):
    return Response(status, json.dumps(body).encode())


def _error(status, message, retry_after=0, name=""):
    about = {"name": name, "kind": message.partition(" ")[0]}
    body = {"kind": "Status", "status": "Failure", "code": status, "message": message}
    body |= {"reason": REASONS.get(status, ""), "details": about}
    return Response(status, json.dumps(body).encode(), retry_after=retry_after)


def _merge(body, patch):
    for name, value in patch.items():
        if value is None:
            body.pop(name, None)
        elif isinstance(value, dict) and isinstance(body.get(name), dict):
            _merge(body[name], value)
        else:
            body[name] = value


def _is_selected(body, query):
    """Return whether each `key=value`, `key!=value` or `key` of both selectors holds."""

    def field_value(path):
        value = body
        for part in path.split("."):
            value = value.get(part, {})
        return value

    labels = body["metadata"].get("labels") or {}
    for selector, value in (
        (query.get("labelSelector", ""), labels.get),
        (query.get("fieldSelector", ""), field_value),
    ):
        for part in filter(None, selector.split(",")):
            key, equals, expected = part.partition("=")
            found = value(key.removesuffix("!"))
            if not (
                found is not None if not equals else (found == expected.lstrip("=")) != key.endswith("!")
            ):
                return False
    return True


def _stamp(nanoseconds):
    seconds, rest = divmod(int(nanoseconds), 10**9)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest:09}Z ".encode()


class Pool:
    """What of urllib3's PoolManager the Kubernetes client uses; `latency` returns the seconds of one way."""

    def __init__(self, cluster, latency=lambda: 0.001):
        self._cluster, self._clock, self._latency = cluster, cluster.clock, latency

    def request(
        self, method, url, *, body=None, fields=None, headers=None, timeout=None, preload_content=True
    ):
        parts = urlsplit(url)
        path = parts.path + (f"?{urlencode(fields)}" if fields else f"?{parts.query}" if parts.query else "")
        headers = {name.lower(): value for name, value in (headers or {}).items()}
        limit = timeout.read_timeout if timeout else None
        request = Request(method, path, json.loads(body) if body else None, headers, silence=limit)
        self._clock.sleep(self._latency())
        if self._clock.process in self._cluster.unreachable_from:
            self._clock.sleep(timeout.connect_timeout if timeout else 1.0)
            raise ProtocolError("Connection aborted.")
        try:
            response = self._serve_in_time(request, limit)
        except Silent:
            raise ReadTimeoutError(self, url, "Read timed out.") from None
        except Broken:
            raise ProtocolError("Connection aborted.") from None
        self._clock.sleep(self._latency())
        return _PoolResponse(self, url, response)

    def _serve_in_time(self, request, limit):
        """Serve a request, which a client that no longer waits does not take back."""
        if limit is None or self._cluster.next_delay(request) <= limit:
            return self._cluster.serve(request)
        self._clock.start_in(None, self._serve_late, request)
        self._clock.sleep(limit)
        raise Silent

    def _serve_late(self, request):
        with suppress(Broken):
            self._cluster.serve(request)


class _PoolResponse:
    def __init__(self, pool, url, response):
        self._pool, self._url, self._response = pool, url, response
        self.status, self.reason = response.status, REASONS.get(response.status, "OK")
        self.headers = {"Content-Type": response.kind}
        if response.retry_after:
            self.headers["Retry-After"] = str(response.retry_after)

    @property
    def data(self):
        return self._response.body

    def stream(self, amt=None, decode_content=None):
        try:
            yield from self._response.stream or [self._response.body]
        except Silent:
            raise ReadTimeoutError(self._pool, self._url, "Read timed out.") from None
        except Broken:
            raise ProtocolError("Connection broken") from None

    def getheaders(self):
        return self.headers

    def close(self):
        pass

    release_conn = close
