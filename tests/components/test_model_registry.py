"""The register step against a small registry that checks the calls."""

import json
import socket
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, urlsplit

import pytest
from bundles import make_bundle
from web_server import WebServer

from components.model_registry import register_model
from trainer.base.errors import ConfigError, ExportError

pytest.importorskip("model_registry")


@pytest.fixture
def server():
    it = RegistryServer()
    yield it
    it.close()


@pytest.fixture
def exported(tmp_path):
    return make_bundle(tmp_path / "made")


def test_model_version_and_artifact_are_registered(server, exported):
    ids = register_model(exported, server.url, "run-7")
    assert ids == {"model": "1", "version": "1", "artifact": "1"}
    (model,), (version,), (artifact,) = server.models, server.versions, server.artifacts
    assert (model["name"], version["name"], version["registeredModelId"]) == ("pets", "v1", "1")
    assert version["customProperties"]["coco/AP"] == {
        "double_value": 0.5,
        "metadataType": "MetadataDoubleValue",
    }
    assert version["customProperties"]["shards"]["string_value"] == "f00d"
    assert artifact["uri"] == exported and artifact["parent"] == "1"
    assert (artifact["modelFormatName"], artifact["modelFormatVersion"]) == ("onnx", "1")
    assert (artifact["modelSourceKind"], artifact["modelSourceId"]) == ("kfp", "run-7")


def test_a_retry_registers_nothing_twice(server, exported):
    first = register_model(exported, server.url, "run-7")
    server.calls.clear()
    assert register_model(exported, server.url, "run-7") == first
    assert {method for method, _ in server.calls} == {"GET"}
    assert len(server.models) == len(server.versions) == len(server.artifacts) == 1


@pytest.mark.parametrize("at", ["registered_models", "model_versions", "artifacts"])
def test_a_retry_completes_what_was_begun(server, exported, at):
    server.failures.append(("POST", at, 500))
    with pytest.raises(ExportError, match="refused the request: 500"):
        register_model(exported, server.url, "run-7")
    assert register_model(exported, server.url, "run-7") == {"model": "1", "version": "1", "artifact": "1"}
    assert len(server.models) == len(server.versions) == len(server.artifacts) == 1


def test_the_token_of_the_pod_is_sent(server, exported, tmp_path, monkeypatch):
    (tmp_path / "token").write_text("abc\n")
    monkeypatch.setenv("KF_PIPELINES_SA_TOKEN_PATH", str(tmp_path / "token"))
    register_model(exported, server.url, "")
    assert server.tokens == {"Bearer abc"}


def test_a_refusal_names_the_role(server, exported):
    server.failures.append(("GET", "registered_model", 403))
    with pytest.raises(ExportError, match=r"(?s)refused the request: 403.*role in the registry"):
        register_model(exported, server.url, "")


@pytest.mark.parametrize("url", ["", "registry:8080", "ftp://registry"])
def test_what_is_no_url(exported, url):
    with pytest.raises(ConfigError, match="is not a URL"):
        register_model(exported, url, "")


def test_a_registry_that_is_not_there(exported):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ExportError, match=f"http://127.0.0.1:{port} cannot be reached"):
        register_model(exported, f"http://127.0.0.1:{port}", "")


def test_https_without_a_token(exported, tmp_path, monkeypatch):
    monkeypatch.setenv("KF_PIPELINES_SA_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="needs a token"):
        register_model(exported, "https://registry.example", "")


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
