"""Parts of the service in this process: formats of images, the batcher, and what runs outside of the event loop."""

from __future__ import annotations

import asyncio
import html
import io
import json
import os
import shlex
import struct
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import plateaux
from plateaux.core.errors import DataError
from plateaux.data.data_summary import TensorSummary
from plateaux.data.preprocessing import Preprocessing
from plateaux.deploy.bundle import Bundle
from plateaux.prediction.inputs import PreparedInputs, prepare
from plateaux.prediction.predictions import Predictions
from plateaux.serving import protocol
from plateaux.serving.batching import Batcher
from plateaux.serving.limits import BusyError, DecodingPool, MemoryBudget, TooLargeError
from plateaux.serving.metrics import forget_ended_workers
from plateaux.serving.page import render_page
from plateaux.serving.pixels import count_pixels
from plateaux.serving.settings import ServeSettings

for name in ("onnxruntime", "starlette", "prometheus_client"):
    pytest.importorskip(name, reason='pip install "plateaux[serve]"')
pytestmark = pytest.mark.xdist_group("serving")  # one worker makes the bundle once


def encode_image(kind: str) -> bytes:
    content = io.BytesIO()
    Image.fromarray(np.zeros((8, 8), dtype=np.uint8)).save(content, kind)
    return content.getvalue()


def test_only_image_formats_without_code_are_opened() -> None:
    kinds = ("png", "jpeg", "webp", "gif", "bmp", "ppm", "tiff")
    assert count_pixels([encode_image(kind) for kind in kinds], 7 * 64, None) == 7 * 64
    with pytest.raises(DataError, match="Expected: a file of PNG, JPEG"):
        count_pixels([encode_image("eps")], 64, None)


class Echo:
    """A predictor whose answer for a row is its value. A row of 13 fails its batch; the sizes of batches are kept."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def predict_prepared(self, inputs: PreparedInputs) -> Any:
        self.batches.append(len(inputs))
        values = inputs.arrays["x"]
        if (values == 13).any():
            raise DataError("13 is out of range")
        answers = {name: np.zeros(len(values)) for name in ("label", "entropy", "mutual_information", "ood_score")}
        answers |= {"probability": values.astype(np.float64), "probabilities": np.zeros((len(values), 2))}
        return Predictions.from_answers(answers, ("a", "b"), "max_probability", False, "")


def run_batches(requests: list[list[int]], **limits: int) -> tuple[Echo, list[Any]]:
    """Return the predictor, and the answer or the error of every request; all of them arrive at once."""
    echo = Echo()

    async def run() -> list[Any]:
        batcher = Batcher(echo, **{"max_batch": 4, "max_queue": 100} | limits)  # type: ignore[arg-type]
        batcher.start()
        inputs = [PreparedInputs({"x": np.array(values)}) for values in requests]
        found = await asyncio.gather(*map(batcher.predict, inputs), return_exceptions=True)
        assert batcher.rows == 0
        await batcher.stop()
        return found

    answers = [each if isinstance(each, Exception) else each.probability.tolist() for each in asyncio.run(run())]
    return echo, answers


def test_concurrent_requests_get_their_own_answers() -> None:
    requests = [[1], [2, 3], [4], [5, 6, 7], [8]]
    echo, answers = run_batches(requests)
    assert answers == requests
    assert echo.batches == [4, 4]


def test_a_batch_has_at_most_its_limit_of_rows_unless_one_request_has_more() -> None:
    echo, answers = run_batches([[1, 2, 3], [4, 5], [6] * 7, [8]])
    assert echo.batches == [3, 2, 7, 1]
    assert answers[2] == [6] * 7


def test_rows_that_do_not_fit_into_the_queue_are_refused_unless_it_is_empty() -> None:
    _, answers = run_batches([[1, 2, 3], [4, 5], [6]], max_queue=4)
    assert [isinstance(each, BusyError) for each in answers] == [False, True, False]
    _, answers = run_batches([[1] * 9], max_queue=4)
    assert answers == [[1] * 9]


def test_only_the_request_at_fault_fails() -> None:
    echo, answers = run_batches([[1], [2], [13], [4], [13], [6], [7], [8]], max_batch=8)
    assert [isinstance(each, DataError) for each in answers] == [each == 4 for each in (0, 0, 4, 0, 4, 0, 0, 0)]
    assert answers[3] == [4]
    assert answers[7] == [8]
    assert echo.batches[0] == 8


def test_memory_is_reserved_by_all_requests_together() -> None:
    budget = MemoryBudget(100)
    with budget.request() as first, budget.request() as second:
        first(60)
        with pytest.raises(BusyError):
            second(50)
        second(40)
        with pytest.raises(TooLargeError, match="needs 101 bytes"):
            first(41)
    assert budget.used == 0


def test_more_calls_than_the_pool_takes_are_refused_and_begun_calls_end_before_their_request() -> None:
    ended, go_on = threading.Event(), threading.Event()

    def work() -> None:
        go_on.wait(60)
        ended.set()

    async def run() -> bool:
        pool = DecodingPool(1)
        first = asyncio.create_task(pool.run(work))
        await asyncio.sleep(0)
        with pytest.raises(BusyError):
            await pool.run(work)
        while not pool._threads._threads:
            await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.sleep(0.05)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await first
        return ended.is_set()

    assert asyncio.run(run())


def free(_: int) -> None:
    """Reserve memory of which there is enough."""


def test_parsed_json_counts_as_the_memory_that_it_takes() -> None:
    budget = MemoryBudget(32 << 20)
    with budget.request() as reserve, pytest.raises(TooLargeError):
        protocol.parse_json_object(b'{"inputs":[' + b"[]," * 1_000_000 + b"[]]}", reserve)


def test_the_pixels_of_all_images_of_a_request_count_together_also_after_resizing() -> None:
    files = [encode_image("png")] * 4
    with pytest.raises(DataError, match="have 192 pixels"):
        count_pixels(files, 190, None)
    with pytest.raises(DataError, match="have 1,024 pixels"):
        count_pixels(files, 1000, 32)


@pytest.mark.parametrize(
    ("datatype", "shape", "data"),
    [
        ("FP32", [1, 2, 2], [[[0.0], [0.0], [0.0], [0.0]]]),
        ("FP32", [2, 2], [[0.0, 0.0, 0.0, 0.0]]),
        ("UINT8", [1, 2], [200.7, 1]),
        ("UINT8", [1, 2], [300, 1]),
        ("INT64", [1, 2], [2**63, 1]),
        ("FP32", [1, 2], ["0.5", "0.5"]),
        ("FP32", [1, 2], [True, False]),
        ("BOOL", [1, 2], [2, 0]),
        ("FP32", [1, 2], [[0.5], 0.5]),
        ("BYTES", [2], ["\ud800", "a"]),
        ("BYTES", [1, 2], [["a"], ["b"]]),
        ([], [1, 2], [0.5, 0.5]),
        ({}, [1, 2], [0.5, 0.5]),
        ("FP32", [0, 2], []),
        ("FP32", [1, 2**63], [0.5]),
    ],
)
def test_data_that_are_not_of_their_datatype_and_shape_are_refused(datatype: Any, shape: list[int], data: Any) -> None:
    item = {"name": "x", "shape": shape, "datatype": datatype, "data": data}
    with pytest.raises(DataError):
        protocol.parse_request(json.dumps({"inputs": [item]}).encode(), memoryview(b""), ("label",), 8, free)


def test_nested_and_flat_data_of_a_tensor_are_equal() -> None:
    for data in ([[1, 2], [3, 4]], [1, 2, 3, 4]):
        item = {"name": "x", "shape": [2, 2], "datatype": "UINT8", "data": data}
        content = json.dumps({"inputs": [item]}).encode()
        found = protocol.parse_request(content, memoryview(b""), ("label",), 8, free)
        assert np.array_equal(np.asarray(found.tensors["x"]), [[1, 2], [3, 4]])


def test_values_of_workers_that_have_ended_are_removed(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    for pid in (ended.pid, os.getpid()):
        (tmp_path / f"gauge_livesum_{pid}.db").touch()
    (tmp_path / f"counter_{ended.pid}.db").touch()
    forgotten: list[int] = []
    forget_ended_workers(tmp_path, forgotten.append)
    assert forgotten == [ended.pid]


def test_a_quote_in_the_name_of_a_column_does_not_end_the_argument_of_curl(bundle: Path) -> None:
    predictor, manifest = plateaux.load_predictor(bundle), Bundle.open(bundle).manifest
    name = "it's; rm -rf /"
    table = replace(
        predictor.contract,
        inputs={"x": TensorSummary("float32", (1,), 0.0, 1.0)},
        preprocessing=Preprocessing(columns=(name,)),
    )
    predictor.contract = table
    page, _ = render_page(manifest, predictor, ServeSettings(bundle=str(bundle)), needs_key=False)
    (call,) = [html.unescape(line) for line in page.split("<pre>") if line.startswith("curl")]
    words = shlex.split(call.partition("</pre>")[0])
    assert json.loads(words[words.index("-d") + 1]) == {"inputs": [{name: 0}]}
    assert words[-1] == "http://HOST/predict"


def test_an_error_in_one_batch_does_not_end_the_batcher(bundle: Path) -> None:
    predictor = plateaux.load_predictor(bundle)
    inputs = prepare(np.zeros((1, 1, 8, 8), dtype=np.uint8), predictor.contract)
    problems = [OSError("No space left on device")]

    def observe(*_: Any) -> None:
        if problems:
            raise problems.pop()

    async def run() -> int:
        batcher = Batcher(predictor, max_batch=4, max_queue=8, observe=observe)
        batcher.start()
        with pytest.raises(OSError, match="No space left"):
            await asyncio.wait_for(batcher.predict(inputs), 60)
        found = await asyncio.wait_for(batcher.predict(inputs), 60)
        await batcher.stop()
        return len(found)

    assert asyncio.run(run()) == 1


def test_images_are_decoded_outside_of_the_event_loop(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise one request with many large images would block all others, and the health probes."""
    from plateaux.serving.app import create_app

    threads: list[str] = []
    original = protocol.prepare_tensors

    def record(*args: Any) -> Any:
        threads.append(threading.current_thread().name)
        return original(*args)

    monkeypatch.setattr(protocol, "prepare_tensors", record)
    png = encode_image("png")
    blob = struct.pack("<I", len(png)) + png
    encoded = {"name": "image", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": len(blob)}}
    header = json.dumps({"inputs": [encoded]}).encode()
    plain = {"name": "x", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": [0.0] * 64}

    async def post(app: Any, body: bytes, headers: list[tuple[bytes, bytes]]) -> int:
        scope = {"type": "http", "method": "POST", "path": "/v2/models/model/infer", "headers": headers}
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        await app({**scope, "query_string": b"", "root_path": "", "http_version": "1.1"}, receive, send)
        return int(sent[0]["status"])

    async def run() -> list[int]:
        app = create_app(ServeSettings(bundle=str(bundle), max_batch=4))
        async with app.router.lifespan_context(app):
            length = [(b"inference-header-content-length", str(len(header)).encode())]
            return [
                await post(app, header + blob, length),
                await post(app, json.dumps({"inputs": [plain]}).encode(), []),
            ]

    assert asyncio.run(run()) == [200, 200]
    main = threading.current_thread().name
    assert [name == main for name in threads] == [False, True]
