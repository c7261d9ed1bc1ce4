"""The types of the public API, as the type checker of a user sees them although names are imported at first use."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

RIGHT = """\
from pathlib import Path

import torch

import plateaux
from plateaux import Ensemble, EvalOptions, Recipe, Run

recipe: Recipe = plateaux.Recipe.load("quickstart", ["members=2"])
members: int = recipe.members
run: Run = plateaux.train(recipe, out=Path("runs/demo"))
result: plateaux.Evaluation = plateaux.evaluate(run, options=EvalOptions(limit=100))
accuracy: float = result["accuracy"].ensemble.value
calibration: plateaux.Calibration = plateaux.calibrate(run)
ensemble: Ensemble = plateaux.load(run)
probabilities: torch.Tensor = ensemble.predict(torch.zeros(1, 1, 8, 8))


@plateaux.method
def mine(loss: object, *, rho: float = 0.05) -> plateaux.Method:
    raise NotImplementedError
"""
WRONG = """\
import plateaux

plateaux.trian("quickstart")
plateaux.evaluate(run=3)
error: int = plateaux.Recipe.load("quickstart").optimizer
print(plateaux.load("runs/demo").members + 1)
"""


def test_mypy_accepts_right_uses_of_the_public_api_and_finds_wrong_names_and_types(tmp_path: Path) -> None:
    """One process checks both files: reading the modules that they import takes it most of its time."""
    assert len(RIGHT.splitlines()) == 20
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(WRONG)
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml"]
    env = {**os.environ, "MYPYPATH": "src"}
    files = [str(tmp_path / name) for name in ("right.py", "wrong.py")]
    done = subprocess.run([*command, *files], capture_output=True, text=True, timeout=280, check=False, env=env)
    assert done.returncode == 1, done.stdout + done.stderr
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    found = [(Path(line.partition(":")[0]).name, line.rpartition("[")[2].rstrip("]")) for line in errors]
    codes = ("attr-defined", "arg-type", "assignment", "operator")
    assert found == [("wrong.py", code) for code in codes], errors


@pytest.mark.skipif(shutil.which("pyright") is None, reason="pyright is not installed")
def test_pyright_finds_the_same_mistakes(tmp_path: Path) -> None:
    settings = {"pythonVersion": "3.11", "extraPaths": [str(Path("src").resolve())], "include": ["."]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(WRONG)
    command = ["pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, cwd=tmp_path)
    found = [(Path(each["file"]).name, each["rule"]) for each in json.loads(done.stdout)["generalDiagnostics"]]
    rules = ("reportAttributeAccessIssue", "reportArgumentType", "reportAssignmentType", "reportOperatorIssue")
    assert found == [("wrong.py", rule) for rule in rules]
