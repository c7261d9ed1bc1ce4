"""The HTTP application: health, Open Inference Protocol v2, `/predict`, metrics, and a page to try the model."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import uuid4

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from plateaux.core.errors import DataError, PlateauxError
from plateaux.core.formatting import json_safe
from plateaux.deploy.bundle import Bundle
from plateaux.prediction.inputs import PreparedInputs, prepare
from plateaux.prediction.predictions import Predictions
from plateaux.prediction.predictor import Predictor
from plateaux.serving import protocol
from plateaux.serving.batching import Batcher, DeadlineError, QueueFullError, measure_batch_size
from plateaux.serving.metrics import ServiceMetrics
from plateaux.serving.page import render_page
from plateaux.serving.pixels import check_pixels
from plateaux.serving.settings import API_KEY_VARIABLE, ServeSettings
from plateaux.storage.run import own_version

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
OPEN_ENDPOINTS = ("live", "ready", "page")  # without the API key
access_log = logging.getLogger("plateaux.serving.access")
logger = logging.getLogger(__name__)

Endpoint = Callable[["Service", Request], Awaitable[Response]]


class BodyTooLargeError(PlateauxError):
    """The body of a request exceeds the limit."""


STATUS: tuple[tuple[type[Exception], int], ...] = (
    (BodyTooLargeError, 413),
    (QueueFullError, 429),
    (DeadlineError, 504),
    (DataError, 400),
)


@dataclass(slots=True)
class Lifecycle:
    """Whether this worker is about to end, so that it reports that it is not ready for new requests."""

    is_draining: bool = False


class Service:
    """A loaded bundle with its batcher and metrics; one per worker process."""

    def __init__(self, settings: ServeSettings, lifecycle: Lifecycle) -> None:
        self.settings, self.lifecycle = settings, lifecycle
        self.bundle = Bundle.open(settings.bundle)
        backend = self.bundle.onnx_backend(threads=settings.threads)
        self.predictor: Predictor = self.bundle.predictor(backend, max_batch=settings.max_rows)
        calibration = self.bundle.manifest.calibration
        self.metrics = ServiceMetrics(None if calibration is None else calibration.alarm)
        self.outputs = protocol.output_names(self.predictor.outputs)
        self.api_key = os.environ.get(API_KEY_VARIABLE, "")
        size, self.speeds = settings.max_batch, dict[int, float]()
        if size is None:
            size, self.speeds = measure_batch_size(backend, self.bundle.golden_inputs())
        self.max_batch = self.predictor.max_batch = size  # also for a request with more rows
        logger.info("ready: batches of %d, the fastest of %s", size, ", ".join(map(str, self.speeds)) or "one")
        self.batcher: Batcher | None = None

    def start(self) -> None:
        """Start to compute in the running event loop."""
        limits = {"max_batch": self.max_batch, "max_queue": self.settings.max_queue}
        self.batcher = Batcher(self.predictor, observe=self.metrics.observe_batch, **limits)
        self.batcher.start()

    async def predict(self, inputs: PreparedInputs) -> Predictions:
        """Return predictions from a shared batch."""
        assert self.batcher is not None
        if len(inputs) > self.settings.max_rows:
            raise DataError(f"The request has {len(inputs)} rows. Expected: at most {self.settings.max_rows}")
        return await self.batcher.predict(inputs, self.settings.deadline_s)

    def is_allowed(self, request: Request) -> bool:
        """Return whether a request has the API key, if there is one."""
        if not self.api_key:
            return True
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        sent = request.headers.get("x-api-key", bearer)
        return hmac.compare_digest(sent.encode(), self.api_key.encode())


def create_app(settings: ServeSettings, lifecycle: Lifecycle) -> Starlette:
    """Return the application of a worker process."""
    service = Service(settings, lifecycle)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            if service.batcher is not None:
                await service.batcher.stop()

    def route(path: str, name: str, endpoint: Endpoint, method: str = "GET") -> Route:
        return Route(path, _guarded(service, name, endpoint), methods=[method], name=name)

    prefixes = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
    return Starlette(
        routes=[  # compared with the path of a request in this order
            *(route(f"{prefix}/infer", "infer", _infer, "POST") for prefix in prefixes),
            route("/predict", "predict", _predict, "POST"),
            route("/", "page", _page),
            route("/metrics", "metrics", _metrics),
            route("/v2", "server", _server_metadata),
            route("/v2/health/live", "live", _live),
            route("/v2/health/ready", "ready", _ready),
            *(route(prefix, "model", _model_metadata) for prefix in prefixes),
            *(route(f"{prefix}/ready", "model_ready", _model_ready) for prefix in prefixes),
        ],
        lifespan=lifespan,
    )


def _guarded(service: Service, name: str, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that checks the key, turns errors into responses, and records and logs every request."""

    async def handle(request: Request) -> Response:
        begin = time.perf_counter()
        sent = request.headers.get("x-request-id", "")
        request.state.request_id = sent if REQUEST_ID.fullmatch(sent) else uuid4().hex
        if name in OPEN_ENDPOINTS or service.is_allowed(request):
            response = await _answer(service, request, endpoint)
        else:
            response = _error(401, "The API key is missing or wrong. Send it as Authorization: Bearer KEY")
        response.headers["x-request-id"] = request.state.request_id
        seconds = time.perf_counter() - begin
        service.metrics.observe_request(name, response.status_code, seconds)
        if service.settings.log_requests:
            record = {"id": request.state.request_id, "endpoint": name, "status": response.status_code}
            access_log.info(json.dumps({**record, "ms": round(1000 * seconds, 2)}))
        return response

    return handle


async def _answer(service: Service, request: Request, endpoint: Endpoint) -> Response:
    try:
        return await endpoint(service, request)
    except ClientDisconnect:
        return Response(status_code=499)
    except PlateauxError as error:
        status = next((code for kind, code in STATUS if isinstance(error, kind)), 500)
        response = _error(status, str(error))
        if isinstance(error, QueueFullError):
            response.headers["retry-after"] = str(round(error.retry_after_s))
            response.headers["connection"] = "close"  # the next try waits in the listen backlog
        if isinstance(error, BodyTooLargeError):
            response.headers["connection"] = "close"  # the rest of the body is not read
        return response
    except Exception as error:  # no traceback may reach a client
        logger.error("%s: %s: %s", request.state.request_id, type(error).__name__, error)
        return _error(500, f"Internal error. The log has the details for the request {request.state.request_id}")


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": message}, status_code=status)


async def _read_body(service: Service, request: Request) -> bytes:
    """Return the body of a request, and stop reading at the limit."""
    limit = service.settings.max_bytes
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise DataError("Compressed bodies are not accepted. Send the body without Content-Encoding")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and len(length) < 20 and int(length) > limit:
        raise BodyTooLargeError(f"The body has {int(length):,} bytes. Expected: at most {limit:,}")
    parts, size, has_more = list[bytes](), 0, True
    while has_more:  # faster than `request.stream()`
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(part := message.get("body", b""))
        size, has_more = size + len(part), message.get("more_body", False)
        if size > limit:
            raise BodyTooLargeError(f"The body has more than {limit:,} bytes, the limit of this service")
    return b"".join(parts)


async def _live(service: Service, request: Request) -> Response:
    return Response(status_code=200)


async def _ready(service: Service, request: Request) -> Response:
    return Response(status_code=503 if service.lifecycle.is_draining else 200)


async def _metrics(service: Service, request: Request) -> Response:
    content, kind = service.metrics.render()
    return Response(content, media_type=kind)


async def _page(service: Service, request: Request) -> Response:
    content, headers = render_page(
        service.bundle.manifest, service.predictor, service.settings, needs_key=bool(service.api_key)
    )
    return HTMLResponse(content, headers=headers)


async def _server_metadata(service: Service, request: Request) -> Response:
    return JSONResponse({"name": "plateaux", "version": own_version(), "extensions": ["binary_tensor_data"]})


def _check_model(service: Service, request: Request) -> None:
    name, version = request.path_params["model"], request.path_params.get("version", "1")
    if name != service.settings.name or version != "1":
        raise DataError(
            f"There is no model {name[:100]!r} of version {version[:20]!r}; this is {service.settings.name!r}"
        )


async def _model_metadata(service: Service, request: Request) -> Response:
    _check_model(service, request)
    return JSONResponse(protocol.model_metadata(service.settings.name, service.predictor.contract, service.outputs))


async def _model_ready(service: Service, request: Request) -> Response:
    _check_model(service, request)
    return await _ready(service, request)


async def _infer(service: Service, request: Request) -> Response:
    _check_model(service, request)
    body = await _read_body(service, request)
    length = request.headers.get(protocol.HEADER_LENGTH)
    if length is not None and not (length.isdecimal() and len(length) < 12):
        raise DataError(f"{protocol.HEADER_LENGTH} is not a number")
    json_bytes = None if length is None else int(length)
    parsed = protocol.parse_request(body, json_bytes, service.outputs, service.settings)
    prepared = partial(
        protocol.prepare_tensors, parsed.tensors, service.predictor.contract, service.settings.max_pixels
    )
    found = await service.predict(await asyncio.to_thread(prepared) if parsed.is_encoded else prepared())
    content, json_length = protocol.encode_response(found, parsed, service.settings.name, request.state.request_id)
    if json_length is None:
        return Response(content, media_type="application/json")
    headers = {protocol.HEADER_LENGTH: str(json_length)}
    return Response(content, media_type="application/octet-stream", headers=headers)


async def _predict(service: Service, request: Request) -> Response:
    """Answer an image file or JSON with readable records."""
    body = await _read_body(service, request)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    contract = service.predictor.contract
    if kind == "multipart/form-data":
        value: Any = await _uploaded_file(request, body)
    elif kind == "application/json":
        tree = protocol.parse_json_object(body)
        value = tree["inputs"] if set(tree) == {"inputs"} else tree
    else:
        value = body
    if isinstance(value, bytes):
        if not contract.is_image:
            raise DataError("The body is not JSON. Expected: Content-Type: application/json with the key inputs")
        check_pixels([value], service.settings.max_pixels)
    found = await service.predict(await asyncio.to_thread(prepare, value, contract, paths=False))
    tree = {"model": service.settings.name, "predictions": found.to_records(), "remark": found.remark}
    return JSONResponse(json_safe(tree))


async def _uploaded_file(request: Request, body: bytes) -> bytes:
    """Return the first file of a form."""
    from starlette.formparsers import MultiPartException, MultiPartParser

    async def stream() -> AsyncGenerator[bytes, None]:
        yield body

    try:
        form = await MultiPartParser(request.headers, stream(), max_files=1, max_fields=4).parse()
    except (MultiPartException, KeyError, ValueError):
        raise DataError("The form cannot be parsed. Expected: one file in multipart/form-data") from None
    for value in form.values():
        if not isinstance(value, str):
            return await value.read()
    raise DataError("The form has no file. Expected: one file, as in curl -F file=@image.jpg")
