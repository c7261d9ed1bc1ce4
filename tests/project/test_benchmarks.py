"""Every benchmark runs and ends with one JSON line of results."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from conftest import Script

SCRIPTS = sorted(path for path in Path("benchmarks").glob("*.py") if not path.name.startswith("_"))
NEED_CIFAR = {"doubt"}


# A cluster is a dozen processes: one at a time, and time for them where a machine's cores are not its own.
RAY = [pytest.mark.xdist_group("ray"), pytest.mark.timeout(600)]
CASES = [pytest.param(path, id=path.stem, marks=RAY if path.stem == "ray" else []) for path in SCRIPTS]


@pytest.mark.parametrize("file", CASES)
def test_a_benchmark_ends_with_metrics_limits_and_a_verdict(file: Path, script: Script) -> None:
    if file.stem in NEED_CIFAR and not (Path(os.environ.get("PLATEAUX_DATA", "data")) / "weights").is_dir():
        pytest.skip("CIFAR-10 and the weights are not here: set PLATEAUX_DATA")
    if file.stem == "ray":
        pytest.importorskip("ray", reason="Ray is not installed")
    done = script(file, "--quick", "--json", seconds=560 if file.stem == "ray" else 280)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert set(found["limits"]) <= set(found["figures"])
    assert found["quick"] is True
    assert isinstance(found["ok"], bool)
