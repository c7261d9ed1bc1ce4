"""Shared configuration of all tests: one thread, fixed seeds, real data if available."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

# Before torch is imported, and inherited by every process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import numpy as np
import pytest
import torch

hypothesis.settings.register_profile("plateaux", deadline=None)  # a loaded machine is slow, not wrong
hypothesis.settings.load_profile("plateaux")
torch.set_num_threads(1)
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # a shell's background jobs ignore it, and so would their children
    signal.signal(signal.SIGINT, signal.default_int_handler)


Script = Callable[..., subprocess.CompletedProcess[str]]


# Hundreds of trainings over lines that other tests count too: to count them here takes half as long again.
NOT_COUNTED = (
    "laws",
    "distributed/test_process_pool.py",
    "integration/test_kill.py",
    "integration/test_ray.py",
    "project/test_recipes.py",
    "training/test_partition.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `cuda` where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Count no lines where that only takes time, nor let the processes that are started there count theirs."""
    path = item.path.relative_to(Path(__file__).parent)
    if not any(path.is_relative_to(each) for each in NOT_COUNTED):
        return (yield)
    here, threads = sys.gettrace(), threading.gettrace()
    told = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("COVERAGE_")}
    sys.settrace(None)
    threading.settrace(None)
    try:
        return (yield)
    finally:
        os.environ.update(told)
        threading.settrace(threads)
        sys.settrace(here)


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Give every test the same global random state and one thread, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def script() -> Script:
    """Return a function that runs a script of the project to its end, its lines not counted: in half the time."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}

    def run(file: str | Path, *words: str, seconds: float = 280) -> subprocess.CompletedProcess[str]:
        call = [sys.executable, str(file), *words]
        return subprocess.run(call, capture_output=True, text=True, timeout=seconds, check=False, env=env)

    return run


@pytest.fixture
def untouched_randomness() -> Iterator[None]:
    """Fail the test that asks for this if it draws from a global generator."""
    before = _global_randomness()
    yield
    after = _global_randomness()
    moved = [name for name in before if before[name] != after[name]]
    if moved:
        pytest.fail(f"drew from the global generator of {', '.join(moved)}; randomness must come from a key")


@pytest.fixture
def data_root() -> Callable[[str], Path]:
    """Return a function from a set's folder or file to the root that holds it: `data_root("cifar-10-batches-bin")`."""

    def root_with(inside: str) -> Path:
        given = os.environ.get("PLATEAUX_DATA")
        if not given:
            pytest.skip(f"PLATEAUX_DATA is not set, so there is no {inside}")
        if not (Path(given) / inside).exists():
            pytest.skip(f"PLATEAUX_DATA={given} has no {inside}")
        return Path(given)

    return root_with


def _global_randomness() -> dict[str, object]:
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": str(np.random.get_state(legacy=False)),
        "random": random.getstate(),
    }


@pytest.fixture
def log_lines() -> Iterator[list[str]]:
    """Return a list that collects the log messages of Plateaux, from INFO upwards."""
    lines: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("plateaux"), Collect()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)
