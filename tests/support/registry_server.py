"""A Kubeflow Model Registry in a thread: what the register step asks of it (API v1)."""

import json
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, urlsplit

from web_server import WebServer

_BASE = "/api/model_registry/v1/"


class RegistryServer:
    """Holds models, versions and artifacts; refuses a second of the same name, as the real one does."""

    def __init__(self):
        self.calls = []
        """Method and path of each request."""
        self.tokens = set()
        """Authorization headers that were seen."""
        self.models, self.versions, self.artifacts = [], [], []
        self.failures = []
        """(method, last part of the path, status): each answers one request."""
        self._server = WebServer(_handler(self))
        self.url = self._server.url

    def close(self):
        self._server.server_close()

    def answer(self, method, path, query, body):
        parts = path.removeprefix(_BASE).split("/")
        for failure in self.failures:
            if failure[:2] == (method, parts[-1]):
                self.failures.remove(failure)
                return failure[2], {"message": "refused"}
        name, parent = query.get("name", [""])[0], query.get("parentResourceId", [""])[0]
        match method, parts:
            case "GET", ["registered_model"]:
                return _one(self.models, name=name)
            case "POST", ["registered_models"]:
                return _add(self.models, body, name=body["name"])
            case "GET", ["model_version"]:
                return _one(self.versions, name=name, registeredModelId=parent)
            case "POST", ["model_versions"]:
                key = {"name": body["name"], "registeredModelId": body["registeredModelId"]}
                return _add(self.versions, body, **key)
            case "GET", ["model_artifact"]:
                return _one(self.artifacts, name=name, parent=parent)
            case "POST", ["model_versions", version, "artifacts"]:
                return _add(self.artifacts, {**body, "parent": version}, name=body["name"], parent=version)
        return 404, {"message": f"no {method} {path}"}


def _one(items, **key):
    matches = [item for item in items if key.items() <= item.items()]
    return (200, matches[0]) if matches else (404, {"message": "not found"})


def _add(items, body, **key):
    if _one(items, **key)[0] == 200:
        return 409, {"message": "already exists"}
    items.append({**body, **key, "id": str(len(items) + 1)})
    return 201, items[-1]


def _handler(server):
    class Handler(BaseHTTPRequestHandler):
        def _do(self):
            url = urlsplit(self.path)
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"null")
            server.calls.append((self.command, url.path.removeprefix(_BASE)))
            server.tokens.add(self.headers.get("Authorization"))
            status, answer = server.answer(self.command, url.path, parse_qs(url.query), body)
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PATCH = _do

    return Handler
