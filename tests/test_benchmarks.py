"""Every benchmark runs, and ends with the one JSON line that says what it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted(path for path in Path("benchmarks").glob("*.py") if not path.name.startswith("_"))
NEED_CIFAR = {"doubt"}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_benchmark_ends_with_figures_limits_and_a_verdict(script: Path) -> None:
    if script.stem in NEED_CIFAR and not (Path(os.environ.get("PLATEAUX_DATA", "data")) / "weights").is_dir():
        pytest.skip("CIFAR-10 and the weights are not here: set PLATEAUX_DATA")
    if script.stem == "ray":
        pytest.importorskip("ray", reason="Ray is not installed")
    done = subprocess.run(
        [sys.executable, str(script), "--quick", "--json"], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert set(found["limits"]) <= set(found["figures"])
    assert found["quick"] is True
    assert isinstance(found["ok"], bool)
