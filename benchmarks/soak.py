"""The service under malformed requests, the loss of a worker, and sustained load, on the loopback interface.

| part | what it does |
|---|---|
| fuzz | 5,000 malformed requests: bytes, shapes, JSON, headers, compression bombs, slow clients |
| kill | SIGKILL of one of two workers under load, five times |
| soak | 20 minutes at 70 % of the measured peak (the quick form takes seconds) |

The memory of the service is the sum of the proportional set sizes of all its processes. In the soak it is compared
after two minutes and at the end, medians of one minute each.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import json
import os
import random
import signal
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median

from _common import Results, at_least, at_most, parse_flags
from PIL import Image
from predict import make_run
from serve import HEADER, Load, Server, client, read_answer, request_bytes, run_clients

import plateaux

PARTS = ("fuzz", "kill", "soak")
LOAD = 0.7  # of the peak


def memory_mb(server: Server) -> float:
    total = 0
    for pid in server.processes():
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def workers(server: Server) -> set[int]:
    return set(server.processes()[1:])


def bomb() -> bytes:
    """Return a PNG file of 20,000 x 20,000 pixels in a few kilobytes."""
    content = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(content, "png", optimize=True)
    return content.getvalue()


def malformed(rng: random.Random, bombs: list[bytes]) -> bytes:
    """Return one request that is wrong in some way."""
    body, path = bytearray(request_bytes().partition(b"\r\n\r\n")[2]), "/v2/models/model/infer"
    headers = {"Host": "localhost", "Inference-Header-Content-Length": str(len(HEADER))}
    kind = rng.choice(["bytes", "json", "headers", "gzip", "image", "shape", "cut", "request line"])
    if kind == "bytes":
        for _ in range(rng.randint(1, 40)):
            body[rng.randrange(len(body))] = rng.randrange(256)
    elif kind == "json":
        body = bytearray(rng.choice([b"[" * 100_000, b'{"inputs": NaN}', b"{}", b"\xff\xfe", b'{"inputs":[{}]}', b""]))
        headers.pop("Inference-Header-Content-Length")
    elif kind == "headers":
        headers["Inference-Header-Content-Length"] = rng.choice(["-1", "1e9", "x" * 5000, str(len(body) + 1), "0"])
        headers["X-Request-ID"] = "".join(rng.choices("ab<>\"' ;%\x01", k=rng.randint(0, 300)))
    elif kind == "gzip":
        body = bytearray(rng.choice([gzip.compress(b"0" * 10_000_000), zlib.compress(b"0" * 10_000_000)]))
        headers["Content-Encoding"] = rng.choice(["gzip", "deflate", "br"])
    elif kind == "image":
        path, body = "/predict", bytearray(rng.choice([*bombs, b"\x89PNG\r\n\x1a\n" + rng.randbytes(50)]))
        headers["Content-Type"] = rng.choice(["image/png", "multipart/form-data; boundary=x", "multipart/form-data"])
    elif kind == "shape":
        shape = rng.choice([[10**12, 3], [-1], [], "x", [1, 3, 32, 33], [1.5], [[1]], [128, 3, 32, 32]])
        item = {"name": "x", "shape": shape, "datatype": rng.choice(["FP32", "BYTES", "?"]), "data": [0.0] * 5}
        body = bytearray(json.dumps({"inputs": [item]}).encode())
        headers.pop("Inference-Header-Content-Length")
    length = len(body) + (rng.randint(1, 500) if kind == "cut" else 0)
    first = (
        f"POST {path} HTTP/1.1" if kind != "request line" else rng.choice(["GARBAGE", "POST / HTTP/9.9", "\x00" * 20])
    )
    lines = [first, *(f"{name}: {value}" for name, value in headers.items()), f"Content-Length: {length}"]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + bytes(body)


async def send_slowly(port: int, content: bytes, seconds: float) -> None:
    """Send a few bytes of a request, and wait; the server must close the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(content[: random.Random(len(content)).choice([0, 1, 30, 200])])
    with contextlib.suppress(OSError, TimeoutError):
        await asyncio.wait_for(reader.read(), seconds)
    writer.close()


async def send_raw(port: int, content: bytes) -> bytes:
    """Send a request, and return the answer; empty: the server closed the connection."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(content)
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), 60)
        writer.close()
    except OSError:
        return b""
    return answer


async def fuzz_all(port: int, count: int, wait_s: float, after_first: Callable[[], None]) -> list[bytes]:
    rng, bombs, answers = random.Random(0), [bomb()], list[bytes]()
    slow = [asyncio.create_task(send_slowly(port, request_bytes(), wait_s)) for _ in range(20)]
    for start in range(0, count, 8):
        contents = [malformed(rng, bombs) for _ in range(min(8, count - start))]
        answers += await asyncio.gather(*(send_raw(port, content) for content in contents))
        if start == count // 5 // 8 * 8:
            after_first()
    await asyncio.gather(*slow)
    return answers


def fuzz(results: Results, bundle: Path, log: Path, *, quick: bool) -> None:
    server = Server(bundle, log, "--read-timeout", "5")
    run_clients(server.port, 8, 1.0)
    memory: list[float] = []
    count = 200 if quick else 5000
    answers = asyncio.run(fuzz_all(server.port, count, 60, lambda: memory.append(memory_mb(server))))
    memory.append(memory_mb(server))
    statuses = Counter(answer[9:12].decode() for answer in answers if answer.startswith(b"HTTP/"))
    alive = len(run_clients(server.port, 8, 0.5).latencies)
    text = log.read_text()
    results.add("fuzz: malformed requests", count)
    for status, number in sorted(statuses.items()):
        results.add(f"fuzz: answers with status {status}", number)
    zero = at_most(0)
    tracebacks = sum(b"Traceback" in answer or b'.py"' in answer for answer in answers) + text.count("Traceback")
    results.add("fuzz: tracebacks in answers and in the log", tracebacks, full=zero, quick=zero)
    errors = sum(number for status, number in statuses.items() if status.startswith("5"))
    results.add("fuzz: internal errors", errors, full=zero, quick=zero)
    results.add("fuzz: good answers afterwards", alive, full=at_least(1), quick=at_least(1))
    results.add("fuzz: memory at the end / after a fifth", memory[-1] / memory[0], full=at_most(1.1))
    results.add("fuzz: exit code", server.stop(), full=zero, quick=zero)


def ready_workers(server: Server) -> int:
    """Return how many workers have been ready so far."""
    return server.log.read_text().count("batches of")


async def kill_one(server: Server, seconds: float) -> tuple[float, int, int]:
    """Kill a worker under load; return the seconds until a new one is ready, answers since, and lost requests."""
    load, before, ready = Load(), workers(server), ready_workers(server)
    until = time.perf_counter() + seconds
    clients = [asyncio.create_task(client(server.port, until, load)) for _ in range(16)]
    await asyncio.sleep(min(1.0, seconds / 4))
    os.kill(min(before), signal.SIGKILL)
    begin, took, answered = time.perf_counter(), float("inf"), len(load.latencies)
    while time.perf_counter() < until:
        await asyncio.sleep(0.05)
        if ready_workers(server) > ready and took == float("inf"):
            took = time.perf_counter() - begin
    await asyncio.gather(*clients)
    return took, len(load.latencies) - answered, load.lost


def kill(results: Results, bundle: Path, log: Path, *, quick: bool) -> None:
    server = Server(bundle, log, "--workers", "2")
    while ready_workers(server) < 2:
        time.sleep(0.05)
    found = [asyncio.run(kill_one(server, 5.0 if quick else 15.0)) for _ in range(1 if quick else 5)]
    server.stop()
    times, answers, lost = zip(*found, strict=True)
    results.add("kill: seconds until a new worker is ready, largest", max(times), full=at_most(10))
    results.add("kill: answers after the kill, least", min(answers), full=at_least(1), quick=at_least(1))
    results.add("kill: requests lost with the killed workers", sum(lost))


async def send_at_rate(port: int, rate: float, seconds: float, sample: Callable[[float], None]) -> tuple[int, int]:
    """Send requests at random times with a mean rate on up to 32 connections; return answers and errors."""
    queue: asyncio.Queue[None] = asyncio.Queue()
    done, errors, is_over = 0, 0, False

    async def work() -> None:
        nonlocal done, errors
        content = request_bytes()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while not is_over or not queue.empty():
            try:
                await asyncio.wait_for(queue.get(), 0.5)
            except TimeoutError:
                continue
            try:
                writer.write(content)
                status, stays = await asyncio.wait_for(read_answer(reader), 60)
                done, errors = done + (status == 200), errors + (status != 200)
                if stays:
                    continue
            except (OSError, asyncio.IncompleteReadError, TimeoutError):
                errors += 1
            writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()

    tasks = [asyncio.create_task(work()) for _ in range(32)]
    rng, begin = random.Random(0), time.perf_counter()
    due, next_sample = begin, begin
    while (now := time.perf_counter()) < begin + seconds:
        while due <= now:
            queue.put_nowait(None)
            due += rng.expovariate(rate)
        if now >= next_sample:
            sample(now - begin)
            next_sample += seconds / 240
        await asyncio.sleep(max(0.0, min(due, next_sample) - time.perf_counter()))
    is_over = True
    await asyncio.gather(*tasks)
    return done, errors


def soak(results: Results, bundle: Path, log: Path, *, quick: bool) -> None:
    seconds = 6.0 if quick else 1200.0
    server = Server(bundle, log)
    run_clients(server.port, 32, 2.0)
    peak = len(run_clients(server.port, 32, seconds / 60).latencies) / (seconds / 60)
    memory: list[tuple[float, float]] = []
    done, errors = asyncio.run(
        send_at_rate(server.port, LOAD * peak, seconds, lambda at: memory.append((at, memory_mb(server))))
    )
    code = server.stop()
    minute = seconds / 20
    warm = median(value for at, value in memory if 2 * minute <= at < 3 * minute)
    last = median(value for at, value in memory if at >= seconds - minute)
    zero = at_most(0)
    results.add("soak: minutes", seconds / 60)
    results.add("soak: requests per second", done / seconds)
    results.add("soak: load, requests per second / peak", done / seconds / peak)
    results.add("soak: errors", errors, full=zero, quick=zero)
    results.add("soak: MB after the warm-up", warm)
    results.add("soak: memory at the end / after the warm-up", last / warm, full=at_most(1.05))
    results.add("soak: exit code", code, full=zero, quick=zero)


def main() -> None:
    args = parse_flags(__doc__ or "", PARTS)
    results = Results(args.quick, args.json)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plateaux.export(make_run(folder, "mlp" if args.quick else "resnet8"), folder / "bundle")
        for part, measure in (("fuzz", fuzz), ("kill", kill), ("soak", soak)):
            if part in args.parts:
                measure(results, folder / "bundle", folder / f"{part}.log", quick=args.quick)
        results.finish(parts=args.parts)


if __name__ == "__main__":
    main()
