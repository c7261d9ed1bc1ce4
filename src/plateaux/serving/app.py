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
from functools import partial
from uuid import uuid4

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from plateaux.core.errors import DataError, PlateauxError
from plateaux.core.formatting import json_safe
from plateaux.deploy.bundle import Bundle
from plateaux.prediction.inputs import PreparedInputs
from plateaux.prediction.predictions import Predictions
from plateaux.prediction.predictor import Predictor
from plateaux.serving import protocol
from plateaux.serving.batching import Batcher, measure_batch_size
from plateaux.serving.limits import BusyError, DecodingPool, Found, MemoryBudget, TooLargeError
from plateaux.serving.metrics import ServiceMetrics
from plateaux.serving.page import render_page
from plateaux.serving.settings import API_KEY_VARIABLE, ServeSettings
from plateaux.storage.run import own_version

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
SMALL = 1 << 16  # bytes that are parsed in the event loop: a change of threads would take longer
OPEN_ENDPOINTS = ("live", "ready", "page")  # without the API key
access_log = logging.getLogger("plateaux.serving.access")
logger = logging.getLogger(__name__)

Endpoint = Callable[["Service", Request], Awaitable[Response]]


class UnknownModelError(PlateauxError):
    """The path names another model."""


STATUS: tuple[tuple[type[Exception], int], ...] = (
    (UnknownModelError, 404),
    (TooLargeError, 413),
    (BusyError, 429),
    (DataError, 400),
)


class Service:
    """A loaded bundle with its batcher and metrics; one per worker process."""

    def __init__(self, settings: ServeSettings) -> None:
        self.settings = settings
        self.bundle = Bundle.open(settings.bundle, sha256=settings.sha256)
        backend = self.bundle.onnx_backend(threads=settings.threads)
        self.predictor: Predictor = self.bundle.predictor(backend, max_batch=settings.max_rows)
        calibration = self.bundle.manifest.calibration
        self.metrics = ServiceMetrics(None if calibration is None else calibration.alarm)
        self.outputs = protocol.output_names(self.predictor.outputs)
        self.api_key = os.environ.get(API_KEY_VARIABLE, "")
        size = settings.max_batch or measure_batch_size(backend, self.bundle.golden_inputs())[0]
        self.max_batch = self.predictor.max_batch = size  # also for a request with more rows
        self.max_json = protocol.max_json_bytes(self.predictor.contract, settings)
        self.memory, self.pool = MemoryBudget(settings.max_memory), DecodingPool(settings.max_queue)
        limits = {"max_batch": size, "max_queue": settings.max_queue}
        self.batcher = Batcher(self.predictor, observe=self.metrics.observe_batch, **limits)

    async def decode(self, function: Callable[[], Found], size: int | None = None) -> Found:
        """Return the result of a function, computed outside the event loop unless its input has few bytes."""
        return function() if size is not None and size <= SMALL else await self.pool.run(function)

    async def predict(self, inputs: PreparedInputs) -> Predictions:
        """Return predictions from a shared batch."""
        protocol.check_rows(len(inputs), self.settings.max_rows)
        return await self.batcher.predict(inputs)

    def is_allowed(self, request: Request) -> bool:
        """Return whether a request has the API key, if there is one."""
        if not self.api_key:
            return True
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        sent = request.headers.get("x-api-key", bearer)
        return hmac.compare_digest(sent.encode(), self.api_key.encode())


def create_app(settings: ServeSettings, started: Callable[[Service], None] = lambda service: None) -> Starlette:
    """Return the application of a worker process, which calls `started` before it takes requests."""
    service = Service(settings)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        service.batcher.start()
        started(service)
        try:
            yield
        finally:
            await service.batcher.stop()
            service.pool.stop()

    def route(path: str, name: str, endpoint: Endpoint, method: str = "GET") -> Route:
        return Route(path, _guarded(service, name, endpoint), methods=[method], name=name)

    prefixes = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
    return Starlette(
        routes=[  # compared with the path of a request in this order
            *(route(f"{prefix}/infer", "infer", _infer, "POST") for prefix in prefixes),
            route("/predict", "predict", _predict, "POST"),
            route("/", "page", _page),
            route("/metrics", "metrics", _metrics),
            route("/schema", "schema", _schema),
            route("/v2", "server", _server_metadata),
            route("/v2/health/live", "live", _live),
            route("/v2/health/ready", "ready", _live),
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
    """Return a response within the deadline, which holds for reading, decoding, waiting, and computing together."""
    try:
        with service.memory.request() as request.state.reserve:
            async with asyncio.timeout(service.settings.deadline_s):
                return await endpoint(service, request)
    except ClientDisconnect:
        return Response(status_code=499)
    except TimeoutError:
        return _error(504, "The request was not answered before its deadline. Retry later")
    except PlateauxError as error:
        status = next((code for kind, code in STATUS if isinstance(error, kind)), 500)
        response = _error(status, str(error))
        if isinstance(error, BusyError):
            response.headers["retry-after"] = str(round(error.retry_after_s))
        return response
    except Exception as error:  # no traceback may reach a client
        logger.error("%s: %s: %s", request.state.request_id, type(error).__name__, error)
        return _error(500, f"Internal error. The log has the details for the request {request.state.request_id}")


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": message}, status_code=status)


async def _read_body(service: Service, request: Request, *, is_json: bool) -> bytes:
    """Return the body of a request, and stop reading at the limit."""
    limit = service.max_json if is_json else service.settings.max_bytes
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise DataError("Compressed bodies are not accepted. Send the body without Content-Encoding")
    length = request.headers.get("content-length", "")
    announced = int(length) if length.isdecimal() and len(length) < 20 else 0
    parts, size, has_more = list[bytes](), 0, True
    while has_more:  # faster than `request.stream()`
        if max(size, announced) > limit:
            raise TooLargeError(f"The body has {max(size, announced):,} bytes or more. Expected: at most {limit:,}")
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(part := message.get("body", b""))
        request.state.reserve(len(part))
        size, has_more = size + len(part), message.get("more_body", False)
    return b"".join(parts)


async def _live(service: Service, request: Request) -> Response:
    return Response(status_code=200)  # also ready: a worker listens when its bundle is loaded


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
        raise UnknownModelError(
            f"There is no model {name[:100]!r} of version {version[:20]!r}; this is {service.settings.name!r}"
        )


async def _model_metadata(service: Service, request: Request) -> Response:
    _check_model(service, request)
    return JSONResponse(protocol.model_metadata(service.settings.name, service.predictor.contract, service.outputs))


async def _schema(service: Service, request: Request) -> Response:
    return JSONResponse(service.predictor.contract.to_json_schema())


async def _model_ready(service: Service, request: Request) -> Response:
    _check_model(service, request)
    return Response(status_code=200)


async def _infer(service: Service, request: Request) -> Response:
    _check_model(service, request)
    length = request.headers.get(protocol.HEADER_LENGTH)
    if length is not None and not (length.isdecimal() and len(length) < 12):
        raise DataError(f"{protocol.HEADER_LENGTH} is not a number")
    body = await _read_body(service, request, is_json=length is None)
    settings, reserve = service.settings, request.state.reserve
    parts = protocol.split_body(body, None if length is None else int(length), service.max_json)
    parse = partial(protocol.parse_request, *parts, service.outputs, settings.max_rows, reserve)
    parsed = await service.decode(parse, len(parts[0]))
    prepared = partial(
        protocol.prepare_tensors, parsed.tensors, service.predictor.contract, settings.max_pixels, reserve
    )
    found = await service.predict(await service.decode(prepared, None if parsed.is_encoded else len(body)))
    content, json_length = protocol.encode_response(found, parsed, service.settings.name, request.state.request_id)
    if json_length is None:
        return Response(content, media_type="application/json")
    headers = {protocol.HEADER_LENGTH: str(json_length)}
    return Response(content, media_type="application/octet-stream", headers=headers)


async def _predict(service: Service, request: Request) -> Response:
    """Answer an image file or JSON with readable records."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_json = kind == "application/json"
    body = await _read_body(service, request, is_json=is_json)
    contract, settings, reserve = service.predictor.contract, service.settings, request.state.reserve
    if is_json:
        read: Callable[[], PreparedInputs] = partial(protocol.prepare_json, body, contract, settings.max_rows, reserve)
    else:
        if not contract.is_image:
            raise DataError("The body is not JSON. Expected: Content-Type: application/json with the key inputs")
        is_form = kind == "multipart/form-data"
        file = await service.decode(partial(_uploaded_file, request, body)) if is_form else body
        read = partial(protocol.prepare_images, [file], contract, settings.max_pixels, reserve)
    is_text = contract.preprocessing.tokenizer is not None
    found = await service.predict(await service.decode(read, len(body) if is_json and not is_text else None))
    tree = {"model": service.settings.name, "predictions": found.to_records(), "remark": found.remark}
    return JSONResponse(json_safe(tree))


def _uploaded_file(request: Request, body: bytes) -> bytes:
    """Return the first file of a form."""
    from starlette.formparsers import MultiPartException, MultiPartParser

    async def stream() -> AsyncGenerator[bytes, None]:
        yield body

    async def read() -> bytes:
        form = await MultiPartParser(request.headers, stream(), max_files=1, max_fields=4).parse()
        files = [value for value in form.values() if not isinstance(value, str)]
        return await files[0].read()

    try:
        return asyncio.run(read())
    except (MultiPartException, KeyError, ValueError, IndexError):
        raise DataError("The form has no file. Expected: one file, as in curl -F file=@image.jpg") from None
