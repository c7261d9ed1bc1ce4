"""The service of five resnet8 on the loopback interface: CPU time, latency, overload, and the end by SIGTERM.

One worker with one thread answers requests of one CIFAR image as a binary tensor. Clients keep connections open and
send the next request when they have the answer; one that is refused (429) or loses its connection connects and tries
again at once. Figures are medians of five rounds. Goodput is the number of answers per second; its peak is that with 32
connections. The bare call is the graph with the batch size that the server chose. The quick form has small networks and
short rounds, and judges only that every request in flight gets an answer (200, or 429 by the limit of the queue).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
from _common import Results, at_least, at_most, parse_flags
from predict import make_run

import plateaux
from plateaux.deploy.bundle import Bundle

HEADER = json.dumps(
    {
        "inputs": [
            {
                "name": "x",
                "shape": [1, 3, 32, 32],
                "datatype": "FP32",
                "parameters": {"binary_data_size": 4 * 3 * 32 * 32},
            }
        ],
        "parameters": {"binary_data_output": True},
    }
).encode()


@dataclass
class Load:
    """What clients saw."""

    latencies: list[float] = field(default_factory=list)
    refused: int = 0
    lost: int = 0


def request_bytes() -> bytes:
    pixels = np.random.default_rng(0).random((1, 3, 32, 32), dtype=np.float32).tobytes()
    length = len(HEADER) + len(pixels)
    lines = [
        "POST /v2/models/model/infer HTTP/1.1",
        "Host: localhost",
        f"Content-Length: {length}",
        f"Inference-Header-Content-Length: {len(HEADER)}",
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + HEADER + pixels


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """Return the status of an answer, and whether the connection stays open."""
    head = await reader.readuntil(b"\r\n\r\n")
    found = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    await reader.readexactly(int(found[1]) if found else 0)
    return int(head.split()[1]), b"connection: close" not in head.lower()


async def client(port: int, until: float, load: Load) -> None:
    content, writer, reader = request_bytes(), None, None
    while time.perf_counter() < until:
        try:
            if writer is None:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            assert reader is not None
            begin = time.perf_counter()
            writer.write(content)
            status, stays = await asyncio.wait_for(read_answer(reader), max(until - begin, 0.01) + 5)
            if status == 200:
                load.latencies.append(time.perf_counter() - begin)
            else:
                load.refused += 1
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            load.lost, stays = load.lost + 1, False
        if not stays and writer is not None:
            writer.close()
            writer = None
    if writer is not None:
        writer.close()


def run_clients(port: int, connections: int, seconds: float) -> Load:
    load = Load()

    async def run() -> None:
        until = time.perf_counter() + seconds
        await asyncio.gather(*(client(port, until, load) for _ in range(connections)))

    asyncio.run(run())
    return load


class Server:
    """A server process."""

    def __init__(self, bundle: Path, log: Path, *options: str) -> None:
        self.log = log
        words = ["serve", str(bundle), "--port", "0", "--name", "model", *options]
        with log.open("w") as output:
            self.process = subprocess.Popen([sys.executable, "-m", "plateaux", *words], stdout=output, stderr=output)
        self.port = self._wait()

    def _wait(self) -> int:
        while self.process.poll() is None:
            found = re.search(r"http://127\.0\.0\.1:(\d+)", self.log.read_text())
            if found:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{found[1]}/v2/health/ready", timeout=60).close()
                    return int(found[1])
                except OSError:
                    pass
            time.sleep(0.05)
        raise SystemExit(self.log.read_text())

    def cpu_seconds(self) -> float:
        ticks = 0
        for pid in self.processes():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def processes(self) -> list[int]:
        """Return the process of the service and its workers."""
        pid = self.process.pid
        return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def bare_cpu_ms(bundle: Path, batch: int, calls: int) -> float:
    """Return the CPU milliseconds per row of the graph alone."""
    opened = Bundle.open(str(bundle))
    backend = opened.onnx_backend(threads=1)
    arrays = {name: np.repeat(values[:1], batch, axis=0) for name, values in opened.golden_inputs().items()}
    backend(arrays)
    begin = time.process_time()
    for _ in range(calls):
        backend(arrays)
    return 1000 * (time.process_time() - begin) / (calls * batch)


def answered_after_sigterm(bundle: Path, log: Path, count: int) -> int:
    """Send requests at once, stop the server, and return how many are answered."""

    async def run(server: Server) -> int:
        streams = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(count)]
        for _, writer in streams:
            writer.write(request_bytes())
            await writer.drain()
        server.process.send_signal(signal.SIGTERM)
        found = await asyncio.gather(*(read_answer(reader) for reader, _ in streams), return_exceptions=True)
        for _, writer in streams:
            writer.close()
        return sum(isinstance(each, tuple) and each[0] in (200, 429) for each in found)

    server = Server(bundle, log, "--max-batch", "8")
    answered = asyncio.run(run(server))
    server.process.wait(60)
    return answered


def main() -> None:
    args = parse_flags(__doc__ or "")
    results = Results(args.quick, args.json)
    seconds, rounds, calls = (0.5, 1, 5) if args.quick else (8.0, 5, 50)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = make_run(folder, "mlp" if args.quick else "resnet8")
        plateaux.export(run, folder / "bundle")
        bundle, log = folder / "bundle", folder / "serve.log"
        server = Server(bundle, log)
        found = re.search(r"batches of (\d+)", log.read_text())
        batch = int(found[1]) if found else 8
        run_clients(server.port, 32, seconds / 2)
        cpu, bare, tails, goodput = [], [], [], []
        for _ in range(rounds):
            bare.append(bare_cpu_ms(bundle, batch, calls))
            before = server.cpu_seconds()
            load = run_clients(server.port, 32, seconds)
            cpu.append(1000 * (server.cpu_seconds() - before) / len(load.latencies))
            tails.append(np.percentile(load.latencies, [50, 99]))
            crowd = run_clients(server.port, 200, seconds)
            goodput.append((len(load.latencies), len(crowd.latencies)))
        server.stop()
        results.add("batch size", batch)
        results.add("CPU ms per request", median(cpu))
        results.add("CPU ms per row of the bare call", median(bare))
        ratio = median(one / other for one, other in zip(cpu, bare, strict=True))
        results.add("CPU time per request / bare call", ratio, full=at_most(1.3))
        results.add("p50 ms, 32 connections", 1000 * median(float(p50) for p50, _ in tails))
        results.add("p99 / p50, 32 connections", median(float(p99 / p50) for p50, p99 in tails), full=at_most(3.0))
        results.add("answers per second, 32 connections", median(peak for peak, _ in goodput) / seconds)
        share = median(crowd / peak for peak, crowd in goodput)
        results.add("goodput, 200 connections / 32", share, full=at_least(0.7))
        answered = answered_after_sigterm(bundle, log, 50)
        results.add("answers of 50 in flight at SIGTERM", answered, full=at_least(50), quick=at_least(50))
        results.finish(rounds=rounds)


if __name__ == "__main__":
    main()
