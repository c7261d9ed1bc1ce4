"""The service with real clients: answers equal those of the predictor, limits hold, and no request is lost."""

from __future__ import annotations

import gc
import gzip
import hashlib
import http.client
import io
import json
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
from digit_runs import train_digits
from PIL import Image
from waiting import wait_until

import plateaux
from plateaux.core.errors import RecipeError
from plateaux.core.registry import dataset
from plateaux.deploy.bundle import Bundle
from plateaux.deploy.manifest import FileRecord
from plateaux.serving.server import find_port
from plateaux.storage.run import own_version
from tests.cli.test_main import call
from tests.serving.conftest import RunningServer, running

for name in ("onnxruntime", "starlette", "granian", "prometheus_client", "multipart"):
    pytest.importorskip(name, reason='pip install "plateaux[serve]"')
pytestmark = pytest.mark.xdist_group("serving")  # one worker makes the bundle and starts the server once


@pytest.fixture(scope="module")
def images() -> np.ndarray[Any, Any]:
    x, _ = dataset.get("digits")().test.fetch(torch.arange(60))
    assert isinstance(x, torch.Tensor)
    return x.numpy()


def ask(
    url: str, path: str, body: bytes | str | None = None, method: str | None = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers, and body of one request."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=120)
    try:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method or ("GET" if body is None else "POST"), path, body, names)
        response = connection.getresponse()
        return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
    finally:
        connection.close()


def to_png(image: np.ndarray[Any, Any]) -> bytes:
    content = io.BytesIO()
    Image.fromarray(image[0], "L").save(content, "png")
    return content.getvalue()


def infer(url: str, tensor: np.ndarray[Any, Any], **tree: Any) -> dict[str, Any]:
    item = {"name": "x", "shape": list(tensor.shape), "datatype": "FP32", "data": tensor.ravel().tolist()}
    status, _, body = ask(url, "/v2/models/digits/infer", json.dumps({"inputs": [item], **tree}))
    assert status == 200, body
    found: dict[str, Any] = json.loads(body)
    return found


def test_an_image_file_gets_a_readable_answer(
    server: RunningServer, bundle: Path, images: np.ndarray[Any, Any]
) -> None:
    expected = plateaux.load_predictor(bundle)(images[:3]).to_records()
    for image, record in zip(images[:3], expected, strict=True):
        head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.png"\r\n\r\n'
        form = head + to_png(image) + b"\r\n--b--\r\n"
        requests: list[tuple[bytes | str, str]] = [
            (to_png(image), "image/png"),
            (form, "multipart/form-data; boundary=b"),
            (json.dumps({"inputs": (image / 255).tolist()}), "application/json"),
        ]
        for body, kind in requests:
            status, headers, answer = ask(server.url, "/predict", body, Content_Type=kind)
            assert status == 200, answer
            (found,) = json.loads(answer)["predictions"]
            assert found["label_name"] == record["label_name"]
            assert found["prediction_set"] == record["prediction_set"]
            assert (found["abstain"], found["is_ood"]) == (record["abstain"], record["is_ood"])
            assert found["ood_score"] == pytest.approx(record["ood_score"], abs=1e-5)
            assert found["probabilities"] == pytest.approx(record["probabilities"], abs=1e-5)
            assert headers["x-request-id"]


def test_json_and_binary_tensors_of_the_protocol_are_equal(
    server: RunningServer, bundle: Path, images: np.ndarray[Any, Any]
) -> None:
    x = (images[:5] / 255).astype(np.float32)
    expected = plateaux.load_predictor(bundle)(x)
    found = infer(server.url, x, id="mine")
    assert (found["model_name"], found["model_version"], found["id"]) == ("digits", "1", "mine")
    outputs = {item["name"]: item for item in found["outputs"]}
    assert outputs["label"]["data"] == expected.label.tolist()
    assert outputs["label_name"]["data"] == expected.label_name
    assert outputs["prediction_set"]["shape"] == [5, 10]
    assert outputs["prediction_set"]["data"] == expected.to_arrays()["prediction_set"].ravel().tolist()
    assert np.allclose(outputs["probabilities"]["data"], expected.probabilities.ravel(), atol=1e-5)
    header = json.dumps(
        {
            "inputs": [
                {"name": "x", "shape": [5, 1, 8, 8], "datatype": "FP32", "parameters": {"binary_data_size": x.nbytes}}
            ],
            "outputs": [{"name": "label_name", "parameters": {"binary_data": True}}, {"name": "probability"}],
        }
    ).encode()
    status, headers, body = ask(
        server.url, "/v2/models/digits/versions/1/infer", header + x.tobytes(),
        Inference_Header_Content_Length=str(len(header)),
    )  # fmt: skip
    assert status == 200, body
    length = int(headers["inference-header-content-length"])
    first, second = json.loads(body[:length])["outputs"]
    assert np.allclose(second["data"], expected.probability, atol=1e-5)
    blob, names = body[length:], []
    assert first["parameters"]["binary_data_size"] == len(blob)
    while blob:
        (size,) = struct.unpack("<I", blob[:4])
        names.append(blob[4 : 4 + size].decode())
        blob = blob[4 + size :]
    assert names == expected.label_name


def test_encoded_images_are_an_input_of_the_protocol(
    server: RunningServer, bundle: Path, images: np.ndarray[Any, Any]
) -> None:
    files = [to_png(image) for image in images[:2]]
    blob = b"".join(struct.pack("<I", len(file)) + file for file in files)
    item = {"name": "image", "shape": [2], "datatype": "BYTES", "parameters": {"binary_data_size": len(blob)}}
    header = json.dumps({"inputs": [item], "outputs": [{"name": "label"}]}).encode()
    status, _, body = ask(
        server.url, "/v2/models/digits/infer", header + blob, Inference_Header_Content_Length=str(len(header))
    )
    assert status == 200, body
    expected = plateaux.load_predictor(bundle)(images[:2]).label.tolist()
    assert json.loads(body)["outputs"][0]["data"] == expected


def test_the_server_offers_metadata_health_metrics_and_a_page(server: RunningServer) -> None:
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/digits/ready"):
        assert ask(server.url, path)[0] == 200
    model = json.loads(ask(server.url, "/v2/models/digits")[2])
    assert [item["name"] for item in model["inputs"]] == ["x", "image"]
    pixels = {"name": "x", "datatype": "FP32", "shape": [-1, 1, 8, 8], "parameters": {"minimum": 0, "maximum": 1}}
    assert model["inputs"][0] == pixels
    assert model["parameters"]["labels"] == list("0123456789")
    schema = json.loads(ask(server.url, "/schema")[2])
    row = schema["properties"]["inputs"]["items"]
    assert (row["maxItems"], row["items"]["items"]["items"]) == (1, {"type": "number", "minimum": 0, "maximum": 1})
    assert schema["labels"] == model["parameters"]["labels"]
    assert {item["name"] for item in model["outputs"]} >= {"label", "ood_score", "is_ood", "prediction_set", "abstain"}
    assert json.loads(ask(server.url, "/v2")[2])["name"] == "plateaux"
    infer(server.url, np.zeros((2, 1, 8, 8)))
    metrics = ask(server.url, "/metrics")[2].decode()
    for name in ("requests_total", "request_seconds_bucket", "batch_rows_sum", "predictions_total", "ood_total"):
        assert f"plateaux_{name}" in metrics, name
    status, headers, page = ask(server.url, "/")
    assert status == 200
    assert b"<title>digits - Plateaux</title>" in page
    assert b'name="key"' not in page
    assert "script-src 'sha256-" in headers["content-security-policy"]


MALFORMED: list[tuple[str, bytes, dict[str, str], int]] = [
    ("/predict", b"", {}, 400),
    ("/predict", b"not an image", {"Content_Type": "image/png"}, 400),
    ("/predict", b"{", {"Content_Type": "application/json"}, 400),
    ("/predict", b'{"inputs": "/etc/passwd"}', {"Content_Type": "application/json"}, 400),
    ("/predict", b'{"inputs": ["/etc/passwd"]}', {"Content_Type": "application/json"}, 400),
    ("/predict", b'{"inputs": [[1, 2], [3]]}', {"Content_Type": "application/json"}, 400),
    ("/predict", b'{"x": {"a": 1}}', {"Content_Type": "application/json"}, 400),
    ("/predict", b"[" * 100_000, {"Content_Type": "application/json"}, 400),
    ("/predict", b"--b", {"Content_Type": "multipart/form-data; boundary=b"}, 400),
    ("/predict", b"--b", {"Content_Type": "multipart/form-data"}, 400),
    ("/predict", gzip.compress(b"0" * 1000, mtime=0), {"Content_Encoding": "gzip"}, 400),
    ("/v2/models/digits/infer", b"{}", {}, 400),
    ("/v2/models/digits/infer", b'{"inputs": [{}]}', {}, 400),
    ("/v2/models/digits/infer", b'{"inputs": []}', {"Inference_Header_Content_Length": "99"}, 400),
    ("/v2/models/digits/infer", b'{"inputs": []}', {"Inference_Header_Content_Length": "-1"}, 400),
    ("/v2/models/digits/infer", b'{"inputs": []}', {"Inference_Header_Content_Length": "\u00b2"}, 400),  # a digit
    ("/v2/models/other/infer", b"{}", {}, 404),
]


@pytest.mark.parametrize(("path", "body", "headers", "status"), MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_request_gets_one_sentence(
    server: RunningServer, path: str, body: bytes, headers: dict[str, str], status: int
) -> None:
    found, _, answer = ask(server.url, path, body, **headers)
    assert found == status, answer
    text = json.loads(answer)["error"]
    assert "Traceback" not in text
    assert "\n" not in text


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [1, 1, 8]}, {"shape": [10**12, 1, 8, 8]}, {"shape": "x"}, {"shape": [-1, 64]}, {"datatype": "FP99"},
        {"datatype": "BYTES"}, {"data": None}, {"data": ["a"]}, {"name": "y"}, {"name": 3},
        {"data": [float("nan")] * 64},
        {"data": [1e400] * 64}, {"parameters": {"binary_data_size": 10**9}}, {"parameters": {"binary_data_size": "1"}},
        {"data": [2.0] * 64},
    ],
)  # fmt: skip
def test_a_malformed_tensor_gets_one_sentence(server: RunningServer, change: dict[str, Any]) -> None:
    item = {"name": "x", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": [0.0] * 64, **change}
    status, _, answer = ask(server.url, "/v2/models/digits/infer", json.dumps({"inputs": [item]}))
    assert status == 400, answer
    assert "Traceback" not in json.loads(answer)["error"]


def test_text_is_never_opened_as_a_file(server: RunningServer, images: np.ndarray[Any, Any], tmp_path: Path) -> None:
    file = tmp_path / "image.png"
    file.write_bytes(to_png(images[0]))
    x = (images[0] / 255).tolist()
    for inputs in (
        str(file),
        [str(file)],
        [[str(file)]],
        {"x": str(file)},
        [{"x": x}, str(file)],
        [{"x": x}, [str(file)]],
    ):
        body = json.dumps({"inputs": inputs})
        status, _, answer = ask(server.url, "/predict", body, Content_Type="application/json")
        assert status == 400, (inputs, answer)


def test_random_bytes_never_end_the_server_or_show_a_traceback(server: RunningServer) -> None:
    rng = random.Random(0)
    item = {"name": "x", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": [0.0] * 64}
    good = json.dumps({"inputs": [item]}).encode()
    count = 5000 if os.environ.get("PLATEAUX_LONG") == "1" else 300
    for _ in range(count):
        body = bytearray(good)
        for _ in range(rng.randint(1, 8)):
            position = rng.randrange(len(body))
            body[position : position + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 4))
        headers = {"Content_Type": rng.choice(["application/json", "image/png", "text/plain", "multipart/form-data"])}
        if rng.random() < 0.3:
            headers["Inference_Header_Content_Length"] = rng.choice(["0", "10", str(len(body)), "x", "1e3"])
        status, _, answer = ask(server.url, rng.choice(["/predict", "/v2/models/digits/infer"]), bytes(body), **headers)
        assert status in (200, 400), answer
        assert b"Traceback" not in answer
    assert server.process.poll() is None
    assert ask(server.url, "/v2/health/live")[0] == 200
    assert "Traceback" not in server.log.read_text()


def test_size_limits_and_the_api_key_are_enforced_and_logs_contain_no_inputs(
    bundle: Path, tmp_path: Path, images: np.ndarray[Any, Any]
) -> None:
    options = ("--max-bytes", 4000, "--max-rows", 3, "--log-requests", "--name", "m")
    older = Path(shutil.copytree(bundle, tmp_path / "older"))
    (older / "manifest.json").write_bytes(replace(Bundle.open(older).manifest, plateaux="0.0.1").to_bytes())
    with running(older, tmp_path, *options, PLATEAUX_API_KEY="secret") as server:
        assert json.loads(ask(server.url, "/v2", X_API_Key="secret")[2])["version"] == own_version()
        assert b'name="key"' in ask(server.url, "/")[2]
        png = to_png(images[0])
        assert ask(server.url, "/predict", png)[0] == 401
        assert ask(server.url, "/predict", png, Authorization="Bearer wrong")[0] == 401
        assert ask(server.url, "/predict", png, Authorization="Bearer secret")[0] == 200
        assert ask(server.url, "/metrics", X_API_Key="secret")[0] == 200
        assert ask(server.url, "/v2/health/live")[0] == 200
        key = {"X_API_Key": "secret", "X_Request_ID": "my-id"}
        assert ask(server.url, "/predict", b"x" * 5000, **key)[0] == 413
        rows = json.dumps({"inputs": np.zeros((4, 1, 8, 8)).tolist()})
        status, _, answer = ask(server.url, "/predict", rows, Content_Type="application/json", **key)
        assert (status, b"at most 3" in answer) == (400, True)
        _, headers, _ = ask(server.url, "/predict", png, **key)
        assert headers["x-request-id"] == "my-id"
        assert ask(server.url, "/predict", png, X_API_Key="secret", X_Request_ID="a<b>")[1]["x-request-id"] != "a<b>"
        chunks = (b"x" * 1000 for _ in range(10))
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        with suppress(BrokenPipeError, ConnectionResetError):  # the service may have answered and closed already
            connection.request("POST", "/predict", chunks, {"X-API-Key": "secret"}, encode_chunked=True)
            assert connection.getresponse().status == 413
        connection.close()
        lines = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]
        assert {"id", "endpoint", "status", "ms"} == set(lines[-1])
        assert "secret" not in server.log.read_text()


def test_a_full_queue_refuses_with_retry_after_and_a_late_request_gets_a_timeout(bundle: Path, tmp_path: Path) -> None:
    body = json.dumps({"inputs": np.zeros((64, 1, 8, 8)).tolist()})
    with running(bundle, tmp_path, "--max-queue", 64, "--max-batch", 64, "--deadline", 0.000001) as server:

        def one(_: int) -> tuple[int, dict[str, str]]:
            status, headers, _ = ask(server.url, "/predict", body, Content_Type="application/json")
            return status, headers

        with ThreadPoolExecutor(16) as pool:
            found = list(pool.map(one, range(64)))
    statuses = {status for status, _ in found}
    assert statuses <= {429, 504}, statuses
    assert 504 in statuses
    for status, headers in found:
        if status == 429:
            assert int(headers["retry-after"]) >= 1


def test_slow_clients_are_disconnected_and_do_not_block_others(bundle: Path, tmp_path: Path) -> None:
    with running(bundle, tmp_path, "--read-timeout", 1, "--deadline", 1) as server:
        silent, head, body = (socket.create_connection(("127.0.0.1", server.port), timeout=120) for _ in range(3))
        head.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nX-")
        body.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc")
        assert ask(server.url, "/v2/health/live")[0] == 200
        assert b" 504 " in body.recv(65536).partition(b"\r\n")[0]
        for client in (silent, head, body):
            while client.recv(65536):
                pass
            client.close()


def test_a_cascade_reports_members_queried_and_the_scores_of_its_calibration(tmp_path: Path) -> None:
    run = train_digits(tmp_path / "run", members=4, model={"name": "mlp", "hidden_sizes": [8]})
    plateaux.calibrate(run, cascade={"max_harm": 0.02})
    made = plateaux.export(run, tmp_path / "digits")
    x, _ = dataset.get("digits")().test.fetch(torch.arange(100))
    expected = plateaux.load_predictor(tmp_path / "digits")(x)
    assert expected.members_queried is not None
    assert isinstance(x, torch.Tensor)
    with running(tmp_path / "digits", tmp_path) as server:
        answer = infer(
            server.url, x.numpy() / np.float32(255), outputs=[{"name": "members_queried"}, {"name": "label"}]
        )
        queried, labels = (output["data"] for output in answer["outputs"])
        assert queried == expected.members_queried.tolist()
        assert labels == expected.label.tolist()
        metrics = ask(server.url, "/metrics")[2].decode()
        values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
        assert float(values["plateaux_members_queried_total"]) == sum(queried)
        assert made.manifest.calibration is not None
        alarm = made.manifest.calibration.alarm
        assert float(values["plateaux_ood_score_reference_mean"]) == pytest.approx(alarm.mean)
        assert float(values["plateaux_ood_score_reference_std"]) == pytest.approx(alarm.std)
        page = ask(server.url, "/")[2].decode()
        assert "members queried, mean" in page


def test_requests_in_flight_are_answered_after_sigterm(bundle: Path, tmp_path: Path) -> None:
    body = json.dumps({"inputs": np.zeros((16, 1, 8, 8)).tolist()}).encode()
    head = f"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with running(bundle, tmp_path, "--max-queue", 1000, "--max-batch", 8) as server:
        clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(50)]
        for client in clients:
            client.sendall(head.encode() + body)
        server.process.send_signal(signal.SIGTERM)
        answers = [b""] * 50
        for number, client in enumerate(clients):
            client.settimeout(120)
            while part := client.recv(65536):
                answers[number] += part
                if answers[number].endswith(b"}"):
                    break
            client.close()
        assert server.process.wait(60) == 0
    assert [answer.startswith(b"HTTP/1.1 200") for answer in answers] == [True] * 50


def list_workers(server: RunningServer) -> set[int]:
    return set(map(int, Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()))


def count_ready(server: RunningServer) -> int:
    """Workers that were ever ready. A worker's process exists before its graph is loaded."""
    return server.log.read_text().count("batches of")


def test_a_killed_worker_is_replaced_while_others_answer(bundle: Path, tmp_path: Path) -> None:
    with running(bundle, tmp_path, "--workers", 2, "--log-requests") as server:
        wait_until(lambda: count_ready(server) == 2)
        before = list_workers(server)
        for _ in range(20):
            infer(server.url, np.zeros((1, 1, 8, 8)))
        metrics = ask(server.url, "/metrics")[2].decode()
        (line,) = [line for line in metrics.splitlines() if line.startswith("plateaux_predictions_total")]
        assert float(line.split()[1]) == 20  # of both workers
        os.kill(min(before), signal.SIGKILL)

        def is_replaced() -> bool:
            with suppress(ConnectionError):  # of a connection that the killed worker had accepted
                assert ask(server.url, "/v2/health/live")[0] == 200
            return count_ready(server) == 3

        wait_until(is_replaced)
        after = list_workers(server)
        assert len(after) == 2
        assert min(before) not in after
        infer(server.url, np.zeros((1, 1, 8, 8)))
        log = server.log.read_text()
    assert "Traceback" not in log
    assert log.count('"endpoint": "infer"') >= 20


def test_workers_end_if_the_process_that_started_them_is_killed(bundle: Path, tmp_path: Path) -> None:
    with running(bundle, tmp_path, "--workers", 2) as server:
        wait_until(lambda: count_ready(server) == 2)
        workers = list_workers(server)
        server.process.kill()
        server.process.wait()
        wait_until(lambda: not any(is_running(pid) for pid in workers))
    assert len(workers) == 2


def is_running(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_clients_at_the_same_time_get_their_own_answers(
    server: RunningServer, bundle: Path, images: np.ndarray[Any, Any]
) -> None:
    x = np.random.default_rng(0).random((64, 2, 1, 8, 8), dtype=np.float32)
    expected = plateaux.load_predictor(bundle)(x.reshape(-1, 1, 8, 8)).probabilities.reshape(64, 20)
    go = threading.Barrier(64)

    def one(number: int) -> Any:
        go.wait(120)
        (output,) = infer(server.url, x[number], outputs=[{"name": "probabilities"}])["outputs"]
        return output["data"]

    with ThreadPoolExecutor(64) as pool:
        for found, right in zip(pool.map(one, range(64)), expected, strict=True):
            assert found == pytest.approx(right, abs=1e-5)


@pytest.mark.parametrize("stage", ["imports", "loading", "serving", "ending"])
def test_ctrl_c_prints_no_traceback(bundle: Path, tmp_path: Path, stage: str) -> None:
    log = tmp_path / "log"
    options = ["-X", "importtime"] if stage == "imports" else []  # every import is a line of the log
    command = [sys.executable, *options, "-m", "plateaux", "serve", str(bundle), "--port", "0", "--workers", "2"]
    env = {**os.environ, "PYTHONPATH": str(Path(plateaux.__file__).parents[1])}
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=env, start_new_session=True)
    server = RunningServer(process, "", log)
    begun = {
        "imports": lambda: "typer" in log.read_text(),
        "loading": lambda: list_workers(server),
        "serving": lambda: count_ready(server) == 2,
        "ending": lambda: count_ready(server) == 2,
    }
    wait_until(begun[stage])
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all processes
    while stage == "ending" and process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)  # at every moment until the end
        time.sleep(0.001)
    code = process.wait(120)
    assert code in {"imports": [-signal.SIGINT], "ending": [0, -signal.SIGINT]}.get(stage, [0])
    for text in ("Traceback", "KeyboardInterrupt", "ERROR"):
        assert text not in log.read_text()


def test_a_service_whose_standard_error_is_closed_ends_after_sigterm(bundle: Path) -> None:
    port = find_port("127.0.0.1", 0)
    command = [sys.executable, "-m", "plateaux", "serve", str(bundle), "--port", str(port)]
    env = {**os.environ, "PYTHONPATH": str(Path(plateaux.__file__).parents[1])}
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=env) as process:
        assert process.stderr is not None
        process.stderr.close()

        def is_ready() -> bool:
            assert process.poll() is None
            with suppress(OSError):
                return ask(f"http://127.0.0.1:{port}", "/v2/health/ready")[0] == 200
            return False

        wait_until(is_ready)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0


def test_a_bundle_that_cannot_be_served_is_an_error_and_never_serving(bundle: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(bundle, tmp_path / "broken"))
    opened = Bundle.open(bundle)
    golden = (bundle / "golden.safetensors").read_bytes()
    start = 8 + int.from_bytes(golden[:8], "little")  # the end of the header
    (broken / "golden.safetensors").write_bytes(golden[:start] + bytes(len(golden) - start))
    record = FileRecord(len(golden), hashlib.sha256((broken / "golden.safetensors").read_bytes()).hexdigest())
    files = {**opened.manifest.files, "golden.safetensors": record}
    (broken / "manifest.json").write_bytes(replace(opened.manifest, files=files).to_bytes())
    env = {**os.environ, "PYTHONPATH": str(Path(plateaux.__file__).parents[1])}
    command = [sys.executable, "-m", "plateaux", "serve", str(broken), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=400)
    output = done.stdout + done.stderr
    assert done.returncode == 4, output
    assert "for the golden inputs of the bundle" in output
    assert "serving" not in output.replace(str(tmp_path), "")
    assert "Traceback" not in output


def test_a_pinned_bundle_is_served_only_if_it_is_that_bundle(bundle: Path) -> None:
    code, _, message = call("serve", str(bundle), "--sha256", "0" * 64)
    assert (code, "is another bundle: its SHA-256 is" in message) == (4, True)


def test_the_command_rejects_invalid_options(bundle: Path, tmp_path: Path) -> None:
    code, _, message = call("serve", str(tmp_path))
    assert (code, "is not a bundle" in message) == (4, True)
    run = bundle.parent / "run"
    assert f"`plateaux export {run} -o BUNDLE`" in call("serve", str(run))[2].replace("\n", "")
    code, _, message = call("serve", str(bundle), "--name", "a/b")
    assert (code, "part of URLs" in message) == (2, True)
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        code, _, message = call("serve", str(bundle), "--port", str(used.getsockname()[1]))
    assert (code, "choose another --port" in message) == (2, True)


def test_a_port_that_is_in_use_leaves_no_open_socket() -> None:
    with socket.socket() as used, warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", ResourceWarning)
        used.bind(("127.0.0.1", 0))
        used.listen()
        with pytest.raises(RecipeError, match="choose another --port"):
            find_port(*used.getsockname())
        gc.collect()
    assert [each for each in found if "socket" in str(each.message)] == []


def test_the_service_does_not_import_torch() -> None:
    code = "import sys, plateaux.cli.main, plateaux.serving.server; assert 'torch' not in sys.modules"
    env = {**os.environ, "PYTHONPATH": str(Path(plateaux.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)
