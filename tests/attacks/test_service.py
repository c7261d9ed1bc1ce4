"""Attacks on a real server process, while honest clients use it: they are answered, and so are the probes.

The times and the memory of a busy machine prove nothing, so they are compared with their limits in the long form only.
"""

from __future__ import annotations

import asyncio
import io
import json
import statistics
import struct
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from attacking import COUNTS, IS_LONG
from digit_runs import train_digits
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor, nn

import plateaux
from tests.serving.conftest import RunningServer, running

for name in ("onnxruntime", "starlette", "granian", "prometheus_client", "multipart", "sklearn"):
    pytest.importorskip(name, reason='pip install "plateaux[serve,demo]"')

pytestmark = pytest.mark.xdist_group("attacked service")  # one worker makes the bundle and starts the server once

SECONDS = 40.0 if IS_LONG else 3.0  # of one attack
CLIENTS = 64 if IS_LONG else 8
REQUESTS = 10_000 if IS_LONG else 150
HEALTH_S, MEMORY_MB, MEMORY_AFTER = 1.0, 400.0, 1.3
LENGTH, TOKENS = 6, 20


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a bundle that takes images."""
    folder = tmp_path_factory.mktemp("attacked")
    train_digits(folder / "run", members=2, model={"name": "mlp", "hidden_sizes": [8]})
    plateaux.export(folder / "run", folder / "digits")
    return folder / "digits"


def memory_mb(server: RunningServer) -> float:
    total, waiting = 0, [server.process.pid]
    while waiting:
        pid = waiting.pop()
        with suppress(OSError):
            waiting += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


class Watch:
    """An honest client, a probe, and the memory of a server, in threads of their own."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        self.answers, self.failures = 0, list[str]()
        self.health, self.memory = list[float](), list[float]()
        self._end = threading.Event()
        self._threads = [threading.Thread(target=each) for each in (self._ask, self._probe, self._measure)]
        x = np.random.default_rng(0).random((1, 1, 8, 8)).round(3)
        item = {"name": "x", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": x.ravel().tolist()}
        self._body = json.dumps({"inputs": [item], "outputs": [{"name": "probabilities"}]}).encode()
        self._expected = self._infer()

    def _infer(self) -> list[float]:
        request = urllib.request.Request(f"{self.server.url}/v2/models/digits/infer", self._body)
        with urllib.request.urlopen(request, timeout=300) as response:
            data: list[float] = json.loads(response.read())["outputs"][0]["data"]
            return data

    def _ask(self) -> None:
        while not self._end.wait(0.02):
            try:
                if self._infer() != pytest.approx(self._expected, abs=1e-5):
                    self.failures.append("other probabilities")
                self.answers += 1
            except urllib.error.HTTPError as error:
                if error.code != 429:  # busy: an honest client tries again
                    self.failures.append(f"status {error.code}")
            except OSError as error:
                self.failures.append(f"{type(error).__name__}: {error}")

    def _probe(self) -> None:
        while not self._end.wait(0.1):
            begin = time.monotonic()
            try:
                with urllib.request.urlopen(f"{self.server.url}/v2/health/live", timeout=300):
                    self.health.append(time.monotonic() - begin)
            except OSError as error:
                self.failures.append(f"health: {error}")

    def _measure(self) -> None:
        while not self._end.wait(0.2):
            self.memory.append(memory_mb(self.server))

    def __enter__(self) -> Watch:
        self.at_rest = memory_mb(self.server)
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for each in self._threads:
            each.join()

    def check(self) -> None:
        """Check what holds during every attack."""
        log = self.server.log.read_text()
        COUNTS["tracebacks"] += log.count("Traceback")
        slow, most = max(self.health, default=0.0), max([*self.memory, self.at_rest]) - self.at_rest
        print(f"honest {self.answers}, health {slow:.2f} s, memory at rest {self.at_rest:.0f} MB, +{most:.0f} MB")
        assert self.failures == []
        assert "Traceback" not in log
        assert self.answers > 0
        assert self.health
        if IS_LONG:
            assert slow <= HEALTH_S
            assert most <= MEMORY_MB
            time.sleep(60)
            assert statistics.median(memory_mb(self.server) for _ in range(5)) <= MEMORY_AFTER * self.at_rest


def post(path: str, body: bytes, **headers: object) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open a connection; that the server closes it is what an attacker has to expect."""
    with suppress(OSError, asyncio.IncompleteReadError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            yield reader, writer
        finally:
            writer.close()


async def never_read(port: int, until: float) -> None:
    """S2: pipeline requests, and never read an answer."""
    async with connected(port) as (_, writer):
        while time.monotonic() < until:
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 50)
            with suppress(TimeoutError):
                await asyncio.wait_for(writer.drain(), max(0.1, until - time.monotonic()))


async def endless_head(port: int, until: float, begin: bytes = b"POST /predict HTTP/1.1\r\nHost: x\r\n") -> None:
    """S3: headers without an end, at most 200 MB on a connection; then the next one."""
    while time.monotonic() < until:
        async with connected(port) as (_, writer):
            writer.write(begin)
            for number in range(3200):
                if time.monotonic() > until:
                    return
                writer.write(b"X-%d: " % number + b"a" * (1 << 16) + b"\r\n")
                await writer.drain()
        await asyncio.sleep(0.01)


def endless_trailers(port: int, until: float) -> Any:
    """S3: the same after a body in chunks."""
    head = b"POST /predict HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n"
    return endless_head(port, until, head)


async def send_again_and_again(port: int, until: float, content: bytes, allowed: set[int]) -> None:
    while time.monotonic() < until:
        async with connected(port) as (reader, writer):
            writer.write(content)
            with suppress(OSError):
                await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
            assert int(head.split()[1]) in allowed, head
        COUNTS["inputs"] += 1
        await asyncio.sleep(0.01)


def lists(port: int, until: float) -> Any:
    """S4: JSON of empty lists."""
    body = b'{"inputs":[' + b"[]," * 10_000_000 + b"[]]}"
    return send_again_and_again(port, until, post("/predict", body, Content_Type="application/json"), {413, 429})


def lists_as_large_as_allowed(port: int, until: float) -> Any:
    body = b'{"inputs":[' + b"[]," * 90_000 + b"[]]}"
    return send_again_and_again(port, until, post("/predict", body, Content_Type="application/json"), {400, 429})


def png(side: int) -> bytes:
    content = io.BytesIO()
    Image.new("L", (side, side)).save(content, "png")
    return content.getvalue()


def images(port: int, until: float, count: int = 24) -> Any:
    """S5: many images of 5000 x 5000 pixels."""
    file = png(5000)
    blob = (struct.pack("<I", len(file)) + file) * count
    item = {"name": "image", "shape": [count], "datatype": "BYTES", "parameters": {"binary_data_size": len(blob)}}
    header = json.dumps({"inputs": [item]}).encode()
    content = post("/v2/models/digits/infer", header + blob, Inference_Header_Content_Length=len(header))
    return send_again_and_again(port, until, content, {400, 429} if count > 1 else {400, 429, 504})


def one_image(port: int, until: float) -> Any:
    return images(port, until, 1)


ATTACKS: dict[str, tuple[Callable[[int, float], Any], int]] = {
    "clients that never read": (never_read, CLIENTS),
    "endless heads": (endless_head, 4),
    "endless trailers": (endless_trailers, 4),
    "empty lists": (lists, 2),
    "empty lists as many as allowed": (lists_as_large_as_allowed, 4),
    "large images": (images, 6),
    "one large image at a time": (one_image, 4),
}


@pytest.fixture(scope="module")
def server(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running(bundle, tmp_path_factory.mktemp("log"), "--deadline", "10" if IS_LONG else "120") as made:
        yield made


@pytest.mark.parametrize("name", ATTACKS)
def test_honest_clients_and_probes_are_answered_during_an_attack(server: RunningServer, name: str) -> None:
    attack, clients = ATTACKS[name]
    COUNTS["inputs"] += clients

    async def run() -> None:
        until = time.monotonic() + SECONDS
        await asyncio.wait_for(asyncio.gather(*(attack(server.port, until) for _ in range(clients))), 600)

    with Watch(server) as watch:
        asyncio.run(run())
        end = time.monotonic() + 300
        while not (watch.answers and watch.health) and time.monotonic() < end:
            time.sleep(0.05)
    watch.check()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=4),
    max_leaves=12,
)
TENSOR = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["x", "image", "y"]) | JSON,
        "shape": st.sampled_from([[1, 1, 8, 8], [2, 64], [1], [0, 1, 8, 8], [2**63, 0]]) | JSON,
        "datatype": st.sampled_from(["FP32", "FP64", "UINT8", "BYTES", "BOOL", "INT64"]) | JSON,
        "data": st.just([0.5] * 64) | JSON,
        "parameters": st.fixed_dictionaries({"binary_data_size": st.integers(-1, 300)}) | JSON,
    },
)
VALID = {"inputs": [{"name": "x", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": [0.5] * 64}]}
TREE = st.just(VALID) | st.fixed_dictionaries(
    {}, optional={"inputs": st.lists(TENSOR, max_size=3) | JSON, "outputs": JSON, "parameters": JSON, "id": JSON}
)
PATHS = ("/predict", "/v2/models/digits/infer", "/v2/models/digits/versions/1/infer", "/v2/models/x/infer", "/schema")
REQUEST = st.tuples(
    st.sampled_from(PATHS),
    TREE.map(lambda tree: json.dumps(tree).encode()) | JSON.map(lambda tree: json.dumps(tree).encode()) | st.binary(),
    st.sampled_from(["application/json", "image/png", "text/plain", "multipart/form-data; boundary=b"]),
    st.none() | st.integers(-1, 300) | st.text("0123456789ex\u00b2", max_size=4),
    st.just(b"") | st.binary(max_size=64),
)


def test_generated_requests_get_an_answer_and_no_traceback(server: RunningServer) -> None:
    statuses: dict[int, int] = {}

    @hypothesis.settings(
        max_examples=REQUESTS,
        database=None,
        derandomize=not IS_LONG,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(REQUEST)
    def send(request: tuple[str, bytes, str, int | str | None, bytes]) -> None:
        path, body, kind, length, rest = request
        headers = {"Content-Type": kind}
        if length is not None:
            headers["Inference-Header-Content-Length"] = str(length)
        made = urllib.request.Request(f"{server.url}{path}", body + rest, headers)
        COUNTS["inputs"] += 1
        try:
            with urllib.request.urlopen(made, timeout=300) as response:
                status, answer = response.status, response.read()
        except urllib.error.HTTPError as error:
            status, answer = error.code, error.read()
        statuses[status] = statuses.get(status, 0) + 1
        assert status in (200, 400, 404, 405, 413, 429), answer
        assert b"Traceback" not in answer

    with Watch(server) as watch:
        send()
    print(statuses)
    watch.check()


class TokenNetwork(nn.Module):
    """Looks up tokens, so that an id above the range is an error of the graph."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(TOKENS, 4), nn.Linear(4 * LENGTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.tokens(x).flatten(1))
        return logits


def test_token_ids_above_the_range_fail_alone(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, TOKENS, (80, LENGTH))
    x[0, 0] = TOKENS - 1
    run = plateaux.fit(x, x[:, 0] % 2, model=TokenNetwork, out=tmp_path / "run", members=2, epochs=1)
    plateaux.export(run, tmp_path / "tokens")
    statuses: list[tuple[bool, int]] = []
    with running(tmp_path / "tokens", tmp_path) as server:

        def ask(number: int) -> None:
            is_attack = number % 3 == 0
            tokens = [[TOKENS + 10**6 if is_attack else number % TOKENS] * LENGTH]
            for path, tree in (
                ("/predict", {"inputs": tokens}),
                (
                    "/v2/models/tokens/infer",
                    {"inputs": [{"name": "x", "shape": [1, LENGTH], "datatype": "INT64", "data": tokens[0]}]},
                ),
            ):
                headers = {"Content-Type": "application/json"}
                made = urllib.request.Request(f"{server.url}{path}", json.dumps(tree).encode(), headers)
                try:
                    with urllib.request.urlopen(made, timeout=300) as response:
                        statuses.append((is_attack, response.status))
                except urllib.error.HTTPError as error:
                    statuses.append((is_attack, error.code))
                COUNTS["inputs"] += 1

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(ask, range(REQUESTS)))
        assert "Traceback" not in server.log.read_text()
    assert set(statuses) == {(True, 400), (False, 200)}
