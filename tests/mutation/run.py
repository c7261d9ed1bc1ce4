"""Mutation testing: inject plausible bugs into the numerics one at a time, and see whether the tests catch them.

    python tests/mutation/run.py                             a sample of every module, two mutants at a time
    python tests/mutation/run.py --only models/pruning.py    one module
    python tests/mutation/run.py --list                      the mutants, without running them

`modules.py` names the modules and their tests, `operators.py` makes the mutants; equal sources have equal samples.
Every worker has a temporary copy of the repository and changes only that. For each module, its tests run once without
a mutant first, because a test that fails anyway catches nothing. Exit code 0: at least 95 % were caught; 1: fewer; 2:
the tests fail without a mutant. The last line is JSON, with the survivors. It is not collected by pytest.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).parent))

from modules import TESTS  # noqa: E402
from operators import Mutant, sample  # noqa: E402

GOAL = 0.95
PER_MODULE = 6
# Imported once and inherited by every child process: most of the time of a short test run is spent on imports.
PRELOAD = (
    *("torch", "torch._inductor", "torch.distributed", "torch.testing", "numpy", "sklearn.metrics"),
    *("pytest", "hypothesis", "pydantic", "safetensors.torch", "scipy.stats", "pytorch_optimizer"),
)
COPIED = ("src", "tests", "recipes", "pyproject.toml")


def main() -> int:
    options = _parse()
    source = ROOT / "src" / "plateaux"
    selected = {name: sample(name, (source / name).read_bytes(), options.count) for name in options.only or TESTS}
    if options.list:
        print("\n".join(str(mutant) for mutants in selected.values() for mutant in mutants))
        return 0
    _preload()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="plateaux-mutants-") as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(options.jobs):
            trees.put(_copy(Path(folder) / str(number)))
        caught: list[bool] = []
        with ThreadPoolExecutor(options.jobs) as pool:
            for module, mutants in selected.items():
                seconds = None if options.skip_baseline else _time_baseline(module, trees)
                if seconds is not None and math.isinf(seconds):
                    print(f"the tests of {module} fail without a mutant")
                    return 2
                limit = max(options.timeout, 5 * (seconds or 0.0))
                caught += pool.map(lambda mutant, limit=limit: _is_caught(mutant, trees, limit), mutants)
    tested = [mutant for mutants in selected.values() for mutant in mutants]
    survived = [str(mutant) for mutant, is_caught in zip(tested, caught, strict=True) if not is_caught]
    rate = sum(caught) / len(caught)
    result = {"mutants": len(caught), "caught": sum(caught), "rate": round(rate, 4), "survived": survived}
    print(json.dumps({**result, "seconds": round(time.monotonic() - start)}))
    return 0 if rate >= GOAL else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=2, help="mutants tested at a time (2)")
    parser.add_argument("--only", action="append", choices=list(TESTS), help="only this module; can be repeated")
    parser.add_argument("--count", type=int, default=PER_MODULE, help=f"mutants of each module ({PER_MODULE})")
    parser.add_argument(
        "--timeout",
        type=float,
        default=300,
        help="seconds after which a mutant counts as caught, at least 5 times those without a mutant (300)",
    )
    parser.add_argument("--skip-baseline", action="store_true", help="the tests are known to pass without a mutant")
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    return parser.parse_args()


def _preload() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in PRELOAD:
        with contextlib.suppress(ImportError, RuntimeError):  # optional, or incompatible with this torch
            importlib.import_module(name)
    assert "plateaux" not in sys.modules, "children must import the mutated copy"


def _copy(target: Path) -> Path:
    """Copy what the tests need, and compile it, so that only the changed file is compiled again."""
    target.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, target / name)
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(target / "src")], check=True)
    return target


def _time_baseline(module: str, trees: SimpleQueue[Path]) -> float:
    """Return the time of a module's tests without a mutant, or infinity if they fail."""
    tree = trees.get()
    try:
        code, seconds = _run_tests(tree, TESTS[module], 1800)
        return math.inf if code else seconds
    finally:
        trees.put(tree)


def _is_caught(mutant: Mutant, trees: SimpleQueue[Path], timeout: float) -> bool:
    tree = trees.get()
    file = tree / "src" / "plateaux" / mutant.file
    original, stat = file.read_bytes(), file.stat()
    try:
        file.write_bytes(mutant.apply(original))
        code, seconds = _run_tests(tree, TESTS[mutant.file], timeout)
    finally:
        file.write_bytes(original)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # the compiled original is valid again
        trees.put(tree)
    print(f"{'caught  ' if code else 'SURVIVED'} {seconds:5.1f} s  {mutant}", flush=True)
    return code != 0


def _run_tests(tree: Path, tests: Iterable[str], timeout: float) -> tuple[int, float]:
    """Run tests of a copy in a child process until the first failure; return its exit code and the time."""
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        _test_in_child(tree, tests)
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), time.monotonic() - start
        if time.monotonic() - start > timeout:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return -signal.SIGKILL, time.monotonic() - start
        time.sleep(0.05)


def _test_in_child(tree: Path, tests: Iterable[str]) -> None:
    code = 3
    try:
        os.setsid()  # a group of its own, so that processes that the tests start end with it
        os.chdir(tree)
        os.environ["PYTHONPATH"], os.environ["PYTHONDONTWRITEBYTECODE"] = str(tree / "src"), "1"
        sys.path.insert(0, str(tree / "src"))
        sys.dont_write_bytecode = True
        with open(tree / "tests.log", "w", encoding="utf-8") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not cuda", "--basetemp", str(tree / "tmp")]
        code = int(pytest.main([*options, *(str(tree / "tests" / name) for name in tests)]))
    finally:
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
