"""Shared configuration of all tests: one thread, fixed seeds, real data if available."""

from __future__ import annotations

import logging
import os
import random
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

# Before torch is imported, and inherited by every process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTHONFAULTHANDLER", "1")  # a process that crashes prints where

import hypothesis
import numpy as np
import processes
import pytest
import torch

hypothesis.settings.register_profile("plateaux", deadline=None)  # a loaded machine is slow, not wrong
hypothesis.settings.load_profile("plateaux")
torch.set_num_threads(1)
# timm, Lightning, and transformers fail to import with a CPU build of torch and a CUDA build of torchvision.
_OPERATORS = Path(__file__).parent / "torchvision_operators"
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_OPERATORS), os.environ.get("PYTHONPATH")]))
runpy.run_path(str(_OPERATORS / "sitecustomize.py"))
# Background jobs of a shell ignore SIGINT, and child processes inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


Script = Callable[..., subprocess.CompletedProcess[str]]


# Hundreds of training runs and processes over lines that other tests cover too. Measuring coverage here would add 50 %
# of time, and three seconds to every process that imports torch.
WITHOUT_COVERAGE = (
    "attacks",
    "laws",
    "distributed/test_process_pool.py",
    "distributed/test_subprocesses.py",
    "integration",
    "project/test_docs.py",
    "project/test_recipes.py",
    "training/test_partition.py",
)


# The folders of unit tests, which `make test` runs. Their tests start no process, except those marked `process`.
UNIT = {
    *("config", "core", "data", "ensembles", "evaluation", "loss_landscape", "methods", "models", "optim"),
    *("storage", "training"),
}
_STARTED_BEFORE = pytest.StashKey[int]()


@pytest.fixture(autouse=True)
def _starts_no_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a unit test that starts a process, which is slow, unless it is marked."""
    yield
    before = request.node.stash[_STARTED_BEFORE]  # also before the fixtures of its module
    folder = request.path.relative_to(Path(__file__).parent).parts[0]
    if processes.started > before and folder in UNIT and not request.node.get_closest_marker("process"):
        pytest.fail("The test started a process. Mark it with pytest.mark.process, or use the code in this process.")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests marked `cuda` where there is no CUDA device, and keep the groups of xdist together."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if getattr(config.option, "loadgroup", False):  # a worker of `-n ... --dist loadgroup`
        for item in items:
            _name_after_its_group(item)


def _name_after_its_group(item: pytest.Item) -> None:
    """Append the group of a test to its id, by which xdist sends all tests of a group to one worker.

    xdist 3.8 writes to an attribute that pytest 9.2 does not read any more, and groups are divided without a word:
    every worker makes its own bundles, servers, and clusters. https://github.com/pytest-dev/pytest-xdist/issues/1386
    """
    mark = item.get_closest_marker("xdist_group")
    if mark is None or item.nodeid.endswith(f"@{mark.args[0]}"):
        return
    name = f"{item.nodeid}@{mark.args[0]}"
    item._id = type(item.id).parse(name)  # type: ignore[attr-defined]
    assert item.nodeid == name, f"pytest {pytest.__version__} takes the id of a test from elsewhere"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Switch off coverage for the tests in WITHOUT_COVERAGE and for the processes that they start; count processes."""
    item.stash[_STARTED_BEFORE] = processes.started
    path = item.path.relative_to(Path(__file__).parent)
    if not any(path.is_relative_to(prefix) for prefix in WITHOUT_COVERAGE):
        return (yield)
    trace, thread_trace = sys.gettrace(), threading.gettrace()
    coverage_env = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("COVERAGE_")}
    sys.settrace(None)
    threading.settrace(None)
    try:
        return (yield)
    finally:
        os.environ.update(coverage_env)
        threading.settrace(thread_trace)
        sys.settrace(trace)


@pytest.fixture(autouse=True)
def _reset_global_state() -> Iterator[None]:
    """Give every test the same global random state and one thread."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield
    torch.set_default_dtype(torch.float32)
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def script() -> Script:
    """Return a function that runs a script of the project without coverage, which takes half the time."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}

    def run(file: str | Path, *args: str, seconds: float = 280) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(file), *args]
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, env=env)

    return run


@pytest.fixture
def rng_unchanged() -> Iterator[None]:
    """Fail a test if it uses a global random generator."""
    before = _global_rng_states()
    yield
    after = _global_rng_states()
    changed = [name for name in before if before[name] != after[name]]
    if changed:
        pytest.fail(f"The global generator of {', '.join(changed)} was used. Derive a seed with derive_seed instead.")


@pytest.fixture
def data_root() -> Callable[[str], Path]:
    """Return a function that returns the data root if it contains a file or folder, and skips the test otherwise."""

    def require(path: str) -> Path:
        root = os.environ.get("PLATEAUX_DATA")
        if not root:
            pytest.skip(f"PLATEAUX_DATA is not set, so there is no {path}")
        if not (Path(root) / path).exists():
            pytest.skip(f"PLATEAUX_DATA={root} has no {path}")
        return Path(root)

    return require


def _global_rng_states() -> dict[str, object]:
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
