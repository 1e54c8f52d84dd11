"""A small local server of one model, to try it: the Open Inference Protocol v2, and a page.

It is not for production: one process, one request at a time, no authentication. For that there
are Triton and KServe (`kubedet model layout`), which speak the same protocol.
"""

import os
import socket
import sys
from types import FrameType

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trainer.bounded_text import whole_number
from trainer.data.images import MAX_PIXELS
from trainer.errors import ConfigError, DataError, KubedetError
from trainer.export import inference_protocol, page_files
from trainer.export.model_thread import ModelThread
from trainer.export.predict import ImageTooLarge, Predictor, as_json, decode_image
from trainer.export.serving_limits import Bodies, LimitedConnection, RequestRefused
from trainer.stop_signals import handling

_HEADER = "Inference-Header-Content-Length"
_CLOSING = 4
"""Seconds in which connections may end when the server is to end, before they are cut off."""

_SAFETY = {
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
        self._name: str = predictor.metadata["name"]
        self._version: str = predictor.metadata["model_version"]
        self._bodies, self.model_thread = Bodies(), ModelThread()

    def routes(self) -> list[Route]:
        model = "/v2/models/{name}"
        versioned = model + "/versions/{version}"
        return [
            Route("/", self.page),
            Route("/page/{file}", self.page_file),
            Route("/model.json", self.model),
            Route("/detect", self.detect, methods=["POST"]),
            Route("/v2", self.about),
            Route("/v2/health/live", self.healthy),
            Route("/v2/health/ready", self.healthy),
            *(Route(path, self.describe) for path in (model, versioned)),
            *(Route(f"{path}/ready", self.ready) for path in (model, versioned)),
            *(Route(f"{path}/infer", self.infer, methods=["POST"]) for path in (model, versioned)),
        ]

    def end(self) -> None:
        """Refuse what waits and what comes; what is computed has some seconds."""
        self._bodies.end()
        self.model_thread.end()

    async def page(self, request: Request) -> Response:
        return page_files.response("page.html")

    async def page_file(self, request: Request) -> Response:
        return page_files.response(request.path_params["file"])

    async def model(self, request: Request) -> Response:
        """What the page has to know of the model."""
        metadata = self._predictor.metadata
        return JSONResponse(
            {
                "name": self._name,
                "version": self._version,
                "format": self._predictor.kind,
                "classes": metadata["classes"],
                "max_pixels": self._most_pixels,
            }
        )

    async def about(self, request: Request) -> Response:
        extensions = ["binary_tensor_data"]
        version = self._predictor.metadata["versions"]["kubedet"]
        return JSONResponse({"name": "kubedet", "version": version, "extensions": extensions})

    async def healthy(self, request: Request) -> Response:
        return JSONResponse({"live": True, "ready": True})

    async def ready(self, request: Request) -> Response:
        self._check_model(request)
        return JSONResponse({"name": self._name, "ready": True})

    async def describe(self, request: Request) -> Response:
        self._check_model(request)
        metadata = self._predictor.metadata
        head = {
            "name": self._name,
            "versions": [self._version],
            "platform": f"kubedet_{self._predictor.kind}",
        }
        return JSONResponse({**head, **inference_protocol.describe_tensors(metadata)})

    async def infer(self, request: Request) -> Response:
        self._check_model(request)
        length = request.headers.get(_HEADER)
        json_length = whole_number(length) if length is not None else None
        if length is not None and json_length is None:
            raise DataError(f"the header {_HEADER} must be a number")
        with self._bodies.hold() as held:
            body = await self._bodies.read(request.stream(), held)
            return await self.model_thread.run(lambda: self._infer(body, json_length))

    def _infer(self, body: bytes, json_length: int | None) -> Response:
        request, images = inference_protocol.read_request(body, json_length, self._predictor.size)
        outputs = self._predictor.runtime.run(images)
        header = {"model_name": self._name, "model_version": self._version}
        response, json_length = inference_protocol.write_response(header, request, outputs)
        if json_length is None:
            return Response(response, media_type="application/json")
        return Response(response, media_type="application/octet-stream", headers={_HEADER: str(json_length)})

    async def detect(self, request: Request) -> Response:
        with self._bodies.hold() as held:
            body = await self._bodies.read(request.stream(), held)
            return await self.model_thread.run(lambda: self._detect(body))

    def _detect(self, body: bytes) -> Response:
        image = decode_image(body, "what was sent", self._most_pixels)
        detections = self._predictor(image)
        return JSONResponse({"model": f"{self._name} {self._version}", **as_json(detections, image)})

    def _check_model(self, request: Request) -> None:
        name, version = request.path_params["name"], request.path_params.get("version")
        if name != self._name or version not in (None, self._version):
            requested = f"{name} {version}" if version else name
            raise LookupError(f"there is no model {requested}; this server has {self._name} {self._version}")


class _Guarded:
    """Refuses requests that pages of other sites make, and tells browsers what the page may do."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        site = dict(scope["headers"]).get(b"sec-fetch-site", b"none")
        if scope["method"] not in ("GET", "HEAD") and site not in (b"none", b"same-origin"):
            refusal = JSONResponse({"error": "pages of other sites cannot use this server"}, 403)
            return await refusal(scope, receive, send)

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_SAFETY)
            await send(message)

        await self._app(scope, receive, guarded)


def application(
    predictor: Predictor, hosts: list[str], most_pixels: int = MAX_PIXELS, server: ModelServer | None = None
) -> Starlette:
    """The server of an opened model.

    Args:
        predictor: the model.
        hosts: host names that requests may use (so another site's page cannot reach it by rebinding its own);
            "*" is any.
        most_pixels: larger images are refused before they are decoded.
        server: its routes, where whoever calls is to end them.
    """

    async def refused(request: Request, error: Exception) -> Response:
        message = error.message if isinstance(error, KubedetError) else str(error)
        status = 413 if isinstance(error, ImageTooLarge) else 400
        if isinstance(error, RequestRefused):
            status = error.status
        fix = {"fix": error.fix} if isinstance(error, KubedetError) and error.fix else {}
        response = JSONResponse({"error": message, **fix}, 404 if isinstance(error, LookupError) else status)
        if isinstance(error, RequestRefused):  # What of the request has not come will not be read.
            response.headers["Connection"] = "close"
        return response

    return Starlette(
        routes=(server or ModelServer(predictor, most_pixels)).routes(),
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts), Middleware(_Guarded)],
        exception_handlers={KubedetError: refused, LookupError: refused},
    )


class _WebServer(uvicorn.Server):
    """uvicorn, which tells the routes that it is about to end."""

    def __init__(self, config: uvicorn.Config, routes: ModelServer) -> None:
        super().__init__(config)
        self._routes = routes

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._routes.end()
        await super().shutdown(sockets)


def settings(app: Starlette) -> uvicorn.Config:
    """How the server's connections are treated."""
    return uvicorn.Config(
        app, port=0, http=LimitedConnection, ws="none", log_level="error", access_log=False,
        timeout_graceful_shutdown=_CLOSING,
    )  # fmt: skip


def serve(predictor: Predictor, host: str, port: int, most_pixels: int = MAX_PIXELS) -> None:
    """Serve until it is stopped (Ctrl-C, SIGTERM): within five seconds, whatever it is doing.

    Args:
        predictor: the model.
        host: address to listen at.
        port: 0 takes a free one.
        most_pixels: larger images are refused before they are decoded.

    Raises:
        ConfigError: one cannot listen there.
    """
    try:
        listener = socket.create_server((host, port))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"cannot listen at {host}:{port}: {reason}", fix="choose another with --port"
        ) from None
    local = host in ("127.0.0.1", "localhost", "::1")
    routes = ModelServer(predictor, most_pixels)
    app = application(predictor, ["127.0.0.1", "localhost"] if local else ["*"], most_pixels, routes)
    server = _WebServer(settings(app), routes)

    def end(number: int, frame: FrameType | None) -> None:
        server.should_exit = True

    # uvicorn handles signals itself once it runs, and sends them again to these when it has ended.
    with handling(end):
        # Whoever reads these lines in a log may go on when they are there.
        address = f"http://{host}:{listener.getsockname()[1]}"
        name = f"{predictor.metadata['name']} {predictor.metadata['model_version']}, {predictor.kind}"
        print(f"{name}: {address}/", flush=True)
        print("for trying a model, not for production; Ctrl-C ends it", flush=True)
        server.run(sockets=[listener])
    if not routes.model_thread.idle:
        # A decoder or a model in the middle of an image cannot be stopped, only left.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
