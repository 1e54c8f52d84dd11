"""A small local server for trying a model: serves a page, and returns the detections in uploaded images.

It processes one image at a time and has no authentication. For production, use Triton or KServe.
"""

import json
import os
import re
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from types import FrameType
from typing import Any

from trainer.base.errors import ConfigError, KubedetError
from trainer.export.predict import ImageTooLarge, Predictor, decode_image, to_dict
from trainer.launching.stop_signals import signal_handler

MAX_BYTES = 64 * 1024 * 1024  # maximum size of a request's body
_MAX_PIXELS = 50_000_000  # larger images are refused before they are decoded
_MAX_REQUESTS = 16  # maximum number of images in memory
_CONNECTION_SECONDS = 30.0  # a connection without data is closed after this time
_PAGE_FOLDER = Path(__file__).with_name("page")
_CONTENT_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HOST = re.compile(r"(?:https?://)?(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")
_SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class ModelServer(ThreadingHTTPServer):
    """An HTTP server for an opened model."""

    daemon_threads = True  # a running request does not delay shutdown

    def __init__(self, address: tuple[str, int], predictor: Predictor, names: Sequence[str] = ()) -> None:
        """Start listening; `names` are further host names of this server, or patterns of host names."""
        self.predictor = predictor
        self.names = [name.lower() for name in names]
        own = ("localhost", address[0].lower(), socket.gethostname().lower())
        self.hosts = [*self.names, *own]
        self.decoder_lock, self.model_lock = threading.Lock(), threading.Lock()
        self.requests = threading.BoundedSemaphore(_MAX_REQUESTS)
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print errors, except those of clients that disconnect during a response."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: ModelServer
    timeout = _CONNECTION_SECONDS

    def do_GET(self) -> None:
        if self._refuse_foreign_request():
            return
        metadata = self.server.predictor.metadata
        if self.path == "/model.json":
            described = {
                "name": metadata.name,
                "version": metadata.model_version,
                "format": self.server.predictor.kind,
                "classes": metadata.classes,
            }
            self._send_json(HTTPStatus.OK, described)
            return
        name = "page.html" if self.path == "/" else self.path.removeprefix("/page/")
        if name in {path.name for path in _PAGE_FOLDER.iterdir()} and Path(name).suffix in _CONTENT_TYPES:
            self._send(HTTPStatus.OK, (_PAGE_FOLDER / name).read_bytes(), _CONTENT_TYPES[Path(name).suffix])
        else:
            self._send_json(HTTPStatus.NOT_FOUND, {"error": "page not found"})

    def do_POST(self) -> None:
        if self._refuse_foreign_request():
            return
        if self.path != "/detect":
            self._send_json(HTTPStatus.NOT_FOUND, {"error": "send images to /detect"})
        elif not self.server.requests.acquire(blocking=False):
            busy = {"error": f"{_MAX_REQUESTS} images are already waiting: try again later"}
            self._send_json(HTTPStatus.SERVICE_UNAVAILABLE, busy)
        else:
            try:
                self._detect()
            finally:
                self.server.requests.release()

    def _detect(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not (length.isdecimal() and len(length) < 20):
            self._send_json(HTTPStatus.LENGTH_REQUIRED, {"error": "the header Content-Length is missing"})
            return
        if int(length) > MAX_BYTES:
            large = {"error": f"the image is larger than {MAX_BYTES // 2**20} MiB"}
            self._send_json(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, large)
            return
        try:
            body = self.rfile.read(int(length))
            with self.server.decoder_lock:  # Decoding a large image needs much memory.
                image = decode_image(body, "the image", _MAX_PIXELS)
            with self.server.model_lock:
                detections = self.server.predictor(image)
        except KubedetError as error:
            too_large = isinstance(error, ImageTooLarge)
            status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE if too_large else HTTPStatus.BAD_REQUEST
            self._send_json(status, {"error": error.message} | ({"fix": error.fix} if error.fix else {}))
            return
        metadata = self.server.predictor.metadata
        model = f"{metadata.name} {metadata.model_version}"
        self._send_json(HTTPStatus.OK, {"model": model, **to_dict(detections, image)})

    def _refuse_foreign_request(self) -> bool:
        """Refuse unknown host names and cross-site requests; return whether the request was refused."""
        own = _host_and_port(self.headers.get("Host", ""))
        is_allowed = any(fnmatchcase(own[0], name) for name in self.server.hosts)
        with suppress(ValueError):
            is_allowed |= bool(ip_address(own[0]))
        if not is_allowed:
            error = f"the host name {self.headers.get('Host', '')!r} is not allowed"
            fix = "start the server with --allow-host NAME"
            self._send_json(HTTPStatus.BAD_REQUEST, {"error": error, "fix": fix})
            return True
        if self.command == "GET":
            return False
        site, origin = self.headers.get("Sec-Fetch-Site", "none"), self.headers.get("Origin")
        is_own = site in ("none", "same-origin")
        if origin is not None:
            page = _host_and_port(origin)
            # Behind a proxy, Host may differ from the name that users see in the page's address.
            is_own &= page == own or any(fnmatchcase(page[0], name) for name in self.server.names)
        if is_own and len(self.headers.get_all("Host", [])) == 1:
            return False
        self._send_json(HTTPStatus.FORBIDDEN, {"error": "requests from other sites are not allowed"})
        return True

    def _send_json(self, status: HTTPStatus, content: dict[str, Any]) -> None:
        self._send(status, json.dumps(content).encode(), "application/json")

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": str(len(body)), "Cache-Control": "no-cache"}
        for name, value in {**headers, **_SECURITY_HEADERS}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""


def _host_and_port(text: str) -> tuple[str, str]:
    match = _HOST.fullmatch(text)
    if match is None:
        return "", ""
    host, port = match[1].lower().strip("[]"), match[2] or ""
    return host, "" if port in ("80", "443") else port


def serve(predictor: Predictor, host: str, port: int, names: Sequence[str] = ()) -> None:
    """Serve until Ctrl-C or SIGTERM.

    Port 0 selects a free port. `names` are further host names of the server, such as those of a proxy or a
    Service.
    """
    try:
        server = ModelServer((host, port), predictor, names)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        problem = f"cannot listen at {host}:{port}: {reason}"
        raise ConfigError(problem, fix="choose another port with --port") from None

    def stop(number: int, frame: FrameType | None) -> None:
        # In another thread, because `shutdown` waits for this one.
        threading.Thread(target=server.shutdown).start()

    with server, signal_handler(stop):
        address = f"http://{host}:{server.server_address[1]}"
        name = f"{predictor.metadata.name} {predictor.metadata.model_version}, {predictor.kind}"
        print(f"{name}: {address}/", flush=True)
        print("for trying a model, not for production; press Ctrl-C to stop", flush=True)
        server.serve_forever(poll_interval=0.2)
        if server.model_lock.locked():
            # A running model cannot be interrupted.
            sys.stdout.flush()
            os._exit(0)
