"""A web server with weights: torchvision's folder of files, and a hub of models with its API."""

import hashlib
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler

import pytest
from web_server import WebServer

from trainer.weights.weights_mirror import TORCHVISION_FILES

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class WeightsServer:
    """Serves `files` by path, and the models of a hub; counts what was asked for."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        """Contents by path, without the first slash."""
        self.requests: list[str] = []
        """Paths of GET requests that were answered with a file."""
        self.tokens: dict[str, str] = {}
        """Of a path's first words, the token without which it is refused."""
        self.shown: list[tuple[str, str]] = []
        """Path and `Authorization` of every request; empty where there was none."""
        self.elsewhere = ""
        """Address of another server that requests for tensors are sent on to."""
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self._open_response(body=False)

            def do_GET(self) -> None:
                self._open_response(body=True)

            def _open_response(self, *, body: bool) -> None:
                path, shown = self.path.lstrip("/"), self.headers.get("Authorization", "")
                server.shown.append((path, shown))
                content, status = server.files.get(path), 200
                if wanted := next((token for part, token in server.tokens.items() if part in path), ""):
                    status = 200 if shown == f"Bearer {wanted}" else 403 if shown else 401
                if status != 200 or content is None:
                    status, content = (404 if status == 200 else status), None
                elif server.elsewhere and path.endswith(".safetensors"):
                    self.send_response(302)
                    self.send_header("Location", f"{server.elsewhere}/{path}")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                self.send_response(status)
                self.send_header("Content-Length", str(len(content or b"")))
                self.end_headers()
                if body and content is not None:
                    server.requests.append(self.path.lstrip("/"))
                    self.wfile.write(content)

        self._server = WebServer(Handler)
        self.url = self._server.url

    def add_resnet18(self, content: bytes, monkeypatch: pytest.MonkeyPatch) -> str:
        """Serve torchvision's file of the weights of `small_pretrained`, under a name with its own hash."""
        name = f"resnet18-{hashlib.sha256(content).hexdigest()[:8]}.pth"
        self.files[f"models/{name}"] = content
        monkeypatch.setitem(TORCHVISION_FILES, "ResNet18_Weights.IMAGENET1K_V1", name)
        return name

    def add_model(self, name: str, files: dict[str, bytes], revision: str = "main") -> None:
        """Serve a model of the hub: its description, and its files at a commit."""
        siblings = []
        for file_name, content in files.items():
            self.files[f"{name}/resolve/{COMMIT}/{file_name}"] = content
            item = {"rfilename": file_name, "size": len(content)}
            if file_name.endswith(".safetensors"):
                item["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
            else:
                item["blobId"] = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            siblings.append(item)
        description = json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode()
        self.files[f"api/models/{name}/revision/{revision}?blobs=true"] = description

    def stop(self) -> None:
        self._server.server_close()


@pytest.fixture
def weights_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WeightsServer]:
    """The server, in place of torchvision's and of the hub's."""
    server = WeightsServer()
    monkeypatch.setenv("KUBEDET_TORCHVISION_URL", f"{server.url}/models")
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    yield server
    server.stop()
