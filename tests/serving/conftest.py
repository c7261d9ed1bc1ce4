"""A bundle of three small networks, and a real server for it in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from digit_runs import train_digits
from waiting import wait_until

import plateaux


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """Restore the handler of Ctrl-C, which the command `serve` changes."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serving")
    train_digits(folder / "run", members=3)
    plateaux.calibrate(folder / "run", target_risk=0.2)
    plateaux.export(folder / "run", folder / "digits")
    return folder / "digits"


@dataclass(frozen=True)
class RunningServer:
    """A server process and its address."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


@contextmanager
def running(bundle: Path, folder: Path, *options: object, **environment: str) -> Iterator[RunningServer]:
    """Start `plateaux serve` on a free port, and stop it at the end."""
    log = folder / f"serve-{time.monotonic_ns()}.log"
    command = [sys.executable, "-m", "plateaux", "serve", str(bundle), "--port", "0", *map(str, options)]
    env = {**os.environ, "PYTHONPATH": str(Path(plateaux.__file__).parents[1]), "OMP_NUM_THREADS": "1", **environment}
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, text=True, env=env, start_new_session=True)
    try:
        yield RunningServer(process, _wait_until_ready(process, log), log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until_ready(process: subprocess.Popen[str], log: Path) -> str:
    def find_ready() -> str | None:
        assert process.poll() is None, log.read_text()
        found = re.search(r"on (http://[^\s]+)", log.read_text())
        with suppress(OSError):
            if found:
                with urllib.request.urlopen(f"{found[1]}/v2/health/ready", timeout=60) as response:
                    assert response.status == 200
                return found[1]
        return None

    return wait_until(find_ready)


@pytest.fixture(scope="session")
def server(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running(bundle, tmp_path_factory.mktemp("log"), "--log-requests") as made:
        yield made
