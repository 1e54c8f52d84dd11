"""A server between the client and the store that does what networks and busy stores do."""

import base64
import hashlib
import http.client
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from trainer import storage
from trainer.storage import environment, objects


@dataclass
class Fault:
    """What happens to the next requests that fit."""

    kind: str
    """"status", "drop" (no answer), "lost" (done, but no answer), "cut", "short", "stall", "corrupt",
    "spoil" (another byte arrives than was sent), "drip" (a byte at a time); of what is written, acknowledged
    and all: "swallow" (nothing is kept), "alter" (another byte is kept)."""
    method: str = "GET"
    query: str = ""
    """Part of the address that the request must have."""
    parts: bool = False
    """Whether it happens to requests for a part of an object alone."""
    times: int = 1
    after: int = 0
    """Bytes of the body that pass before it happens."""
    status: int = 503
    headers: tuple[tuple[str, str], ...] = (("Content-Type", "application/xml"),)
    code: str = "SlowDown"
    message: str = ""


def refusal(code: str, message: str = "") -> bytes:
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()


class Proxy:
    """Passes requests on to a store; `faults` happen first, in order."""

    def __init__(self, upstream: str, folder: Path) -> None:
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        """"GET /bucket/key 0-99" of each."""
        self.heard: list[tuple[str, dict[str, str]]] = []
        """Method and headers of each request."""
        self.answers: dict[str, bytes] = {}
        """What is answered instead, by address."""
        self.conditions = False
        """Whether `If-None-Match` is understood."""
        self.careless = False
        """Whether a part is answered with 200, as if it were all."""
        self.released = threading.Event()
        self._lock = threading.Lock()
        self._upstream, self._folder = urlsplit(upstream).netloc, folder
        self._server: ThreadingHTTPServer | None = None
        self.start(0)

    def fail(self, kind: str, **details: Any) -> None:
        self.faults.append(Fault(kind, **details))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, port: int) -> None:
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        self.released.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def take(self, method: str, path: str, part: bool = False) -> Fault | None:
        with self._lock:
            for fault in self.faults:
                if fault.method == method and fault.query in path and (part or not fault.parts):
                    fault.times -= 1
                    if not fault.times:
                        self.faults.remove(fault)
                    return fault
        return None

    def forget(self, path: str, kind: str) -> None:
        """Lose or alter an object behind the store's back."""
        target = self._folder / unquote(urlsplit(path).path).lstrip("/")
        if kind == "swallow":
            target.unlink()
        else:
            data = target.read_bytes()
            target.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))

    def pass_on(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Any:
        target = self._folder / unquote(urlsplit(path).path).lstrip("/")
        if self.conditions and "if-none-match" in map(str.lower, headers) and target.exists():
            return 412, [("Content-Type", "application/xml")], refusal("PreconditionFailed")
        connection = http.client.HTTPConnection(self._upstream)
        connection.request(method, path, body or None, headers)
        answer = connection.getresponse()
        status = answer.status
        # rclone's 200 to a part would be a careless store's, see `careless`.
        if status == 200 and answer.getheader("Content-Range") and not self.careless:
            status = 206
        response = status, answer.getheaders(), answer.read()
        connection.close()
        return response


class _Handler(BaseHTTPRequestHandler):
    owner: Proxy
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else every answer waits 40 ms between its head and its body

    def _do(self) -> None:
        owner, method = self.owner, self.command
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        byte_range = self.headers.get("Range", "").removeprefix("bytes=")
        if method == "HEAD" and self.path == "/":  # Is there a server?
            return self._answer(200, [], b"")
        owner.requests.append(f"{method} {self.path} {byte_range}".strip())
        owner.heard.append((method, {name.lower(): value for name, value in self.headers.items()}))
        fault = owner.take(method, self.path, bool(byte_range))
        kind = fault.kind if fault else ""
        if kind == "drop":
            return self._hang_up()
        if fault and kind == "status":
            return self._answer(fault.status, list(fault.headers), refusal(fault.code, fault.message))
        if kind == "spoil":
            altered, headers = body[:-1] + b"?", self.headers
            sha256, md5 = hashlib.sha256(altered).hexdigest(), hashlib.md5(altered).digest()
            if headers.get("x-amz-content-sha256", sha256) != sha256:
                return self._answer(400, list(fault.headers), refusal("XAmzContentSHA256Mismatch"))
            if headers.get("Content-MD5", digest := base64.b64encode(md5).decode()) != digest:
                return self._answer(400, list(fault.headers), refusal("BadDigest"))
            body = altered  # nothing says that it is not what was sent
        if self.path in owner.answers:
            return self._answer(
                200, [("Content-Type", "application/xml"), ("ETag", '"1"')], owner.answers[self.path]
            )
        status, headers, data = owner.pass_on(method, self.path, dict(self.headers.items()), body)
        if kind == "lost":
            return self._hang_up()
        if kind in ("swallow", "alter"):
            owner.forget(self.path, kind)
        if fault and kind == "corrupt":
            data = data[: fault.after] + bytes([data[fault.after] ^ 1]) + data[fault.after + 1 :]
        if fault and kind == "short":
            data = data[: fault.after]
        return self._answer(status, headers, data, fault)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _do

    def _answer(self, status: int, headers: list, data: bytes, fault: Fault | None = None) -> None:
        kind = fault.kind if fault else ""
        self.send_response(status)
        length = str(len(data))
        for name, value in headers:
            if name.lower() == "content-length" and self.command == "HEAD":
                length = value
            elif name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault and kind in ("cut", "stall", "drip"):
            self.wfile.write(data[: fault.after])
            self.wfile.flush()
            if kind == "stall":
                self.owner.released.wait(20)
            for place in range(fault.after, len(data) if kind == "drip" else 0):
                if self.owner.released.wait(0.02):
                    break
                self.wfile.write(data[place : place + 1])
            self._hang_up()
            return
        self.wfile.write(data)

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: object) -> None:
        pass

    def handle(self) -> None:
        with suppress(OSError):  # the client went away
            super().handle()


def upload_folder(folder: Path, uri: str) -> None:
    """Write all files of a folder to a store, with the hashes by which damage is found."""
    for path in folder.rglob("*"):
        if path.is_file():
            storage.upload(path, f"{uri}/{path.relative_to(folder)}")


def go_away(proxy: Proxy, after: int, seconds: float) -> threading.Thread:
    """Let the store die after some more requests, and come back after some time."""
    limit = len(proxy.requests) + after

    def act() -> None:
        while len(proxy.requests) < limit:
            time.sleep(0.001)
        port = proxy.port
        proxy.stop()
        time.sleep(seconds)
        proxy.start(port)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let hope be given up after parts of a second; other values may be named."""

    def hurry(**changed: float) -> None:
        values = {"connect": 1.0, "read_timeout": 0.6, "first": 0.4, "total": 30.0, "wait": 0.03, **changed}
        monkeypatch.setattr(environment, "RETRIES", environment.RetryPolicy(**values))
        objects.forget_locations()

    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    hurry()
    return hurry


@pytest.fixture
def proxy(
    bucket: Path, object_store_server: tuple[str, Path], hurried: object, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Proxy]:
    """A proxy that s3:// goes through, before the store whose folder is `bucket`."""
    endpoint, folder = object_store_server
    proxy = Proxy(endpoint, folder)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    objects.forget_locations()
    yield proxy
    proxy.stop()
