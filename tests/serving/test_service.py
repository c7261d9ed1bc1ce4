"""Parts of the service in this process: formats of images, the batcher, and what runs outside of the event loop."""

from __future__ import annotations

import asyncio
import io
import json
import struct
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import plateaux
from plateaux.core.errors import DataError
from plateaux.prediction.inputs import prepare
from plateaux.serving import protocol
from plateaux.serving.batching import Batcher
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
