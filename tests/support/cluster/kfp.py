"""The API of Kubeflow Pipelines, with experiments, runs and recurring runs; it can be made to fail."""

import json
import uuid
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, urlsplit

import pytest
from web_server import WebServer

from pipelines import NAMESPACE_VARIABLE, UI_VARIABLE

NOW = "2026-11-21T07:00:00Z"
KINDS = {"NUMBER_INTEGER": (int, float), "STRING": str, "STRUCT": dict, "LIST": list, "BOOLEAN": bool}


class KfpServer:
    def __init__(self):
        self.requests = []  # Method, path and headers.
        self.experiments, self.runs, self.schedules = [], [], []
        self.token = ""  # Required token; empty is none.
        self.failures = []
        """(method, part of the path, status, JSON or text): each answers one request."""
        self.states = []
        """The state of a run at each request: state, or (state, details of its tasks, further fields)."""
        self.tag = "2.17.0"
        self.multi_user = False
        self.has_metadata = (
            True  # Otherwise a run has `tasks` in place of `run_details`, if they are asked for.
        )
        self.started = lambda run: None  # Called with every new run.
        self.answered = lambda: None  # Called before every answer about a run.
        self._server = WebServer(_handler(self))
        self.url = f"{self._server.url}/pipeline"

    def close(self):
        self._server.server_close()

    def asked(self, method):
        return [path for of, path, _ in self.requests if of == method]

    def answer(self, method, path, query, body):
        kind, *rest = path.partition("/apis/v2beta1/")[2].split("/")
        namespace = query.get("namespace", [""])[0]
        if kind == "healthz":
            return 200, {"commit_sha": "unknown", "tag_name": self.tag, "multi_user": self.multi_user}
        if self.multi_user and method == "GET" and not rest and not namespace:
            return 400, {"error": "Invalid input error: A namespace is required.", "code": 3}
        if kind == "experiments":
            return self._experiments(method, namespace, body)
        if kind == "runs":
            return self._runs(method, rest, query, body)
        return self._schedules(method, rest, query, body)

    def _experiments(self, method, namespace, body):
        if method == "POST":
            taken = [(item.get("namespace"), item["display_name"]) for item in self.experiments]
            if (body.get("namespace"), body["display_name"]) in taken:
                return 409, {"error": f"The name {body['display_name']} already exists.", "code": 6}
            self.experiments.append({**body, "experiment_id": str(uuid.uuid4())})
            return 200, self.experiments[-1]
        existing = [
            item for item in self.experiments if item.get("namespace") in (namespace or None, namespace)
        ]
        return 200, {"experiments": existing} if existing else {}

    def _runs(self, method, rest, query, body):
        if method == "POST" and rest:  # ID:terminate
            self.states = ["CANCELING"]
            return 200, {}
        if method == "POST":
            refused = _refused(body)
            if refused:
                return 400, {"error": refused, "code": 3, "message": refused}
            self.runs.append({**body, "run_id": str(uuid.uuid4()), "state": "PENDING", "created_at": NOW})
            self.started(self.runs[-1])
            return 200, self.runs[-1]
        if not rest:
            (predicate,) = json.loads(query["filter"][0])["predicates"]
            return 200, {
                "runs": [run for run in self.runs if run.get(predicate["key"]) == predicate["stringValue"]]
            }
        (run,) = [run for run in self.runs if run["run_id"] == rest[0]]
        self.answered()
        now = self.states.pop(0) if len(self.states) > 1 else self.states[0] if self.states else "SUCCEEDED"
        state, details, further = (*now, {})[:3] if isinstance(now, tuple) else (now, [], {})
        tasks = {"run_details": {"task_details": details}}
        if not self.has_metadata:
            tasks = {"tasks": details} if query.get("view") == ["FULL"] else {}
        return 200, run | {"state": state} | tasks | further

    def _schedules(self, method, rest, query, body):
        if method == "POST" and not rest:
            refused = _refused(body)
            if refused:
                return 400, {"error": refused, "code": 3, "message": refused}
            recurring_run = {**body, "recurring_run_id": str(uuid.uuid4()), "status": f"{body['mode']}D"}
            recurring_run["created_at"] = NOW
            self.schedules.append(recurring_run)
            return 200, recurring_run
        if method == "POST":  # ID:enable, ID:disable
            which, _, what = rest[0].partition(":")
            (one,) = [item for item in self.schedules if item["recurring_run_id"] == which]
            one["status"] = f"{what.upper()}D"
            return 200, {}
        if method == "DELETE":
            if query.get("propagation_policy") != ["ORPHAN"] or self.tag < "2.16":
                for run in self.runs:
                    if run.get("recurring_run_id") == rest[0]:
                        run["state"] = "FAILED"  # Kubernetes deletes what belonged to it.
            self.schedules = [item for item in self.schedules if item["recurring_run_id"] != rest[0]]
            return 200, {}
        # Two a page, to see that all are read.
        start = int(query.get("page_token", ["0"])[0] or 0)
        page = {"recurringRuns": self.schedules[start : start + 2]}
        return 200, page | ({"next_page_token": str(start + 2)} if start + 2 < len(self.schedules) else {})


def _refused(body):
    """What the real server finds wrong with the parameters of a run, or nothing."""
    spec = body["pipeline_spec"]["pipeline_spec"]
    declared = spec["root"]["inputDefinitions"]["parameters"]
    values = body["runtime_config"].get("parameters", {})
    unknown = sorted(set(values) - set(declared))
    if unknown:
        return f"parameter(s) provided are not required by pipeline: {unknown}"
    for name, of in declared.items():
        if name not in values and not of.get("isOptional"):
            return f"parameter {name} is not optional, yet has neither default value nor user provided value"
        if name in values and not isinstance(values[name], KINDS[of["parameterType"]]):
            return f"input parameter {name} requires type {of['parameterType']}"
    return ""


def _handler(fake):
    class Handler(BaseHTTPRequestHandler):
        def _do(self):
            url = urlsplit(self.path)
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length) or b"null")
            fake.requests.append((self.command, url.path, dict(self.headers)))
            failure = next((f for f in fake.failures if f[0] == self.command and f[1] in url.path), None)
            if failure:
                fake.failures.remove(failure)
                status, answer = failure[2:]
            elif fake.token and self.headers.get("authorization") != f"Bearer {fake.token}":
                status, answer = 401, {"error": "Unauthenticated", "message": "Request header error"}
            else:
                status, answer = fake.answer(self.command, url.path, parse_qs(url.query), body)
            text = answer if isinstance(answer, str) else json.dumps(answer)
            self.send_response(status)
            self.send_header("Content-Type", "text/html" if isinstance(answer, str) else "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_POST = do_DELETE = _do

    return Handler


@pytest.fixture
def kfp_server(monkeypatch, tmp_path):
    """A Kubeflow Pipelines API, to which the environment points."""
    cluster = ("KUBECONFIG", "KUBERNETES_SERVICE_HOST")
    for name in (*cluster, "KF_PIPELINES_ENDPOINT", UI_VARIABLE, "KFP_EXISTING_TOKEN", NAMESPACE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    # Kubernetes' client reads the variable when it is imported.
    monkeypatch.setattr(
        "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / ".kube" / "config")
    )
    server = KfpServer()
    monkeypatch.setenv("KFP_ENDPOINT", server.url)
    yield server
    server.close()
