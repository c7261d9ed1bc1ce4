"""The tutorial *Deploy*, exactly as written: its files, its scripts, and its commands in one shell."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import plateaux
from tests.project.test_docs import ROOT, blocks

NEEDED = ("onnx", "onnxscript", "onnxruntime", "starlette", "granian", "prometheus_client", "PIL")


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.skipif(any(find_spec(name) is None for name in NEEDED), reason='pip install "plateaux[vision,serve]"')
def test_the_deploy_tutorial_runs_as_written(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    source = Path(plateaux.__file__).parents[1]
    commands, scripts = [], []
    for block in blocks(ROOT / "docs" / "get-started" / "deploy.md"):
        text = block.text.replace("8000", port).replace("PYTHONPATH=.", f"PYTHONPATH=.:{source}")
        if block.title:
            (tmp_path / block.title).write_text(text, encoding="utf-8")
        elif block.language == "python":
            scripts.append(text)
        elif block.language == "bash":
            commands.append(text)
    binaries = tmp_path / "bin"
    binaries.mkdir()
    for name, words in (("plateaux", "-m plateaux"), ("python", "")):
        (binaries / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (binaries / name).chmod(0o755)
    env = {
        **os.environ,
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(source),
        "OMP_NUM_THREADS": "1",
    }
    for script in scripts:
        subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, check=True)
    # `set -m` gives the service a job number, and the trap stops it if a command fails.
    shell = "set -em\ntrap 'kill %1 2>/dev/null || true' EXIT\n" + "".join(commands) + "\nwait\n"
    done = subprocess.run(["bash", "-c", shell], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert not (tmp_path / "patternnet.py").exists()
    (answer,) = json.loads((tmp_path / "answer.json").read_text())["predictions"]
    assert answer["label_name"] in ("stripes", "rings", "checks")
    assert answer["prediction_set"] is not None
    assert answer["abstain"] in (True, False)
    printed = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.split(" ")[0] in answer)
    assert json.loads(printed["probability"])[0] == pytest.approx(answer["probability"], abs=1e-5)
    assert json.loads(printed["ood_score"])[0] == pytest.approx(answer["ood_score"], abs=1e-5)
    assert printed["abstain"] == f"[{answer['abstain']}]"
