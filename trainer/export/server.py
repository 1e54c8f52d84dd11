"""A small local server to try one model: the Open Inference Protocol v2, and a page.

Not for production: one request at a time, no authentication. Triton and KServe speak the same
protocol.
"""

import os
import re
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from ipaddress import ip_address
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trainer.base.errors import ConfigError, DataError, KubedetError
from trainer.base.safe_text import whole_number
from trainer.data.images import MAX_PIXELS
from trainer.export import inference_protocol
from trainer.export.predict import ImageTooLarge, Predictor, as_json, decode_image
from trainer.export.serving_limits import Bodies, LimitedConnection, ModelThread, RequestRefused
from trainer.launching.stop_signals import handling

_HEADER = "Inference-Header-Content-Length"
_SHUTDOWN_SECONDS = 4  # Seconds in which connections may end before they are cut off.

_HOST = re.compile(r"(?:https?://)?(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")
_SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(self), microphone=(), geolocation=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class ModelServer:
    """The routes and their responses."""

    def __init__(self, predictor: Predictor, most_pixels: int) -> None:
        self._predictor, self._most_pixels = predictor, most_pixels
        self._name, self._version = predictor.metadata.name, predictor.metadata.model_version
        self.bodies, self.thread, self.decoder = Bodies(), ModelThread(), ModelThread()

    def routes(self) -> list[Route]:
        model = "/v2/models/{name}"
        versioned = model + "/versions/{version}"
        return [
            Route("/", _page),
            Route("/page/{file}", _page),
            Route("/model.json", self.model),
            Route("/detect", self.detect, methods=["POST"]),
            Route("/v2", self.about),
            Route("/v2/health/live", self.healthy),
            Route("/v2/health/ready", self.healthy),
            *(Route(path, self.describe) for path in (model, versioned)),
            *(Route(f"{path}/ready", self.ready) for path in (model, versioned)),
            *(Route(f"{path}/infer", self.infer, methods=["POST"]) for path in (model, versioned)),
        ]

    async def model(self, request: Request) -> Response:
        kind, classes = self._predictor.kind, self._predictor.metadata.classes
        return JSONResponse(
            {"name": self._name, "version": self._version, "format": kind, "classes": classes}
        )

    async def about(self, request: Request) -> Response:
        version = self._predictor.metadata.versions["kubedet"]
        return JSONResponse({"name": "kubedet", "version": version, "extensions": ["binary_tensor_data"]})

    async def healthy(self, request: Request) -> Response:
        return JSONResponse({"live": True, "ready": True})

    async def ready(self, request: Request) -> Response:
        self._check_model(request)
        return JSONResponse({"name": self._name, "ready": True})

    async def describe(self, request: Request) -> Response:
        self._check_model(request)
        described = inference_protocol.describe_tensors(self._predictor.metadata)
        platform = f"kubedet_{self._predictor.kind}"
        return JSONResponse(
            {"name": self._name, "versions": [self._version], "platform": platform, **described}
        )

    async def infer(self, request: Request) -> Response:
        self._check_model(request)
        length = request.headers.get(_HEADER)
        json_length = whole_number(length) if length is not None else None
        if length is not None and json_length is None:
            raise DataError(f"the header {_HEADER} must be a number")
        async with self.bodies.read(request.stream()) as body:
            return await self.thread.run(lambda: self._infer(body, json_length))

    def _infer(self, body: bytes, json_length: int | None) -> Response:
        request = inference_protocol.read_request(body, json_length, self._predictor.size)
        outputs = [part.numpy() for part in self._predictor.run(request.images)]
        data, json_length = inference_protocol.write_response(self._name, self._version, request, outputs)
        if json_length is None:
            return Response(data, media_type="application/json")
        return Response(data, media_type="application/octet-stream", headers={_HEADER: str(json_length)})

    async def detect(self, request: Request) -> Response:
        async with self.bodies.read(request.stream()) as body:
            # In another thread: a large image takes seconds, in which tensors can use the model.
            image = await self.decoder.run(lambda: decode_image(body, "the image", self._most_pixels))
        detections = await self.thread.run(lambda: self._predictor(image))
        return JSONResponse({"model": f"{self._name} {self._version}", **as_json(detections, image)})

    def _check_model(self, request: Request) -> None:
        name, version = request.path_params["name"], request.path_params.get("version")
        if name != self._name or version not in (None, self._version):
            requested = f"{name} {version}" if version else name
            raise LookupError(f"unknown model {requested}; this server has {self._name} {self._version}")


class _Guarded:
    """Refuses other host names, and requests that pages of other sites send."""

    def __init__(self, app: ASGIApp, hosts: list[str], names: list[str]) -> None:
        self._app, self._names = app, [name.lower() for name in names]
        self._hosts = [*self._names, *(host.lower() for host in hosts)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if refusal := self._refusal(scope["method"], Headers(scope=scope)):
            return await refusal(scope, receive, send)

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_SECURITY_HEADERS)
            await send(message)

        await self._app(scope, receive, guarded)

    def _refusal(self, method: str, headers: Headers) -> Response | None:
        own = _host_and_port(headers.get("host", ""))
        is_allowed = any(fnmatchcase(own[0], name) for name in self._hosts)
        with suppress(ValueError):
            is_allowed |= bool(ip_address(own[0]))
        if not is_allowed:
            error = f"this server is not called {headers.get('host', '')!r}"
            return JSONResponse({"error": error, "fix": "start it with --allow-host NAME"}, 400)
        if method in ("GET", "HEAD"):
            return None
        site, origin = headers.get("sec-fetch-site", "none"), headers.get("origin")
        is_own = site in ("none", "same-origin")
        if origin is not None:
            page = _host_and_port(origin)
            # A proxy may send another Host; the page then has the name that users see.
            is_own &= page == own or any(fnmatchcase(page[0], name) for name in self._names)
        if is_own and len(headers.getlist("host")) == 1:
            return None
        return JSONResponse({"error": "pages of other sites cannot use this server"}, 403)


def _host_and_port(text: str) -> tuple[str, str]:
    match = _HOST.fullmatch(text)
    if match is None:
        return "", ""
    host, port = match[1].lower().strip("[]"), match[2] or ""
    return host, "" if port in ("80", "443") else port


class WebServer(uvicorn.Server):
    """Serves an opened model."""

    def __init__(
        self,
        predictor: Predictor,
        hosts: Sequence[str] = ("localhost",),
        most_pixels: int = MAX_PIXELS,
        names: Sequence[str] = (),
    ) -> None:
        async def refused(request: Request, error: Exception) -> Response:
            status, headers = 400, dict[str, str]()
            if isinstance(error, RequestRefused):  # The rest of the request is not read.
                status, headers = error.status, {"Connection": "close"}
            elif isinstance(error, ImageTooLarge | LookupError):
                status = 404 if isinstance(error, LookupError) else 413
            if not isinstance(error, KubedetError):
                return JSONResponse({"error": str(error)}, status)
            fix = {"fix": error.fix} if error.fix else {}
            return JSONResponse({"error": error.message, **fix}, status, headers)

        self.model = ModelServer(predictor, most_pixels)
        app = Starlette(
            routes=self.model.routes(),
            middleware=[Middleware(_Guarded, hosts=list(hosts), names=list(names))],
            # ClientDisconnect: the response goes nowhere.
            exception_handlers={KubedetError: refused, LookupError: refused, ClientDisconnect: refused},
        )
        config = uvicorn.Config(
            app,
            port=0,
            http=LimitedConnection,
            ws="none",
            log_level="error",
            access_log=False,
            timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        )
        super().__init__(config)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse waiting and later requests; the running one has 2.5 seconds."""
        self.model.bodies.end()
        self.model.decoder.end()
        self.model.thread.end()
        await super().shutdown(sockets)


def serve(
    predictor: Predictor, host: str, port: int, most_pixels: int = MAX_PIXELS, names: Sequence[str] = ()
) -> None:
    """Serve until Ctrl-C or SIGTERM, then end within five seconds.

    Port 0 means a free one. Larger images than `most_pixels` are refused before they are decoded. `names`
    are further host names of the server, such as those of a proxy or a Service.
    """
    try:
        listener = socket.create_server((host, port))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        problem = f"cannot listen at {host}:{port}: {reason}"
        raise ConfigError(problem, fix="choose another with --port") from None
    server = WebServer(predictor, ["localhost", host, socket.gethostname()], most_pixels, names)

    def end(number: int, frame: FrameType | None) -> None:
        server.should_exit = True

    # uvicorn handles signals itself while it runs, and raises them again afterwards.
    with handling(end):
        address = f"http://{host}:{listener.getsockname()[1]}"
        name = f"{predictor.metadata.name} {predictor.metadata.model_version}, {predictor.kind}"
        print(f"{name}: {address}/", flush=True)
        print("for trying a model, not for production; Ctrl-C ends it", flush=True)
        server.run(sockets=[listener])
    if not (server.model.thread.idle and server.model.decoder.idle):
        # A running decoder or model cannot be interrupted.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


_FOLDER = Path(__file__).with_name("page")
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


async def _page(request: Request) -> Response:
    name = request.path_params.get("file", "page.html")
    path = _FOLDER / name
    if name not in os.listdir(_FOLDER) or path.suffix not in _TYPES:
        raise LookupError(f"there is not a file {name!r} of the page")
    return Response(path.read_bytes(), media_type=_TYPES[path.suffix], headers={"Cache-Control": "no-cache"})
