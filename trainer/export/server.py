"""A small local server of one model, to try it: the Open Inference Protocol v2, and a page.

It is not for production: one process, one request at a time, no authentication. For that there
are Triton and KServe (`kubedet model layout`), which speak the same protocol.
"""

import socket
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from trainer.errors import ConfigError, DataError, KubedetError
from trainer.export import inference_protocol
from trainer.export.predict import Predictor, as_json, decode_image

MOST_BYTES = 256 * 1024 * 1024
"""Largest body of a request."""
_HEADER = "Inference-Header-Content-Length"
_PAGE = Path(__file__).with_name("page.html")


class _Server:
    """The routes and their responses."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._name: str = predictor.metadata["name"]
        self._version: str = predictor.metadata["model_version"]
        self._one_at_a_time = Lock()

    def routes(self) -> list[Route]:
        model = "/v2/models/{name}"
        versioned = model + "/versions/{version}"
        return [
            Route("/", self.page),
            Route("/detect", self.detect, methods=["POST"]),
            Route("/v2", self.about),
            Route("/v2/health/live", self.healthy),
            Route("/v2/health/ready", self.healthy),
            *(Route(path, self.describe) for path in (model, versioned)),
            *(Route(f"{path}/ready", self.ready) for path in (model, versioned)),
            *(Route(f"{path}/infer", self.infer, methods=["POST"]) for path in (model, versioned)),
        ]

    async def page(self, request: Request) -> Response:
        return HTMLResponse(_PAGE.read_text())

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
        if length is not None and not length.isdecimal():
            raise DataError(f"the header {_HEADER} must be a number")
        body = await _body(request)
        request_json, images = inference_protocol.read_request(
            body, int(length) if length else None, self._predictor.size
        )
        outputs = await run_in_threadpool(self._run, images)
        header = {"model_name": self._name, "model_version": self._version}
        response, json_length = inference_protocol.write_response(header, request_json, outputs)
        if json_length is None:
            return Response(response, media_type="application/json")
        return Response(response, media_type="application/octet-stream", headers={_HEADER: str(json_length)})

    async def detect(self, request: Request) -> Response:
        body = await _body(request)
        return JSONResponse(await run_in_threadpool(self._detect, body))

    def _detect(self, body: bytes) -> dict[str, Any]:
        image = decode_image(body, "what was sent")
        with self._one_at_a_time:
            detections = self._predictor(image)
        return {"model": f"{self._name} {self._version}", **as_json(detections, image)}

    def _run(self, images: Any) -> list[Any]:
        with self._one_at_a_time:
            return self._predictor.runtime.run(images)

    def _check_model(self, request: Request) -> None:
        name, version = request.path_params["name"], request.path_params.get("version")
        if name != self._name or version not in (None, self._version):
            requested = f"{name} {version}" if version else name
            raise LookupError(f"there is no model {requested}; this server has {self._name} {self._version}")


async def _body(request: Request) -> bytes:
    parts, total = [], 0
    async for part in request.stream():
        total += len(part)
        if total > MOST_BYTES:
            raise DataError(f"the request is larger than {MOST_BYTES // 2**20} MiB")
        parts.append(part)
    return b"".join(parts)


def application(predictor: Predictor, hosts: list[str]) -> Starlette:
    """The server of an opened model.

    Args:
        predictor: the model.
        hosts: host names that requests may use (so another site's page cannot reach it by rebinding its own);
            "*" is any.
    """

    async def refused(request: Request, error: Exception) -> Response:
        message = error.message if isinstance(error, KubedetError) else str(error)
        return JSONResponse({"error": message}, 404 if isinstance(error, LookupError) else 400)

    return Starlette(
        routes=_Server(predictor).routes(),
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)],
        exception_handlers={KubedetError: refused, LookupError: refused},
    )


def serve(predictor: Predictor, host: str, port: int) -> None:
    """Serve until it is stopped (Ctrl-C, SIGTERM).

    Args:
        predictor: the model.
        host: address to listen at.
        port: 0 takes a free one.

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
    address = f"http://{host}:{listener.getsockname()[1]}"
    print(f"{predictor.metadata['name']} {predictor.metadata['model_version']}, {predictor.kind}: {address}/")
    print("for trying a model, not for production; Ctrl-C ends it", flush=True)
    hosts = ["127.0.0.1", "localhost"] if local else ["*"]
    config = uvicorn.Config(application(predictor, hosts), log_level="warning", access_log=False)
    with suppress(KeyboardInterrupt):  # Ctrl-C is how it is meant to end.
        uvicorn.Server(config).run(sockets=[listener])
